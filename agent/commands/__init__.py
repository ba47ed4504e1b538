"""Receive commands, check who may give them, carry each out once, and answer it.

Reading order: authority (keys, roles, releases), log (what was carried out), dispatcher (from bytes to a result),
recognition (which commands have room of their own in a flood); then
settings, file_transfer, deliveries and labels, which single commands and documents need.

Public:
    authority       Authority, Releases
    deliveries      FileReceiver, ModelAdmission, calibration_admission, StagedCalibration, StagedModel
    dispatcher      Authorisation, bind, CANCELLED, CommandDispatcher, CommandProgress, Handler, failure
    labels          LabelsInbox
    log             CommandLog
    recognition     CommandRecognition
    settings        Settings, admit_desired, check_expiry, parse_desired
"""
