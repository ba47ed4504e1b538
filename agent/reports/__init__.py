"""Reports for people: a calibration, a plan, an artefact or a board's state as one HTML file.

Reading order: `calibration`, `plan`, `artefact` and `state` make the sections of each. `command` is `tared report`; it
finds out what it was given. agent/common/html draws and renders.

Public names:
    calibration  calibration_sections
    plan         plan_sections
    artefact     artefact_report, keep_report
    state        state_report
    command      make_report
"""
