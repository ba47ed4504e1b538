"""How a job ends, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core.causes import CANCELLED, Cause, cause_of
from agent.core.kinds import NewModel, OfflineStart, RaisedPrecision, Switch, Trigger
from agent.core.state import Job, JobState, Refusal
from agent.core.turn import Turn

if TYPE_CHECKING:
    from calibrate.errors import TaredError

_RETRY_S = 60.0  # before a model is tried again


def succeed(turn: Turn, artefact: str) -> None:
    job = turn.job
    turn.set(job=None, last_error=None, is_untidy=True, clears_rollbacks=job.kind.trigger is Trigger.COMMAND)
    turn.do(act.End(job, JobState.COMMITTED, result={"artefact": artefact, "fidelity": job.fidelity}))


def fail(turn: Turn, error: TaredError, rolled_back: bool = False) -> None:
    """End the job with an error, and its recall well: the previous engine serves."""
    job, trial = turn.job, turn.state.trial
    state = JobState.CANCELLED if cause_of(error) is Cause.CANCELLED else JobState.FAILED
    state = JobState.ROLLED_BACK if rolled_back else state
    turn.set(job=None, trial=None, last_error=error, is_untidy=True)
    if state is not JobState.CANCELLED:
        note_failure(turn, job, error)  # before the journal: after a kill in between nothing is tried again in vain
    turn.do(act.End(job, state, error))
    if isinstance(job.kind, NewModel):
        after_model(turn, job, error)
    if trial is not None and trial.recall is not None:
        turn.do(act.End(trial.recall, JobState.COMMITTED, result={"artefact": turn.facts.serving}))


def note_failure(turn: Turn, job: Job, error: TaredError) -> None:
    """Note what must not be tried again, or not before something has changed."""
    kind, cause, memory = job.kind, cause_of(error), turn.state.memory
    if kind.is_own or (isinstance(kind, Switch) and not kind.by_command):
        turn.pause_jobs()
        memory = turn.state.memory
    if isinstance(kind, RaisedPrecision):
        refused = memory.raised.get(kind.artefact, 0)
        if cause in (Cause.EXHAUSTED, Cause.RECALLED):
            turn.set(memory=memory.with_raised(kind.artefact, None))
        elif cause is Cause.REFUSED and refused is not None:
            turn.set(memory=memory.with_raised(kind.artefact, refused + 1))
        turn.remember()
    elif isinstance(kind, OfflineStart):
        if cause is Cause.REFUSED:
            turn.set(vain={**turn.state.vain, kind.attempt: error})
        turn.do(act.RestartCollection())  # the frames of the board's own calibration are chosen
    elif job.attempt is not None and cause is Cause.REFUSED and job.attempt.settings == turn.facts.settings:
        turn.set(memory=replace(memory, refusal=Refusal(job.attempt, error)))
        turn.remember()
        turn.do(turn.comparison)


def after_model(turn: Turn, job: Job, error: TaredError) -> None:
    """Try a model no more where the error is its own; another error says nothing of it.

    A delivered one is tried once: its sender may send it again.
    """
    model, cause = turn.state.model, cause_of(error)
    if model is None or model.job != job.id:  # another one has come meanwhile
        return
    own = cause in (Cause.UNSERVABLE, Cause.ANSWERS, Cause.REFUSED, Cause.RECALLED)
    if model.command:
        turn.set(model=None)
        # Unless the model cannot be served, the received file stays, so that sending it again costs no transfer.
        turn.do(act.DropModel(model.command, for_good=cause is Cause.UNSERVABLE))
    else:
        retry_s = turn.now.monotonic_s + _RETRY_S
        turn.set(model=None if own else replace(model, job="", retry_s=retry_s))


def give_up(turn: Turn, error: TaredError) -> None:
    """End the job, whatever it is doing, with this error."""
    if turn.job.child_since_s is not None:
        turn.do(act.EndChild())
    fail(turn, error)


def fail_trial(turn: Turn, error: AgentError) -> None:
    """End a trial for a reason that is not the candidate's fault."""
    job, trial = turn.job, turn.state.trial
    if trial is not None and not job.kind.is_proven:
        turn.do(act.Reject(job, trial.artefact, error))
    fail(turn, error)


def abandon(turn: Turn, reason: str) -> None:
    """Cancel a job that has no engine yet, for this reason."""
    if turn.is_working:
        give_up(turn, AgentError(CANCELLED, reason, "a job that may run to its end", "start the job again"))
