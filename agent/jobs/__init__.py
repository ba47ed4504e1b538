"""Jobs: from a trigger to an accepted candidate. A recalibration, a new model, a switch or a rollback is a job.

Reading order: `job` (states, journal, tracker, registry), `recalibration` (the job's way), `candidate` (the
child process's work). A job's states between "verdict" and "current" belong to agent.control.swap.

job             JobState, JobJournal, JobRecord, JobTracker, JobRegistry, MODEL, PROVEN, RUNTIME
limits          AutomationLimits, PrecisionAttempts, ROLLBACK_LOOP
recalibration   Recalibration, Job, CollectionWait, SupervisedChild
headroom        Headroom
new_model       NewModel
recovery        CrashRecovery, RecoveryResult

The child process: `child_process` (JobProcess, JobOutcome: both ends of the pipe) runs `background`, which runs
`candidate` or `reference` with low priority.
"""
