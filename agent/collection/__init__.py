"""Collect frames for the next calibration: which are chosen, what is kept of them, and what is reported.

Reading order: selection (is a frame worth taking?), collection (what is kept of it), report (how it went).

Public names:
    collection: SharedCollection (filled by the observer, read by a job), CalibrationSet
    report:     SelectionReport, remove_sheet
    selection:  HELD_OUT_EVERY
"""
