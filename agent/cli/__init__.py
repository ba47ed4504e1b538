"""The board's commands of `tared`. Each group declares its arguments, and imports what it runs only when it runs.

Reading order: main, arguments; then a group: offline (arguments) with offline_runs (the work), store, service. The two
offline modules are apart because offline_runs loads OpenCV, which `tared send` and `tared --version` must not wait for.

Public names:
    arguments     Parser, command, number, option, print_result, table_console
    main          main, CommandGroup, EXIT_ERROR, EXIT_INTERRUPTED, EXIT_PIPE, EXIT_RESTART
    offline_runs  run_calibrate, run_build, run_infer, run_evaluate, open_engine
"""
