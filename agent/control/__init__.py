"""Control: what the daemon decides, in the main thread.

Reading order: `operations` (the loop), `triggers` (which job is due), `swap` (from verdict to `current`), `events`.

operations   Operations: moves all of it on, and carries out the operator's commands
triggers     Triggers, Schedule, Hindrance, is_low: which job is due; Triggers also decides that precision is raised
swap         EngineSwap: what runs between an accepted verdict and `current`: trial, probation, commit or rollback
events       StateChangeReporter: reports drift, low fidelity, trouble of a view
reasons      explain, Reasons: why the board is degraded, and what holds a job back
summary      RunSummary, JobSummary, Swap, Rollback, Alarm, Period, Score, CameraSummary
"""
