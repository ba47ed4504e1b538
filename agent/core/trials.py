"""An engine on trial: from the journal's word that it may serve, to the moment when it is kept, or taken back."""

from __future__ import annotations

from dataclasses import replace

from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import ending
from agent.core import facts as fact
from agent.core.causes import RECALLED, Cause, cause_of
from agent.core.kinds import NewModel
from agent.core.state import EngineTrial, Job, JobState
from agent.core.turn import Turn


def try_engine(turn: Turn, job: Job, artefact: str) -> None:
    """Hand the engine to the frame path, once it is journaled that it may serve."""
    turn.set(trial=EngineTrial(artefact))
    turn.enter(JobState.PROBATION, job.percent, artefact)
    turn.do(act.StartTrial(turn.job))


def judge_candidate(turn: Turn) -> None:
    job, trial, probation = turn.state.job, turn.state.trial, turn.facts.probation
    if job is None or trial is None or probation is None or not trial.serves or trial.leaves:
        return
    if turn.state.needs_new_run:
        return
    if probation.objection is not None:
        turn.go_back(job, probation.objection)
    elif probation.finished:
        turn.do(act.Keep(job))


def candidate_serves(turn: Turn, event: fact.CandidateServes) -> None:
    job, trial, probation = turn.on_trial(event.job)
    if job is None or trial is None:
        return
    turn.set(trial=replace(trial, serves=True))
    turn.do(act.Announce(job, event.ts, event.skipped))
    is_finished = job.kind.is_proven or (probation is not None and probation.finished)
    if is_finished and trial.leaves is None:
        turn.do(act.Keep(job))


def candidate_kept(turn: Turn, identity: str) -> None:
    job, trial, _ = turn.on_trial(identity)
    if job is None or trial is None:
        return
    turn.do(act.Commit(job))
    if isinstance(job.kind, NewModel):  # it stays on trial until this run ends: what follows is of another model
        turn.set(needs_new_run=True)
        if job.commands:
            turn.do(act.InstallModel(job.commands[0]))
        return
    turn.set(trial=None, unsaved=None)
    turn.do(act.MakeCurrent(job, trial.artefact))


def made_current(turn: Turn, identity: str, artefact: str) -> None:
    job, unsaved = turn.state.job, turn.state.unsaved
    if unsaved is not None and unsaved.job.id == identity:
        turn.set(unsaved=None)
    elif job is not None and job.id == identity:
        ending.succeed(turn, artefact)


def candidate_left(turn: Turn, event: fact.CandidateLeft) -> None:
    job, trial, _ = turn.on_trial(event.job)
    if job is None or trial is None:
        return
    if trial.serves:
        turn.do(act.BackInService(event.ts))
    rollback = act.ReportRollback(job, event.error, event.ts, event.waited)
    turn.do(rollback)
    if not job.kind.is_proven:
        turn.do(act.Reject(job, trial.artefact, event.error, rollback))
    ending.fail(turn, event.error, rolled_back=True)
    if cause_of(event.error) not in (Cause.RECALLED, Cause.CANCELLED):  # it has failed by itself
        turn.count_rollback()
        turn.do(act.ForgetRegime(trial.artefact))


def trial_ended(turn: Turn, identity: str) -> None:
    """The frames have ended: the candidate is judged by those that it answered, or by its verdict alone."""
    job, trial, probation = turn.on_trial(identity)
    if job is None or trial is None:
        return
    if turn.facts.path_error is not None:
        found, expected = "the frame path has failed", "frames until the probation has ended"
        ending.fail_trial(turn, AgentError("swap.stopped", found, expected, "see the log for the cause"))
        return
    error = trial.leaves
    if error is None and trial.serves and probation is not None:
        error = probation.objection
    if error is not None:
        candidate_left(turn, fact.CandidateLeft(identity, error))
        return
    if not trial.serves:
        turn.do(act.Announce(job, None))
    candidate_kept(turn, identity)


def can_recall(turn: Turn) -> bool:
    """True while a candidate is on probation that nobody has recalled yet."""
    job, trial = turn.state.job, turn.state.trial
    if job is None or trial is None or turn.state.needs_new_run:
        return False
    return not job.kind.is_proven and trial.recall is None


def recall(turn: Turn, recall: Job) -> None:
    """Take the candidate back. It succeeds once the previous engine serves, also where that came by itself."""
    job, trial = turn.state.job, turn.state.trial
    if job is None or trial is None:
        return
    recall = replace(recall, state=JobState.PROBATION)
    turn.set(trial=replace(trial, recall=recall))
    turn.do(act.Enter(recall, artefact=turn.facts.serving))
    turn.go_back(job, _recalled())
    turn.pause_jobs()


def _recalled() -> AgentError:
    found, remedy = "the operator's rollback", "recalibrate from other frames"
    return AgentError(RECALLED, found, "a probation that runs to its end", remedy)
