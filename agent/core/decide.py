"""Decide what follows from an event: `decide(now, settings, state, facts, event)` returns the next state, and actions.

Values go in, values come out. Nothing here waits, reads a clock, starts a thread, or touches a disk or a network: the
executor (agent.control.executor) does what the actions say, and comes back with the events that follow from them.

1. A job that is due, or asked for, is `pending` until the journal has it (`Begun`).
2. It collects frames, waits for headroom, and is handed to a child process, which makes a candidate (`ChildEnded`).
3. The candidate is on trial: rehearsal, first answer (`CandidateServes`), probation. It is kept, or taken back.
4. `current` moves to an engine that was kept. Whatever fails before, the previous engine serves.

An action that fails comes back as `Failed`, and those after it in the same list are not carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import ending, models, orders, trials, work
from agent.core import facts as fact
from agent.core.causes import CANCELLED
from agent.core.due import Due, find_due, is_looping
from agent.core.kinds import Kind, NewModel, OperatorRollback, Recall, Scheduled, Switch, Trigger
from agent.core.state import Job, State, Unsaved
from agent.core.turn import Turn, rollback_loop
from agent.monitoring.view import FROZEN

if TYPE_CHECKING:
    from agent.config import Config
    from calibrate.errors import TaredError

_RETRY_S = 60.0  # before another attempt: to start a job, to make an engine current
_STEP_S = 1.0  # a clock that moved by more was set, and not only slewed


@dataclass(frozen=True)
class Decision:
    """What follows from an event. The actions are a chain."""

    state: State
    actions: tuple[act.Action, ...] = ()


def decide(now: fact.Now, settings: Config, state: State, facts: fact.BoardFacts, event: fact.Event) -> Decision:
    """Return what follows from an event."""
    turn = Turn(now, settings, state, facts)
    _take(turn, event)
    return Decision(turn.state, tuple(turn.actions))


def _take(turn: Turn, event: fact.Event) -> None:
    match event:
        case fact.Started():
            _started(turn, event.rolled_back)
        case fact.Tick():
            _tick(turn)
        case fact.Asked():
            orders.recalibrate(turn, event)
        case fact.AskedToCancel():
            orders.cancel(turn, event)
        case fact.AskedToGoBack():
            orders.go_back(turn, event)
        case fact.AskedToSwitch():
            orders.switch(turn, event)
        case fact.ModelChanged():
            models.model_changed(turn, event.content)
        case fact.ModelDelivered():
            models.model_delivered(turn, event)
        case fact.ReferenceWrong():
            _reference_wrong(turn)
        case fact.SettingsChanged():
            turn.compare_with_refused()
        case fact.FramesEnded():
            work.frames_ended(turn)
        case fact.Stopping():
            _stopping(turn, event.reason)
        case fact.DecisionFailed():
            _decision_failed(turn, event.error)
        case fact.Begun():
            _begun(turn, event.job)
        case fact.HandedOver():
            turn.change_job(event.job, attempt=event.attempt, max_loss=event.max_loss)
        case fact.ChildAdvanced():
            work.child_advanced(turn, event)
        case fact.ChildEnded():
            work.child_ended(turn, event)
        case fact.Loaded():
            _loaded(turn, event)
        case fact.CandidateServes():
            trials.candidate_serves(turn, event)
        case fact.CandidateKept():
            trials.candidate_kept(turn, event.job)
        case fact.MadeCurrent():
            trials.made_current(turn, event.job, event.artefact)
        case fact.CandidateLeft():
            trials.candidate_left(turn, event)
        case fact.CandidateGone():
            if turn.on_trial(event.job)[1] is not None:
                ending.fail_trial(turn, event.error)
        case fact.TrialEnded():
            trials.trial_ended(turn, event.job)
        case fact.Failed():
            _failed(turn, event.action, event.error)


def _started(turn: Turn, rolled_back: int) -> None:
    if is_looping(turn.now, turn.settings, turn.state):
        turn.do(act.ReportError(rollback_loop(turn.settings)))
    for _ in range(rolled_back):
        turn.count_rollback()
    if rolled_back:
        turn.pause_jobs()


def _tick(turn: Turn) -> None:
    trials.judge_candidate(turn)
    unsaved = turn.state.unsaved
    if unsaved is not None and turn.now.monotonic_s >= unsaved.retry_s and not turn.state.needs_new_run:
        turn.set(unsaved=replace(unsaved, retry_s=turn.now.monotonic_s + _RETRY_S))
        turn.do(act.MakeCurrent(unsaved.job, unsaved.artefact))
        return  # to go on in a moment, whether the disk refuses it or not
    if turn.state.is_untidy and turn.is_idle:
        _tidy(turn)
    if abs(turn.ahead_s - turn.state.ahead_s) > _STEP_S:
        turn.remember()  # the clock was set: what is kept is in its time
    if turn.now.monotonic_s >= turn.state.no_start_before_s:
        _start_what_is_due(turn)
    if turn.state.trial is None and turn.state.job is not None:
        work.move(turn, turn.state.job)


def _tidy(turn: Turn) -> None:
    if turn.state.clears_rollbacks and turn.state.memory.restraint.rollbacks_s:
        turn.restrain(replace(turn.state.memory.restraint, rollbacks_s=()))
    turn.set(is_untidy=False, clears_rollbacks=False)
    turn.do(act.Tidy())
    turn.do(act.ForgetPolicies())


def _start_what_is_due(turn: Turn) -> None:
    same_view = not _has_view_changed(turn)
    due = Due()
    if turn.is_idle:
        model = turn.state.model
        if model is not None and not model.job and turn.now.monotonic_s >= model.retry_s:
            turn.begin(NewModel(model.content), (model.command,) if model.command else ())
            return
        due = find_due(turn.now, turn.settings, turn.state, turn.facts)
    turn.set(held_back=due.held_back)
    _report_cap(turn, due)
    if due.kind is not None and same_view:
        if isinstance(due.kind, Switch):
            turn.load(due.kind)
        else:
            turn.begin(due.kind)


def _has_view_changed(turn: Turn) -> bool:
    """Return True if a camera's view has changed since the last look: the collected frames are of another one."""
    troubles = {camera: state.view.trouble for camera, state in turn.facts.cameras.items()}
    changed = {
        camera: trouble
        for camera, trouble in troubles.items()
        if trouble not in (turn.state.troubles.get(camera, ""), FROZEN)  # a frozen view adds nothing to collect
    }
    if not changed:
        return False
    turn.set(troubles={**turn.state.troubles, **changed})
    turn.do(turn.comparison)  # the evidence since the refusal is of another view
    if turn.state.job is None or not turn.state.job.is_collecting:
        turn.do(act.RestartCollection())
    return True


def _report_cap(turn: Turn, due: Due) -> None:
    """Report once that there were too many jobs today: the scene needs a person."""
    if due.capped is not None and not turn.state.is_cap_reported:
        turn.set(is_cap_reported=True)
        found, remedy = due.capped.found, due.capped.remedy
        turn.do(act.ReportError(AgentError(due.capped.code, found, "a scene that settles", remedy)))
    elif turn.state.memory.restraint.is_below_cap(turn.now.monotonic_s, turn.settings.recalibration.per_day):
        turn.set(is_cap_reported=False)


def _begun(turn: Turn, identity: str) -> None:
    job = turn.state.pending
    if job is None or job.id != identity:
        return
    turn.set(pending=None)
    if isinstance(job.kind, Recall):
        trials.recall(turn, job)
        return
    turn.set(job=job, last_error=None, is_untidy=True, clears_rollbacks=False)
    _count_start(turn, job.kind)
    if isinstance(job.kind, (Switch, OperatorRollback)):
        trials.try_engine(turn, job, job.kind.artefact)
        return
    if isinstance(job.kind, NewModel):
        if turn.state.model is not None:
            turn.set(model=replace(turn.state.model, job=job.id))
        turn.do(act.MakeRoom())
        return
    work.begin_collection(turn, job)


def _count_start(turn: Turn, kind: Kind) -> None:
    """Note what limits the next start."""
    now_s, restraint = turn.now.monotonic_s, turn.state.memory.restraint
    if isinstance(kind, Switch):
        turn.restrain(replace(restraint, switched_s=now_s))
    elif isinstance(kind, OperatorRollback):  # the present engine must not return by itself at once, nor be switched to
        if kind.lowers:
            turn.set(memory=turn.state.memory.with_raised(kind.artefact, None))
        turn.restrain(replace(restraint, failed_s=now_s))
        turn.do(act.ForgetRegime(turn.facts.serving))
    elif kind.is_own:
        turn.restrain(restraint.started(now_s))
        if turn.state.reference_is_new:  # any job's frames are observed by it
            turn.set(reference_is_new=False)
            turn.do(act.AnswerMismatch())
        if isinstance(kind, Scheduled):
            turn.set(answered=turn.state.answered | {kind.due})


def _loaded(turn: Turn, event: fact.Loaded) -> None:
    pending, job = turn.state.pending, turn.state.job
    if pending is not None and pending.id == event.job:
        if isinstance(pending.kind, OperatorRollback):
            pending = replace(pending, kind=replace(pending.kind, lowers=event.lowers))
            turn.set(pending=pending)
        if pending.commands:
            verb = "switches" if isinstance(pending.kind, Switch) else "rolls back"
            ending.abandon(turn, f"the operator {verb}")
        turn.do(act.Begin(pending))
    elif job is not None and job.id == event.job:
        trials.try_engine(turn, job, event.artefact)
        if job.kind.trigger is Trigger.COMMAND:  # so the operator says that the cameras show what they should
            turn.do(act.ResetViews())


def _stopping(turn: Turn, reason: str) -> None:
    """Cancel what is under way; a job fails with the error that has stopped the frame path."""
    broken, expected = turn.facts.path_error, "frames until the job has ended"
    if turn.is_working and broken is not None:
        found = f"the frame path has failed: {broken}"
        ending.give_up(turn, AgentError("swap.stopped", found, expected, "see the log for the cause"))
    ending.abandon(turn, reason)
    models.drop_model(turn, reason)
    if turn.state.trial is not None and not turn.state.needs_new_run:  # else the next run ends the job
        error = AgentError(CANCELLED, reason, "a probation that runs to its end", "start the job again")
        ending.fail_trial(turn, error)


def _decision_failed(turn: Turn, error: AgentError) -> None:
    """End what is under way: what the system refused may have cost its state."""
    if turn.state.job is None or (turn.state.trial is None and turn.facts.is_committing):
        return
    if turn.state.trial is not None:
        turn.go_back(turn.state.job, error, is_final=True)
    else:
        ending.give_up(turn, error)


def _reference_wrong(turn: Turn) -> None:
    """Drop all that the wrong reference has shown.

    Calibrations and regimes were made with it. A job with fresh frames, judged by another one, replaces them.
    """
    for artefact in turn.facts.known:
        turn.do(act.ForgetRegime(artefact))
    ending.abandon(turn, "its frames were observed by a wrong reference")
    turn.do(act.RestartCollection())
    if not turn.is_swapping:
        turn.do(act.BackInService())
    turn.set(reference_is_new=not turn.facts.is_degraded)
    if turn.facts.is_degraded:  # the first calibration is yet to come
        turn.do(act.AnswerMismatch())


def _failed(turn: Turn, action: act.Action, error: TaredError) -> None:
    """Go on from an action that has failed: what is under way ends, and the engine in service serves on."""
    pending = turn.state.pending
    if isinstance(action, (act.Load, act.Begin)) and pending is not None and pending.id == action.job.id:
        _failed_to_begin(turn, pending, action, error)
    elif isinstance(action, act.Join):
        commands = action.job.commands
        turn.change_job(action.job.id, commands=commands[:-1])
        turn.do(act.AnswerCommand(commands[-1], error))
    elif isinstance(action, act.MakeCurrent):
        _failed_to_save(turn, action, error)
    elif isinstance(action, act.Enter) and _is_recall(turn, action.job):
        if turn.state.trial is not None:
            turn.set(trial=replace(turn.state.trial, recall=None, leaves=None))
        for command in action.job.commands:
            turn.do(act.AnswerCommand(command, error))
    elif turn.state.trial is not None and isinstance(action, (act.Enter, act.StartTrial)):
        if isinstance(action, act.Enter):
            turn.do(act.DropEngine())
        ending.fail_trial(turn, _as_agent_error(error))
    elif turn.state.job is None:
        turn.do(act.ReportError(error))
    elif turn.state.trial is not None and not turn.state.needs_new_run:
        turn.go_back(turn.state.job, _as_agent_error(error), is_final=True)
    else:
        ending.give_up(turn, error)


def _failed_to_begin(turn: Turn, job: Job, action: act.Load | act.Begin, error: TaredError) -> None:
    """There is no such job: its commands hear so, and what was due is due again later."""
    turn.set(pending=None)
    if isinstance(job.kind, (Switch, OperatorRollback)) and isinstance(action, act.Begin):
        turn.do(act.DropEngine())
    if isinstance(job.kind, NewModel) or not job.commands:
        trigger = ""
        if isinstance(job.kind, Switch) and isinstance(action, act.Load):
            turn.restrain(replace(turn.state.memory.restraint, switched_s=turn.now.monotonic_s))
            trigger = job.kind.trigger.value
        else:
            turn.set(no_start_before_s=turn.now.monotonic_s + _RETRY_S)
        turn.do(act.ReportError(error, trigger))
        if isinstance(job.kind, Switch) and isinstance(action, act.Load):
            turn.do(act.ForgetRegime(job.kind.artefact))
        return
    for command in job.commands:
        turn.do(act.AnswerCommand(command, error))


def _failed_to_save(turn: Turn, action: act.MakeCurrent, error: TaredError) -> None:
    """Try again later, unless another engine comes first: the engine serves meanwhile."""
    if turn.state.unsaved is not None:
        return
    turn.set(unsaved=Unsaved(action.job, action.artefact, turn.now.monotonic_s + _RETRY_S))
    remedy = f"{error.remedy}; the engine serves, tared tries again, and a restart starts the previous engine"
    if turn.state.job is not None:
        ending.fail(turn, AgentError(error.code, error.found, error.expected, remedy))


def _is_recall(turn: Turn, job: Job) -> bool:
    trial = turn.state.trial
    return trial is not None and trial.recall is not None and trial.recall.id == job.id


def _as_agent_error(error: TaredError) -> AgentError:
    return error if isinstance(error, AgentError) else AgentError(error.code, error.found, error.expected, error.remedy)
