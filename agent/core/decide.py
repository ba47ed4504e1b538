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

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import JsonValue

from agent.collection.selection import HELD_OUT_EVERY
from agent.common.errors import AgentError, CommandError
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.causes import CANCELLED, RECALLED, UNSERVABLE, Cause, cause_of
from agent.core.due import ROLLBACK_LOOP, Due, find_due, is_looping
from agent.core.kinds import (
    Kind,
    MergedCalibration,
    NewModel,
    OfflineStart,
    RaisedPrecision,
    Recall,
    Requested,
    Rollback,
    Scheduled,
    Switch,
    Trigger,
)
from agent.core.state import (
    WORK,
    Job,
    JobState,
    ModelToTry,
    Refusal,
    Restraint,
    State,
    Trial,
    Unsaved,
)
from agent.monitoring.view import FROZEN
from agent.validation.verdict import MIN_INFORMATIVE

if TYPE_CHECKING:
    from agent.config import Config
    from calibrate.errors import TaredError

_RETRY_S = 60.0  # before another attempt: to start a job, to make an engine current, to try a model
_STEP_S = 1.0  # a clock that moved by more was set, and not only slewed
_COLLECTED_PERCENT = 40  # share of the whole job; the child reports the rest
_SUPERSEDED = "superseded by a newer model"
_OPERATOR = "the operator cancels it"
_JOINABLE = (JobState.REQUESTED, JobState.COLLECTING)


@dataclass(frozen=True)
class Decision:
    """What follows from an event. The actions are a chain."""

    state: State
    actions: tuple[act.Action, ...] = ()


def decide(now: fact.Now, settings: Config, state: State, facts: fact.Facts, event: fact.Event) -> Decision:
    """Return what follows from an event."""
    turn = _Turn(now, settings, state, facts)
    turn.take(event)
    return Decision(turn.state, tuple(turn.actions))


def collects_enough(job: Job, collected: tuple[int, int]) -> bool:
    """Return True once the job has the frames that it needs, or needs none: what it waits for then is headroom."""
    return not job.kind.collects or _counts(job, collected) == (job.frames, MIN_INFORMATIVE)


def _counts(job: Job, collected: tuple[int, int]) -> tuple[int, int]:
    return min(collected[0], job.frames), min(collected[1], MIN_INFORMATIVE)


def is_idle(state: State, facts: fact.Facts) -> bool:
    """Return True while a job may start. While an engine still hangs no other could be tried, so none is built."""
    return state.job is None and not _is_swapping(state, facts) and not facts.is_stuck


def _is_swapping(state: State, facts: fact.Facts) -> bool:
    return state.trial is not None or facts.is_committing


@dataclass
class _Turn:
    """One decision while it is made."""

    now: fact.Now
    settings: Config
    state: State
    facts: fact.Facts
    actions: list[act.Action] = field(default_factory=list)

    def take(self, event: fact.Event) -> None:
        match event:
            case fact.Started():
                self._started(event.rolled_back)
            case fact.Tick():
                self._tick()
            case fact.Asked():
                self._asked(event)
            case fact.AskedToCancel():
                self._asked_to_cancel(event)
            case fact.AskedToGoBack():
                self._asked_to_go_back(event)
            case fact.AskedToSwitch():
                self._asked_to_switch(event)
            case fact.ModelChanged():
                self._model_changed(event.content)
            case fact.ModelDelivered():
                self._abandon(_SUPERSEDED)
                self._expect_model(event.content, event.command)
            case fact.ReferenceWrong():
                self._reference_wrong()
            case fact.SettingsChanged():
                self._compare_with_refused()
            case fact.FramesEnded():
                self._frames_ended()
            case fact.Stopping():
                self._stopping(event.reason)
            case fact.DecisionFailed():
                self._decision_failed(event.error)
            case fact.Begun():
                self._begun(event.job)
            case fact.HandedOver():
                self._change_job(event.job, attempt=event.attempt, max_loss=event.max_loss)
            case fact.ChildAdvanced():
                self._child_advanced(event)
            case fact.ChildEnded():
                self._child_ended(event)
            case fact.Loaded():
                self._loaded(event)
            case fact.CandidateServes():
                self._candidate_serves(event)
            case fact.CandidateKept():
                self._candidate_kept(event.job)
            case fact.MadeCurrent():
                self._made_current(event.job, event.artefact)
            case fact.CandidateLeft():
                self._candidate_left(event)
            case fact.CandidateGone():
                if self._on_trial(event.job)[1] is not None:
                    self._fail_trial(event.error)
            case fact.TrialEnded():
                self._trial_ended(event.job)
            case fact.Failed():
                self._failed(event.action, event.error)

    def _started(self, rolled_back: int) -> None:
        if is_looping(self.now, self.settings, self.state):
            self._act(act.Report(rollback_loop(self.settings)))
        for _ in range(rolled_back):
            self._count_rollback()
        if rolled_back:
            self._pause_jobs()

    # Time passes.

    def _tick(self) -> None:
        self._judge_candidate()
        unsaved = self.state.unsaved
        if unsaved is not None and self.now.monotonic_s >= unsaved.retry_s:
            self._set(unsaved=replace(unsaved, retry_s=self.now.monotonic_s + _RETRY_S))
            self._act(act.MakeCurrent(unsaved.job, unsaved.artefact))
            return  # to go on in a moment, whether the disk refuses it or not
        if self.state.is_untidy and is_idle(self.state, self.facts):
            self._tidy()
        if abs(self._ahead_s - self.state.ahead_s) > _STEP_S:
            self._remember()  # the clock was set: what is kept is in its time
        if self.now.monotonic_s >= self.state.no_start_before_s:
            self._start_what_is_due()
        if self.state.trial is None and self.state.job is not None:
            self._move(self.state.job)

    def _judge_candidate(self) -> None:
        job, trial, probation = self.state.job, self.state.trial, self.facts.probation
        if job is None or trial is None or probation is None or not trial.serves or trial.leaves:
            return
        if self.state.needs_new_run:
            return
        if probation.objection is not None:
            self._go_back(job, probation.objection)
        elif probation.finished:
            self._act(act.Keep(job))

    def _tidy(self) -> None:
        if self.state.clears_rollbacks and self.state.memory.restraint.rollbacks_s:
            self._restrain(replace(self.state.memory.restraint, rollbacks_s=()))
        self._set(is_untidy=False, clears_rollbacks=False)
        self._act(act.Tidy())

    def _start_what_is_due(self) -> None:
        same_view = not self._has_view_changed()
        due = Due()
        if is_idle(self.state, self.facts):
            model = self.state.model
            if model is not None and not model.job and self.now.monotonic_s >= model.retry_s:
                self._begin(NewModel(model.content), (model.command,) if model.command else ())
                return
            due = find_due(self.now, self.settings, self.state, self.facts)
        self._set(held_back=due.held_back)
        self._report_cap(due)
        if due.kind is not None and same_view:
            if isinstance(due.kind, Switch):
                self._load(due.kind)
            else:
                self._begin(due.kind)

    def _has_view_changed(self) -> bool:
        """Return True if a camera's view has changed since the last look: the collected frames are of another one."""
        troubles = {camera: state.view.trouble for camera, state in self.facts.cameras.items()}
        changed = {
            camera: trouble
            for camera, trouble in troubles.items()
            if trouble not in (self.state.troubles.get(camera, ""), FROZEN)  # a frozen view adds nothing to collect
        }
        if not changed:
            return False
        self._set(troubles={**self.state.troubles, **changed})
        self._act(self._comparison)  # the evidence since the refusal is of another view
        if self.state.job is None or not self.state.job.is_collecting:
            self._act(act.RestartCollection())
        return True

    def _report_cap(self, due: Due) -> None:
        """Report once that there were too many jobs today: the scene needs a person."""
        if due.capped is not None and not self.state.is_cap_reported:
            self._set(is_cap_reported=True)
            found, remedy = due.capped.found, due.capped.remedy
            self._act(act.Report(AgentError(due.capped.code, found, "a scene that settles", remedy)))
        elif self.state.memory.restraint.is_below_cap(self.now.monotonic_s, self.settings.recalibration.per_day):
            self._set(is_cap_reported=False)

    # A job begins.

    def _begin(self, kind: Kind, commands: tuple[str, ...] = ()) -> None:
        """Journal a job; `Begun` follows."""
        job = Job(self.facts.fresh, kind, self.now.monotonic_s, commands)
        self._set(pending=job)
        self._act(act.Begin(job))

    def _load(self, kind: Switch | Rollback, commands: tuple[str, ...] = ()) -> None:
        """Load an engine that has served before; `Loaded` follows, and only then the job begins."""
        job = Job(self.facts.fresh, kind, self.now.monotonic_s, commands)
        self._set(pending=job)
        self._act(act.Load(job, kind.artefact))

    def _begun(self, identity: str) -> None:
        job = self.state.pending
        if job is None or job.id != identity:
            return
        self._set(pending=None)
        if isinstance(job.kind, Recall):
            self._recall(job)
            return
        self._set(job=job, last_error=None, is_untidy=True, clears_rollbacks=False)
        self._count_start(job.kind)
        if isinstance(job.kind, (Switch, Rollback)):
            self._try_engine(job, job.kind.artefact)
            return
        if isinstance(job.kind, NewModel):
            if self.state.model is not None:
                self._set(model=replace(self.state.model, job=job.id))
            self._act(act.MakeRoom())
            return
        self._begin_collection(job)

    def _count_start(self, kind: Kind) -> None:
        """Note what limits the next start."""
        now_s, restraint = self.now.monotonic_s, self.state.memory.restraint
        if isinstance(kind, Switch):
            self._restrain(replace(restraint, switched_s=now_s))
        elif isinstance(kind, Rollback):  # the present engine must not return by itself at once, nor be switched to
            if kind.lowers:
                self._set(memory=self.state.memory.with_raised(kind.artefact, None))
            self._restrain(replace(restraint, failed_s=now_s))
            self._act(act.ForgetRegime(self.facts.serving))
        elif kind.is_own:
            self._restrain(restraint.started(now_s))
            if self.state.reference_is_new:  # any job's frames are observed by it
                self._set(reference_is_new=False)
                self._act(act.AnswerMismatch())
            if isinstance(kind, Scheduled):
                self._set(answered=self.state.answered | {kind.due})

    def _begin_collection(self, job: Job) -> None:
        kind, calibration = job.kind, self.settings.calibration
        frames, max_loss = calibration.frames, None
        if isinstance(kind, (OfflineStart, MergedCalibration)):  # needed for the verdict alone
            frames = (HELD_OUT_EVERY - 1) * self.settings.observe.held_out  # by then as many are held out
        if isinstance(kind, Requested):
            frames, max_loss = kind.frames or frames, kind.max_loss
        self._change_job(job.id, frames=frames, max_loss=max_loss, until_s=self._patience_s)
        self._act(act.MakeRoom())  # before minutes of collecting, which a full disk would waste
        self._enter(JobState.COLLECTING, 0)
        if isinstance(kind, OfflineStart):
            message = f"the first calibration begins with {kind.setting}: {kind.path}"
            self._note(message=message)
        if kind.trigger is Trigger.COMMAND or isinstance(kind, OfflineStart):
            self._act(act.RestartCollection(hurried=True))
        elif isinstance(kind, Scheduled) or self.state.refusal(self.facts.settings) is not None:
            self._act(act.RestartCollection())  # no frame of the refused job's scene

    # The operator asks.

    def _asked(self, event: fact.Asked) -> None:
        job, command = self.state.job, event.command
        if isinstance(event.kind, Requested):
            outage = next(iter(self.facts.cameras.values())).outage
            if outage:
                found, remedy = f"nothing is observed now: {outage}", "see the events, then send the command again"
                self._refuse(command, "command.observer", found, "observed frames to collect", remedy)
                return
            if job is not None and job.kind.request == event.kind.request and job.state in _JOINABLE:
                self._change_job(job.id, commands=(*job.commands, command))
                self._act(act.Join(self._job))
                return
        if is_idle(self.state, self.facts):
            self._begin(event.kind, (command,))
        elif not self._refuses_stuck(command):
            found = f"a job at {job.description}" if job is not None else "a swap under way"
            expected, remedy = "one job at a time", "wait for its end, then send the command again"
            self._refuse(command, "command.busy", found, expected, remedy)

    def _asked_to_cancel(self, event: fact.AskedToCancel) -> None:
        if self._is_working:
            self._abandon(_OPERATOR)
            self._pause_jobs()  # its trigger may still hold
        elif not (self._drop_model(_OPERATOR) or event.delivered):
            if self._can_recall:
                self._begin(Recall(self.facts.serving), (event.command,))
            elif not self._refuses_swap(event.command):
                expected = "a job, a delivery or a probation"
                self._refuse(event.command, "command.nothing", "no running job", expected, "ask for the status first")
            return
        self._act(act.Answer(event.command))

    def _asked_to_go_back(self, event: fact.AskedToGoBack) -> None:
        command = event.command
        if self._can_recall:
            self._begin(Recall(self.facts.serving), (command,))
        elif not self._refuses_swap(command) and not self._refuses_stuck(command):
            if event.previous:
                self._load(Rollback(event.previous), (command,))
                return
            expected = "an engine that served before the present one"
            self._refuse(command, "command.rollback", "no previous engine", expected, "recalibrate instead")

    def _asked_to_switch(self, event: fact.AskedToSwitch) -> None:
        if self._refuses_swap(event.command) or self._refuses_stuck(event.command):
            return
        try:
            event.args.check(self.facts.serving, self.facts.known)
        except CommandError as error:
            self._act(act.Answer(event.command, error))
            return
        self._load(Switch(event.args.regime, by_command=True), (event.command,))

    def _refuses_swap(self, command: str) -> bool:
        if not _is_swapping(self.state, self.facts):
            return False
        remedy = "send the command again in a moment"
        self._refuse(command, "command.busy", "a swap under way", "one swap at a time", remedy)
        return True

    def _refuses_stuck(self, command: str) -> bool:
        if not self.facts.is_stuck:
            return False
        found, remedy = "a candidate that still hangs and holds its memory", "wait for its end, or restart the daemon"
        self._refuse(command, "command.busy", found, "one candidate at a time", remedy)
        return True

    def _refuse(self, command: str, code: str, found: str, expected: str, remedy: str) -> None:
        self._act(act.Answer(command, CommandError(code, found, expected, remedy)))

    @property
    def _can_recall(self) -> bool:
        """True while a candidate is on probation that nobody has recalled yet."""
        job, trial = self.state.job, self.state.trial
        if job is None or trial is None or self.state.needs_new_run:
            return False
        return not job.kind.is_proven and trial.recall is None

    def _recall(self, recall: Job) -> None:
        """Take the candidate back. It succeeds once the previous engine serves, also where that came by itself."""
        job, trial = self.state.job, self.state.trial
        if job is None or trial is None:
            return
        recall = replace(recall, state=JobState.PROBATION)
        self._set(trial=replace(trial, recall=recall))
        self._act(act.Enter(recall, artefact=self.facts.serving))
        self._go_back(job, _recalled())
        self._pause_jobs()

    # Models come.

    def _model_changed(self, content: str) -> None:
        model, job = self.state.model, self.state.job
        if self.state.needs_new_run and model is not None and content == model.content:  # a delivered one, in its place
            return
        if not content and model is not None and model.command:  # the delivered one is to be tried all the same
            return
        if content or (job is not None and isinstance(job.kind, NewModel)):
            self._abandon(_SUPERSEDED)
        self._expect_model(content)

    def _expect_model(self, content: str, command: str = "") -> None:
        if not self._drop_model(_SUPERSEDED):
            self._withdraw_model(_SUPERSEDED)
        self._set(model=ModelToTry(content, command) if content else None, needs_new_run=False)

    def _drop_model(self, reason: str) -> bool:
        """Cancel a delivered model that waits for its trial, or is on trial; False where there is none."""
        model = self.state.model
        if model is None or not model.command or self.state.needs_new_run:
            return False
        self._withdraw_model(reason)
        self._set(model=None)
        self._act(act.DropModel(model.command))
        error = AgentError(CANCELLED, reason, "a delivery that may run to its end", "send the command again")
        self._act(act.Answer(model.command, error))
        return True

    def _withdraw_model(self, reason: str) -> None:
        """Take back a model that answers live frames already, so that nothing is committed."""
        job = self.state.job
        if job is not None and isinstance(job.kind, NewModel) and self.state.trial is not None:
            remedy = "send the command again"
            self._go_back(job, AgentError(CANCELLED, reason, "a probation that runs to its end", remedy))

    def _after_model(self, job: Job, error: TaredError) -> None:
        """Try a model no more where the error is its own; another error says nothing of it.

        A delivered one is tried once: its sender may send it again.
        """
        model, cause = self.state.model, cause_of(error)
        if model is None or model.job != job.id:  # another one has come meanwhile
            return
        own = cause in (Cause.UNSERVABLE, Cause.ANSWERS, Cause.REFUSED, Cause.RECALLED)
        if model.command:
            self._set(model=None)
            # Unless the model cannot be served, the received file stays, so that sending it again costs no transfer.
            self._act(act.DropModel(model.command, for_good=cause is Cause.UNSERVABLE))
        else:
            retry_s = self.now.monotonic_s + _RETRY_S
            self._set(model=None if own else replace(model, job="", retry_s=retry_s))

    # A job goes on.

    def _move(self, job: Job) -> None:
        if job.child_since_s is not None:
            self._supervise(job)
            return
        if job.state not in _JOINABLE:
            return
        if not collects_enough(job, self.facts.collected):
            self._collect(job)
            return
        headroom = self.facts.headroom
        if isinstance(headroom, AgentError):
            self._give_up(headroom)
            return
        self._wait(headroom)
        if headroom:
            self._change_job(job.id, until_s=self._patience_s)  # frames that have to be collected again take their time
            return
        self._act(act.MakeRoom())
        if isinstance(job.kind, NewModel):
            self._enter(JobState.BUILDING, 0)
        else:
            self._act(act.ReportSelection(self._job))
            self._enter(JobState.CALIBRATING, _COLLECTED_PERCENT)
        self._change_job(job.id, child_since_s=self.now.monotonic_s)
        self._act(act.HandOver(self._job))

    def _collect(self, job: Job) -> None:
        """Wait for frames. Each frame that counts restarts the time limit, because a slow camera needs its time."""
        counts, timeout_s = _counts(job, self.facts.collected), self.settings.recalibration.timeout_s
        if self.now.monotonic_s > job.until_s:
            found, remedy = f"{counts[0]} of {job.frames} frames", "check the camera, ask for fewer frames"
            if counts[0] == job.frames:
                found = f"only {counts[1]} of the frames that judge show something"
                remedy = "wait until something is in view"
            found = f"{JobState.COLLECTING.value}: {found}, and no more for {timeout_s:.0f} s"
            remedy = f"{remedy}, or raise recalibration.timeout_s"
            error = AgentError("recalibration.timeout", found, "as many frames as the job asked for", remedy)
            self._give_up(error)
            return
        came = any(now > last for now, last in zip(counts, job.counts, strict=True))
        self._change_job(job.id, counts=counts, until_s=self._patience_s if came else job.until_s)
        percent = min(_COLLECTED_PERCENT * self.facts.collected[0] // job.frames, _COLLECTED_PERCENT - 1)
        self._enter(JobState.COLLECTING, percent)

    def _supervise(self, job: Job) -> None:
        """Pause the child when the board cannot afford it, and limit its time."""
        headroom, timeout_s = self.facts.headroom, self.settings.recalibration.timeout_s
        if isinstance(headroom, AgentError):
            self._give_up(headroom)
            return
        if job.child_since_s is not None and (
            self.now.monotonic_s - job.child_since_s - self.facts.paused_s > timeout_s
        ):
            found = f"the candidate process took longer than {timeout_s:.0f} s"
            remedy = "see in the log what the job was doing, or raise recalibration.timeout_s"
            error = AgentError("recalibration.timeout", found, "a candidate within recalibration.timeout_s", remedy)
            self._give_up(error)
            return
        if bool(headroom) != job.is_paused:
            self._act(act.PauseChild() if headroom else act.ResumeChild())
            self._change_job(job.id, is_paused=bool(headroom))
        self._wait(headroom)

    def _wait(self, reason: str) -> None:
        """Report why the job stands still; another reason while it does is kept: mostly only its figures change."""
        job = self._job
        if bool(reason) != bool(job.waits):
            self._note(percent=job.percent, waits=reason or "no more")
        self._change_job(job.id, waits=reason)

    def _child_advanced(self, event: fact.ChildAdvanced) -> None:
        job = self.state.job
        if job is None or job.id != event.job:
            return
        state = next((each for each in WORK if each.value == event.step), None)
        if state is None or (state is not job.state and not job.state.may_become(state)):
            found = f"a job at {job.state.value} that goes to {event.step}"
            self._give_up(AgentError("recalibration.child", found, "the next step of the job", _TRY_AGAIN))
            return
        self._enter(state, event.percent)

    def _child_ended(self, event: fact.ChildEnded) -> None:
        job, error = self.state.job, event.error
        if job is None or job.id != event.job:
            return
        self._change_job(job.id, child_since_s=None)
        if event.verdict is not None:
            self._change_job(job.id, fidelity=event.verdict.fidelity)
            if not isinstance(job.kind, RaisedPrecision):  # which gains otherwise
                self._act(act.LearnGain(event.verdict))
        if error is None:
            self._act(act.Load(self._job, event.artefact))
            return
        if isinstance(job.kind, NewModel) and cause_of(error) not in (Cause.ANSWERS, Cause.BOARD):
            found = f"the model's file has changed, and cannot be served: {error.code}: {error.found}"
            remedy = f"{error.remedy}; the engine in service keeps serving until then"
            error = AgentError(UNSERVABLE, found, error.expected, remedy)
        self._fail(error)

    # An engine is tried.

    def _loaded(self, event: fact.Loaded) -> None:
        pending, job = self.state.pending, self.state.job
        if pending is not None and pending.id == event.job:
            if isinstance(pending.kind, Rollback):
                pending = replace(pending, kind=replace(pending.kind, lowers=event.lowers))
                self._set(pending=pending)
            if pending.commands:
                verb = "switches" if isinstance(pending.kind, Switch) else "rolls back"
                self._abandon(f"the operator {verb}")
            self._act(act.Begin(pending))
        elif job is not None and job.id == event.job:
            self._try_engine(job, event.artefact)
            if job.kind.trigger is Trigger.COMMAND:  # so the operator says that the cameras show what they should
                self._act(act.ResetViews())

    def _try_engine(self, job: Job, artefact: str) -> None:
        """Hand the engine to the frame path, once it is journaled that it may serve."""
        self._set(trial=Trial(artefact))
        self._enter(JobState.PROBATION, job.percent, artefact)
        self._act(act.StartTrial(self._job))

    def _candidate_serves(self, event: fact.CandidateServes) -> None:
        job, trial, probation = self._on_trial(event.job)
        if job is None or trial is None:
            return
        self._set(trial=replace(trial, serves=True))
        self._act(act.Announce(job, event.ts, event.skipped))
        is_finished = job.kind.is_proven or (probation is not None and probation.finished)
        if is_finished and trial.leaves is None:
            self._act(act.Keep(job))

    def _candidate_kept(self, identity: str) -> None:
        job, trial, _ = self._on_trial(identity)
        if job is None or trial is None:
            return
        self._act(act.Commit(job))
        if isinstance(job.kind, NewModel):  # it stays on trial until this run ends: what follows is of another model
            self._set(needs_new_run=True)
            if job.commands:
                self._act(act.InstallModel(job.commands[0]))
            return
        self._set(trial=None, unsaved=None)
        self._act(act.MakeCurrent(job, trial.artefact))

    def _made_current(self, identity: str, artefact: str) -> None:
        job, unsaved = self.state.job, self.state.unsaved
        if unsaved is not None and unsaved.job.id == identity:
            self._set(unsaved=None)
        elif job is not None and job.id == identity:
            self._succeed(artefact)

    def _candidate_left(self, event: fact.CandidateLeft) -> None:
        job, trial, _ = self._on_trial(event.job)
        if job is None or trial is None:
            return
        if trial.serves:
            self._act(act.BackInService(event.ts))
        rollback = act.ReportRollback(job, event.error, event.ts, event.waited)
        self._act(rollback)
        if not job.kind.is_proven:
            self._act(act.Reject(job, trial.artefact, event.error, rollback))
        self._fail(event.error, rolled_back=True)
        if cause_of(event.error) not in (Cause.RECALLED, Cause.CANCELLED):  # it has failed by itself
            self._count_rollback()
            self._act(act.ForgetRegime(trial.artefact))

    def _trial_ended(self, identity: str) -> None:
        """The frames have ended: the candidate is judged by those that it answered, or by its verdict alone."""
        job, trial, probation = self._on_trial(identity)
        if job is None or trial is None:
            return
        if self.facts.path_error is not None:
            found, expected = "the frame path has failed", "frames until the probation has ended"
            self._fail_trial(AgentError("swap.stopped", found, expected, "see the log for the cause"))
            return
        error = trial.leaves
        if error is None and trial.serves and probation is not None:
            error = probation.objection
        if error is not None:
            self._candidate_left(fact.CandidateLeft(identity, error))
            return
        if not trial.serves:
            self._act(act.Announce(job, None))
        self._candidate_kept(identity)

    def _on_trial(self, identity: str) -> tuple[Job | None, Trial | None, fact.ProbationNow | None]:
        """Return the job of this id with its trial; of a model that was kept, nothing changes any more."""
        job = self.state.job
        if job is None or job.id != identity or self.state.needs_new_run:
            return None, None, None
        return job, self.state.trial, self.facts.probation

    def _go_back(self, job: Job, error: AgentError, is_final: bool = False) -> None:
        if self.state.trial is not None:
            self._set(trial=replace(self.state.trial, leaves=error))
        self._act(act.GoBack(job, error, is_final))

    # A job ends.

    def _succeed(self, artefact: str) -> None:
        job = self._job
        self._set(job=None, last_error=None, is_untidy=True, clears_rollbacks=job.kind.trigger is Trigger.COMMAND)
        self._act(act.End(job, JobState.COMMITTED, result={"artefact": artefact, "fidelity": job.fidelity}))

    def _fail(self, error: TaredError, rolled_back: bool = False) -> None:
        """End the job with an error, and its recall well: the previous engine serves."""
        job, trial = self._job, self.state.trial
        state = JobState.CANCELLED if cause_of(error) is Cause.CANCELLED else JobState.FAILED
        state = JobState.ROLLED_BACK if rolled_back else state
        self._set(job=None, trial=None, last_error=error, is_untidy=True)
        if state is not JobState.CANCELLED:
            self._note_failure(job, error)  # before the journal: after a kill in between nothing is tried again in vain
        self._act(act.End(job, state, error))
        if isinstance(job.kind, NewModel):
            self._after_model(job, error)
        if trial is not None and trial.recall is not None:
            self._act(act.End(trial.recall, JobState.COMMITTED, result={"artefact": self.facts.serving}))

    def _note_failure(self, job: Job, error: TaredError) -> None:
        """Note what must not be tried again, or not before something has changed."""
        kind, cause, memory = job.kind, cause_of(error), self.state.memory
        if kind.is_own or (isinstance(kind, Switch) and not kind.by_command):
            self._pause_jobs()
            memory = self.state.memory
        if isinstance(kind, RaisedPrecision):
            refused = memory.raised.get(kind.artefact, 0)
            if cause in (Cause.EXHAUSTED, Cause.RECALLED):
                self._set(memory=memory.with_raised(kind.artefact, None))
            elif cause is Cause.REFUSED and refused is not None:
                self._set(memory=memory.with_raised(kind.artefact, refused + 1))
            self._remember()
        elif isinstance(kind, OfflineStart):
            if cause is Cause.REFUSED:
                self._set(vain={**self.state.vain, kind.attempt: error})
            self._act(act.RestartCollection())  # the frames of the board's own calibration are chosen
        elif job.attempt is not None and cause is Cause.REFUSED and job.attempt.settings == self.facts.settings:
            self._set(memory=replace(memory, refusal=Refusal(job.attempt, error)))
            self._remember()
            self._act(self._comparison)

    def _give_up(self, error: TaredError) -> None:
        """End the job, whatever it is doing, with this error."""
        if self._job.child_since_s is not None:
            self._act(act.EndChild())
        self._fail(error)

    def _fail_trial(self, error: AgentError) -> None:
        """End a trial for a reason that is not the candidate's fault."""
        job, trial = self._job, self.state.trial
        if trial is not None and not job.kind.is_proven:
            self._act(act.Reject(job, trial.artefact, error))
        self._fail(error)

    @property
    def _is_working(self) -> bool:
        """True while a job is under way whose engine is not tried yet."""
        return self.state.job is not None and self.state.trial is None and self.state.job.state in WORK

    def _abandon(self, reason: str) -> None:
        """Cancel a job that has no engine yet, for this reason."""
        if self._is_working:
            self._give_up(AgentError(CANCELLED, reason, "a job that may run to its end", "start the job again"))

    # The run ends, or something is wrong with it.

    def _frames_ended(self) -> None:
        """Let a job that collects go on with the frames there are, since no more will come, or give it up."""
        job, (collected, informative) = self.state.job, self.facts.collected
        self._set(no_start_before_s=math.inf)
        if job is None or not job.is_collecting or not job.kind.collects:
            return
        if not collected or informative < MIN_INFORMATIVE:
            found = f"the recording has ended, and only {informative} of the frames that judge show something"
            remedy = "play the recording in a loop (camera.loop: true), or use a longer one"
            self._give_up(AgentError("recalibration.frames", found, f"at least {MIN_INFORMATIVE}", remedy))
        elif collected < job.frames:
            message = f"the recording has ended: the job continues with {collected} of {job.frames} frames"
            self._note(percent=job.percent, message=message)
            self._change_job(job.id, frames=collected, until_s=self._patience_s)

    def _stopping(self, reason: str) -> None:
        """Cancel what is under way; a job fails with the error that has stopped the frame path."""
        error, expected = self.facts.path_error, "frames until the job has ended"
        if self._is_working and error is not None:
            found = f"the frame path has failed: {error}"
            self._give_up(AgentError("swap.stopped", found, expected, "see the log for the cause"))
        self._abandon(reason)
        self._drop_model(reason)
        if self.state.trial is not None and not self.state.needs_new_run:  # else the next run ends the job
            self._fail_trial(AgentError(CANCELLED, reason, "a probation that runs to its end", "start the job again"))

    def _decision_failed(self, error: AgentError) -> None:
        """End what is under way: what the system refused may have cost its state."""
        if self.state.job is None or (self.state.trial is None and self.facts.is_committing):
            return
        if self.state.trial is not None:
            self._go_back(self.state.job, error, is_final=True)
        else:
            self._give_up(error)

    def _reference_wrong(self) -> None:
        """Drop all that the wrong reference has shown.

        Calibrations and regimes were made with it. A job with fresh frames, judged by another one, replaces them.
        """
        for artefact in self.facts.known:
            self._act(act.ForgetRegime(artefact))
        self._abandon("its frames were observed by a wrong reference")
        self._act(act.RestartCollection())
        if not _is_swapping(self.state, self.facts):
            self._act(act.BackInService())
        self._set(reference_is_new=not self.facts.is_degraded)
        if self.facts.is_degraded:  # the first calibration is yet to come
            self._act(act.AnswerMismatch())

    def _failed(self, action: act.Action, error: TaredError) -> None:
        """Go on from an action that has failed: what is under way ends, and the engine in service serves on."""
        pending = self.state.pending
        if isinstance(action, (act.Load, act.Begin)) and pending is not None and pending.id == action.job.id:
            self._failed_to_begin(pending, action, error)
        elif isinstance(action, act.Join):
            commands = action.job.commands
            self._change_job(action.job.id, commands=commands[:-1])
            self._act(act.Answer(commands[-1], error))
        elif isinstance(action, act.MakeCurrent):
            self._failed_to_save(action, error)
        elif isinstance(action, act.Enter) and self._is_recall(action.job):
            self._set(trial=replace(self.state.trial, recall=None) if self.state.trial else None)
            for command in action.job.commands:
                self._act(act.Answer(command, error))
        elif self.state.trial is not None and isinstance(action, (act.Enter, act.StartTrial)):
            if isinstance(action, act.Enter):
                self._act(act.DropEngine())
            self._fail_trial(_as_agent_error(error))
        elif self.state.job is not None:
            self._give_up(error)
        else:
            self._act(act.Report(error))

    def _failed_to_begin(self, job: Job, action: act.Load | act.Begin, error: TaredError) -> None:
        """There is no such job: its commands hear so, and what was due is due again later."""
        self._set(pending=None)
        if isinstance(job.kind, (Switch, Rollback)) and isinstance(action, act.Begin):
            self._act(act.DropEngine())
        if isinstance(job.kind, NewModel) or not job.commands:
            trigger = ""
            if isinstance(job.kind, Switch) and isinstance(action, act.Load):
                self._restrain(replace(self.state.memory.restraint, switched_s=self.now.monotonic_s))
                trigger = job.kind.trigger.value
            else:
                self._set(no_start_before_s=self.now.monotonic_s + _RETRY_S)
            self._act(act.Report(error, trigger))
            if isinstance(job.kind, Switch) and isinstance(action, act.Load):
                self._act(act.ForgetRegime(job.kind.artefact))
            return
        for command in job.commands:
            self._act(act.Answer(command, error))

    def _failed_to_save(self, action: act.MakeCurrent, error: TaredError) -> None:
        """Try again later, unless another engine comes first: the engine serves meanwhile."""
        if self.state.unsaved is not None:
            return
        self._set(unsaved=Unsaved(action.job, action.artefact, self.now.monotonic_s + _RETRY_S))
        remedy = f"{error.remedy}; the engine serves, tared tries again, and a restart starts the previous engine"
        if self.state.job is not None:
            self._fail(AgentError(error.code, error.found, error.expected, remedy))

    def _is_recall(self, job: Job) -> bool:
        trial = self.state.trial
        return trial is not None and trial.recall is not None and trial.recall.id == job.id

    # Small changes of the state.

    def _act(self, action: act.Action) -> None:
        self.actions.append(action)

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # the caller names fields with their types

    @property
    def _job(self) -> Job:
        assert self.state.job is not None, "the caller has looked"
        return self.state.job

    def _change_job(self, identity: str, **changes: object) -> None:
        job = self.state.job
        if job is not None and job.id == identity:
            self._set(job=replace(job, **changes))  # type: ignore[arg-type]

    def _enter(self, state: JobState, percent: int, artefact: str = "") -> None:
        """Report a step, and every ten percent of one."""
        job = self._job
        is_new = state is not job.state
        changed = replace(job, state=state, percent=percent)
        if is_new or percent // 10 != job.percent // 10:
            self._set(job=changed)
            self._act(act.Enter(changed, is_new, artefact))

    def _note(self, **detail: JsonValue) -> None:
        self._act(act.Note(self._job, detail))

    @property
    def _patience_s(self) -> float:
        return self.now.monotonic_s + self.settings.recalibration.timeout_s

    @property
    def _ahead_s(self) -> float:
        return self.now.wall_s - self.now.monotonic_s

    def _remember(self) -> None:
        self._set(ahead_s=self._ahead_s)
        self._act(act.Remember())

    def _restrain(self, restraint: Restraint) -> None:
        self._set(memory=replace(self.state.memory, restraint=restraint))
        self._remember()

    def _pause_jobs(self) -> None:
        """Start the pause after a failed job: its cause may pass, but not at once."""
        self._restrain(replace(self.state.memory.restraint, failed_s=self.now.monotonic_s))

    def _count_rollback(self) -> None:
        """Count a candidate that was taken out of service; report it if that was one too many."""
        looped = is_looping(self.now, self.settings, self.state)
        self._restrain(self.state.memory.restraint.rolled_back(self.now.monotonic_s))
        if is_looping(self.now, self.settings, self.state) and not looped:
            self._act(act.Report(rollback_loop(self.settings)))

    @property
    def _comparison(self) -> act.CompareWithRefused:
        refusal = self.state.refusal(self.facts.settings)
        return act.CompareWithRefused(refusal.attempt.scene if refusal is not None else None)

    def _compare_with_refused(self) -> None:
        """Find out whether the latest refusal, and raises in vain, hold for the present engine and settings."""
        if self.facts.raising != self.state.memory.raised_under:
            self._set(memory=replace(self.state.memory, raised={}, raised_under=self.facts.raising))
        if self.facts.settings != self.state.compared:
            self._set(compared=self.facts.settings)
            self._act(self._comparison)


_TRY_AGAIN = "see the log, then try again"


def rollback_loop(settings: Config) -> AgentError:
    """Return the error that says why nothing starts by itself any more."""
    found = f"{settings.probation.rollbacks_per_day} candidates rolled back in a day"
    remedy = "see the rollback events; recalibrate by command once their cause is gone"
    return AgentError(ROLLBACK_LOOP, found, "candidates that stay in service; no job starts by itself any more", remedy)


def _recalled() -> AgentError:
    found, remedy = "the operator's rollback", "recalibrate from other frames"
    return AgentError(RECALLED, found, "a probation that runs to its end", remedy)


def _as_agent_error(error: TaredError) -> AgentError:
    return error if isinstance(error, AgentError) else AgentError(error.code, error.found, error.expected, error.remedy)
