"""The core: what the daemon decides about jobs and engines. Plain values go in, and plain values come out.

`decide(now, settings, state, facts, event)` returns the next state, and actions. agent.control carries the actions out,
and brings back the events that follow. No module here waits, reads a clock, or touches a thread, a disk or a network.

- When does a job start? `due`, whose kinds have an order of urgency; by command `orders`; for a new model `models`.
- What may stop it? `due` has what holds a start back. `work` has headroom, time limits and missing frames. `orders` has
  the operator's cancel, switch and rollback, and `models` a newer model. `decide` has the end of the run, a wrong
  reference, and actions that fail. `ending.abandon` and `ending.give_up` are the two ways to end it.
- What happens if its child dies? `ChildEnded` comes all the same, with an error. `ending.fail` ends the job. The engine
  in service was never touched.
- Who swaps? `trials`, after an accepted verdict: on probation first, then `MakeCurrent`.
- What is remembered over a power cut? `state.Memory`. The journal (agent.jobs) has the jobs, and so what the schedule
  and offline work have come to; the store has the engines.

Reading order: `kinds`, `state`, `facts`, `actions`, `decide`, `due`, `work`, `trials`, `ending`.

kinds     the kinds of job, and Trigger
state     State, Memory, Job, JobState, Trial, Hindrance: what decisions rest on
facts     Facts, Now, and the events
actions   what a decision asks for
decide    decide, Decision: which part takes an event; starts and failures
due       find_due, is_low, scheduled: which job is due, and what holds it back
orders    the operator's commands
models    new models
work      collecting, headroom, the child process
trials    an engine on trial
ending    how a job ends, and what is remembered of it
causes    Cause, cause_of: what the error of a job says
turn      Turn: one decision while it is made
"""
