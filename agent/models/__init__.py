"""Models and their engines: from a model spec to an engine artefact, and which engine is in service.

Reading order: `model`, `build`, `offline_work`, `engine_service`, `external_data`, `model_watch`.

model            Model, open_model, Rules, read_rules, calibrate, check_calibration, check_ranges, read_plan,
                 slower_here, tap_weights
build            build_artefact, adopt_artefact, build_int8
offline_work     OfflineWork, LoadedWork, START, CALIBRATION_FILE
engine_service   EngineService, LoadedEngine, StartEngine, reject
external_data    external_names, external_names_apart, ExternalNames
model_watch      ModelWatch, content_of
"""
