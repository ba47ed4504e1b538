"""Exchange engines: load one, let the frame path try it, and make it `current`, or take it back.

`EngineExchange` carries out the actions that concern engines, and reports them. What the frame path has to say comes
back as events of agent.core. It holds the one engine on trial. `current` moves when an engine is committed, and not
before: whatever ends the process during a probation, the previous engine serves after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.config import Config
from agent.contract.events import EventKind
from agent.control.policies import Policies
from agent.control.summary import Rollback, RunSummary, Swap
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.kinds import NewModel, Trigger
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.serving.trial import Probation, TrialEvents
from agent.uplink.reporter import Reporter
from agent.validation.verdict import Verdict
from engines.store.artefact import Artefact, read_artefact

Post = Callable[[fact.Event], None]


@dataclass
class _OnTrial:
    """The engine on trial. missed_before: frames that nobody had taken when it began."""

    loaded: LoadedEngine
    probation: Probation
    missed_before: int
    announced: Swap | None = None


@dataclass
class EngineExchange:
    """The engines of the frame path, and the one in service. Everything runs in the supervisor's thread.

    Args:
        then: Takes the event that follows from an action.
        post: Takes what the frame path has to say, from its threads.
        on_engine_changed: Called with the candidate that serves, or None for the engine in service, and the capture
            time from which on it serves, by camera.
        policies: What is shown of each engine's answers, which events report.

    Attributes:
        verdict: On the candidate that comes next, which events report; None for an engine that has served before.
    """

    config: Config
    service: EngineService
    pipeline: Pipeline
    reporter: Reporter
    summary: RunSummary
    then: Post
    post: Post
    on_engine_changed: Callable[[LoadedEngine | None, Mapping[str, float]], None]
    policies: Policies
    clock: Clock = SYSTEM_CLOCK
    verdict: Verdict | None = field(default=None, init=False)
    _artefact: Artefact | None = field(default=None, init=False)  # the latest that was loaded
    _loaded: LoadedEngine | None = field(default=None, init=False)
    _trial: _OnTrial | None = field(default=None, init=False)
    _kept: _OnTrial | None = field(default=None, init=False)  # the latest that was kept, until the disk has it

    def load(self, action: act.Load) -> None:
        """Raises TaredError for an engine that cannot serve."""
        job, service = action.job, self.service
        is_built = not job.kind.is_proven
        artefact = (
            read_artefact(Path(action.artefact), service.store.key) if is_built else service.store.find(action.artefact)
        )
        load = service.load_float if isinstance(job.kind, NewModel) else service.load
        self._artefact, loaded = artefact, load(artefact)
        self._loaded = loaded
        if not is_built:
            self.verdict = None
        lowers = bool(service.plan.floats.keys() - loaded.model.plan.floats.keys())
        self.then(fact.Loaded(job.id, artefact.id, lowers))

    def drop_engine(self, _action: act.DropEngine) -> None:
        """Close an engine that is loaded and was not tried."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.engine.close()

    def start_trial(self, action: act.StartTrial) -> None:
        """Hand the loaded engine to the frame path.

        A new model's answers and latency are its own: its probation looks for outputs that are broken, errors and
        hangs. Raises AgentError (`probation.stuck`), with the engine closed.
        """
        job, loaded, self._loaded = action.job, self._loaded, None
        assert loaded is not None, "an engine is loaded before it is tried"
        identity, is_model = loaded.artefact.id, isinstance(job.kind, NewModel)
        probation = Probation(
            self.config.probation,
            self.pipeline.record,
            identity,
            self.service.serving.id,
            1.0 if is_model else self.config.max_loss if job.max_loss is None else job.max_loss,
            first=self.service.is_degraded or is_model,
        )
        self._trial = _OnTrial(loaded, probation, self.pipeline.dropped.total())
        events = TrialEvents(
            live=lambda ts, skipped: self.post(fact.CandidateServes(job.id, ts, skipped)),
            failed=lambda error, ts, waited: self.post(fact.CandidateLeft(job.id, error, ts, waited)),
            ended=lambda: self.post(fact.TrialEnded(job.id)),
        )
        self.pipeline.start_trial(identity, loaded.engine, events, own_outputs=is_model)

    def probation(self, states: CameraStates, is_last: bool) -> fact.ProbationNow | None:
        """Return how the candidate has done, by the cameras whose scene does not drift from what it was made for.

        is_last: No more of its frames will come.
        """
        if self._trial is None:
            return None
        probation = self._trial.probation
        finished = probation.is_finished
        calm = [state for state in states.values() if state.drift is None or state.drift.state == "calm"]
        losses = [state.gain for state in calm if (is_last or finished) and state.is_loss]
        return fact.ProbationNow(finished, probation.objection([state.gain for state in calm], losses))

    def announce(self, action: act.Announce) -> None:
        """Report that the candidate serves, though it is not committed yet."""
        trial, job, verdict = self._on_trial, action.job, self.verdict
        self.on_engine_changed(trial.loaded, self.pipeline.serving_since(action.ts))
        swap = trial.announced = Swap(
            action.ts,
            trial.loaded.artefact.id,
            job.kind.trigger.value,
            round(self.clock.monotonic_s() - job.started_s, 2),
            verdict.fidelity if verdict else None,
            verdict.fidelity_serving if verdict else None,
            action.skipped,
            verdict.latency_ms if verdict else None,
            verdict.latency_float_ms if verdict else None,
        )
        kind: EventKind = "rollback" if job.kind.trigger is Trigger.ROLLBACK else "swap"
        self.reporter.event(kind, **_event_detail(swap), **self.policies.taking_over(swap.artefact))

    def go_back(self, action: act.GoBack) -> None:
        """Let the frame path go back; where it has done so already, or has ended, its own event follows."""
        if not self.pipeline.loop.roll_back(action.error) and action.is_final:
            self.then(fact.CandidateGone(action.job.id, action.error))

    def keep(self, action: act.Keep) -> None:
        """Let the frame path close the previous engine; that of a model in service stays until the run ends."""
        loop, is_model = self.pipeline.loop, isinstance(action.job.kind, NewModel)
        if loop.has_live_candidate if is_model else loop.commit():
            self.then(fact.CandidateKept(action.job.id))

    def commit(self, _action: act.Commit) -> None:
        """Count the swap as one that is kept."""
        trial = self._kept = self._on_trial
        assert trial.announced is not None, "an engine is committed once it serves"
        self.summary.swaps.append(trial.announced)
        self.summary.artefact = str(trial.loaded.artefact.path)

    def make_current(self, action: act.MakeCurrent) -> None:
        """Raises TaredError where the disk refuses; the engine serves all the same."""
        trial, before = self._kept, self.service.serving.id
        assert trial is not None, "an engine is kept before it is made current"
        probation, identity = trial.probation, trial.loaded.artefact.id
        self.service.commit(trial.loaded)
        not_inherited = {} if action.job.kind.is_proven else self.policies.not_inherited(before, identity)
        self.reporter.event(
            "commit",
            artefact=identity,
            trigger=action.job.kind.trigger.value,
            frames=probation.frames,
            seconds=round(probation.seconds, 1),
            late=probation.late_frames,
            fidelity_frames=sum(state.fidelity.n for state in self.pipeline.observer.states().values()),
            p99_judged=probation.judges_p99,
            **not_inherited,
        )
        self.then(fact.MadeCurrent(action.job.id, identity))

    def back_in_service(self, action: act.BackInService) -> None:
        """The engine in service answers again."""
        self.on_engine_changed(None, self.pipeline.serving_since(action.ts))

    def report_rollback(self, action: act.ReportRollback) -> None:
        trial, error = self._on_trial, action.error
        rollback = self._rollback(trial, action)
        self.summary.rollbacks.append(rollback)
        policy = self.policies.taking_over(self.service.serving.id)
        self.reporter.event("rollback", logging.WARNING, **_event_detail(rollback), **policy, message=str(error))

    def reject(self, action: act.Reject) -> None:
        """Remove the candidate before the journal has the end: the next process would not come back to it."""
        error = action.error
        why: dict[str, Any] = {"trigger": action.job.kind.trigger.value, "reason": error.code}
        if action.rollback is not None:
            why = _event_detail(self._rollback(self._on_trial, action.rollback))
        assert self._artefact is not None, "it was loaded"
        with self.reporter.reporting_errors():
            self.service.reject(self._artefact, {**why, "found": error.found})

    def _rollback(self, trial: _OnTrial, action: act.ReportRollback) -> Rollback:
        probation, error = trial.probation, action.error
        return Rollback(
            action.ts,
            trial.loaded.artefact.id,
            action.job.kind.trigger.value,
            error.code,
            probation.frames,
            probation.affected_frames(error, action.waited),
            self.pipeline.dropped.total() - trial.missed_before,
        )

    @property
    def _on_trial(self) -> _OnTrial:
        assert self._trial is not None, "the engine is on trial, or was the latest"
        return self._trial


def _event_detail(event: Swap | Rollback) -> dict[str, JsonValue]:
    """Return the fields of an MQTT event, where `ts` is Unix time."""
    return {"capture_ts" if key == "ts" else key: value for key, value in asdict(event).items()}
