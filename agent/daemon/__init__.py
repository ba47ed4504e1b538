"""Run the daemon: `tared run`.

Reading order: run (from the broker to the summary), supervisor (the main thread), inbox (messages), handlers
(commands), status (a snapshot as the answer to `status`, telemetry, history, display and summary). pages, prometheus,
review and summary_table serve single places.

Public:
    handlers        RESTART
    run             run_daemon
    summary_table   print_summary
"""
