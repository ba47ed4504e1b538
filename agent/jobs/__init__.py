"""Jobs: from a trigger to an accepted candidate. A recalibration, a new model, a switch or a rollback is a job.

A job starts by itself if control.triggers has one due, AutomationLimits and RefusalMemory allow it, control.operations
is idle, and the store has room. Its child process starts once Headroom allows.

Reading order: `job` (states, journal, tracker, registry), `recalibration` (the job's way), `candidate` (the
child process's work). A job's states between "verdict" and "current" belong to agent.control.swap.

job             JobState, JobJournal, JobRecord, JobTracker, Job, JobRegistry, MODEL, PROVEN, RUNTIME, TRIGGERS
limits          AutomationLimits, PrecisionAttempts, ROLLBACK_LOOP
refusal         RefusalMemory, Refusal, Attempt
offline_queue   OfflineQueue, OfflineAttempt
recalibration   Recalibration, CollectionWait, SupervisedChild
headroom        Headroom
new_model       NewModel
recovery        CrashRecovery, RecoveryResult

The child process: `request` (JobRequest, write_job, write_reference_job) has what it works on. `child_process`
(JobProcess, JobOutcome: both ends of the pipe) runs `background` (start_background), which runs `candidate` with low
priority: a candidate, or the reference of a new model. The daemon does not import `candidate`.
"""
