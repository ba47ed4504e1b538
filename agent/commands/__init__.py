"""Receive commands, check who may give them, carry each out once, and answer it.

Reading order: authority (keys and roles), parser (bytes to a command), log (what was carried out), dispatcher (the way
through); then settings, releases, file_transfer, deliveries and labels, which single commands and documents need.

Public:
    authority       Authority
    deliveries      CalibrationDelivery, FileReceiver, ModelDelivery, StagedCalibration, StagedModel
    dispatcher      Authorisation, CANCELLED, CommandDispatcher, CommandProgress, Handler, failure
    labels          LabelsInbox
    log             CommandLog
    releases        Releases
    settings        Settings, admit_desired, check_expiry, parse_desired
"""
