"""Make one calibration of what many boards have seen, from their histograms, never from frames.

Reading order: `exchange` (histograms are requested from boards), `inbox` (chunks become uploads), `calibration`
(uploads become one calibration), `outliers` (boards that do not belong to the group).

Public names:
    calibration  BUNDLE, MergedCalibration, Merger, bundle, merge_calibration, write_bundle
    exchange     MergeExchange
    inbox        AnnouncedUpload, UploadInbox
    outliers     Distance, Group, OutlierLimits, Sketch
"""
