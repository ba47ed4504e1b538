"""Jobs: how they are kept, and how a child process does their work. agent.core decides about them.

Reading order: `job` (the journal), `ledger`, `workshop`, `candidate` (the child process's work).

job             JobJournal, JobRecord: the journal of jobs
ledger          JobLedger, JobSummary: journals and reports jobs, and answers their commands
kept_memory     KeptMemory: what decisions remember over a restart
fingerprints    settings_id, raising_id: what a candidate depends on
offline_queue   OfflineQueue: the work that the owner has made offline
workshop        Workshop, DeliveredModels: hands a job to a child process, and watches it
headroom        Headroom: what the board can afford
recovery        CrashRecovery, RecoveryResult: ends what a crashed process left unfinished

The child process: `request` (JobRequest, write_job, write_reference_job) has what it works on. `child_process`
(JobProcess, JobOutcome: both ends of the pipe) runs `background` (start_background), which runs `candidate` with low
priority: a candidate, or the reference of a new model. The daemon does not import `candidate`.
"""
