"""Small tools that every other package may use. It knows nothing of cameras, models or MQTT.

Reading order: errors and schema (every configuration goes through them), clock and timing, database; the others as
needed.

Public names:
    bounded_yaml load_yaml, YamlError
    clock        Clock, SYSTEM_CLOCK, Waker
    console      Task, progress, stage, say, say_error, set_up_logging
    credentials  FileOrCredential, locate
    database     Database, readable_schemas, show_schemas
    errors       AgentError, CameraError, CommandError, ConfigError, DatasetError, FaultLog, fault_remedy
    heap         limit_malloc_arenas, release_free_memory
    latency      LatencyHistogram, LoopMeter, LoopSample, LoopTotals
    main_thread  MainThreadQueue, RunInMainThread
    redaction    hide_arguments, redact, redact_location
    schema       Finite, Strict, read_yaml, validate, verbatim_error
    state_files  Journal, parse_or_none, parse_state
    timing       Backoff, PeriodicTimer, RandomInterval, RetryState, is_final, thinned
"""
