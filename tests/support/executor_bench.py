"""Executor over a store and jobs without a camera or a child process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest
from device import carry_out
from kept import kept_in
from raising_world import COLLAPSES, collapsing_net, config_in, observer_state, observing
from runtime_under_test import RUNTIME
from turned_clock import TurnedClock
from unexpected import unexpected

from agent.commands.dispatcher import CommandProgress
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.latency import LoopMeter
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.contract.commands import CommandResult, RecalibrateArgs, RollbackArgs
from agent.contract.messages import Birth
from agent.control.executor import Executor
from agent.control.snapshot import BoardSnapshot, take_snapshot
from agent.core import facts as fact
from agent.core.kinds import RaisedPrecision
from agent.daemon.handlers import EngineHandlers
from agent.jobs.child_process import JobOutcome
from agent.jobs.job import JobJournal
from agent.models.build import build_artefact
from agent.models.engine_service import EngineService
from agent.models.model import calibrate, open_model
from agent.monitoring.accuracy import LiveAccuracy
from agent.monitoring.camera_monitor import CameraState, CameraStates
from agent.serving.pipeline import Pipeline
from agent.serving.trial import AnswerRecord, TrialEvents
from agent.uplink.reporter import Reporter
from calibrate.plan import PrecisionPlan
from engines.interface import silent
from engines.registry import open_backend
from engines.store.artefact import Artefact, Store


@dataclass
class Desk:
    """Executor on a store of two engines: one all in INT8, and one that was raised from it, which serves."""

    executor: Executor
    service: EngineService
    int8: Artefact
    raised: Artefact
    events: list[str]
    state: CameraState
    clock: TurnedClock
    results: list[CommandResult] = field(default_factory=list)

    def tick(self, **changes: Any) -> None:
        """Show the state of a camera with low fidelity, but for these changes."""
        self.executor.tick({"camera": replace(self.state, **changes)})

    @property
    def rung(self) -> int | None:
        """The rung of the running job."""
        job = self.executor.state.job
        return job.kind.rung if job is not None and isinstance(job.kind, RaisedPrecision) else None

    def cancel(self) -> None:
        self.executor.stop("the test goes on")

    def finish(self, outcome: JobOutcome) -> None:
        """The child of the running job has ended so."""
        finish(self.executor, outcome)

    def roll_back(self) -> None:
        carry_out(EngineHandlers(self.executor), "rollback", RollbackArgs(), self.results.append)


class Loop:
    """A frame path on which every engine serves at once, and is kept, or taken back, as is wished."""

    is_committing = is_stuck = False
    has_live_candidate = True

    def start_trial(self, _identity: str, engine: Any, events: TrialEvents, **_: object) -> None:
        engine.close()
        self._events = events
        events.live(1.0, 0)

    def roll_back(self, error: AgentError) -> bool:
        self._events.failed(error, 2.0, False)
        return True

    def commit(self) -> bool:
        return True


def still_feed() -> SimpleNamespace:
    """A camera that is there, and of which no frame was answered."""
    meters = {"meter": LoopMeter(), "run_meter": LoopMeter()}
    return SimpleNamespace(last_ts=0.0, is_up=True, lost="", accuracy=LiveAccuracy(None), **meters)


def frame_path() -> dict[str, Any]:
    """Return the parts of a pipeline that an engine swap uses."""
    loop = Loop()
    return {
        "loop": loop,
        "start_trial": loop.start_trial,
        "record": AnswerRecord(live=True),
        "dropped": Counter(),
        "feeds": {"camera": still_feed()},
        "run_meter": LoopMeter(),
        "error": None,
        "mismatch": None,
        "open_mismatch": None,
        "keep_evidence": lambda *_: None,
        "serving_since": lambda ts: {"camera": ts or 0.0},
    }


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Desk]:
    onnx.save(collapsing_net(), tmp_path / "model.onnx")

    def make(raised_serves: bool = False, live: bool = True, **recalibration: object) -> Desk:
        config = config_in(tmp_path, recalibration=recalibration, probation={"frames": 1, "seconds": 0.0})
        service, artefacts = stored(config)
        if not raised_serves:
            service.store.promote(artefacts[0])
            service.start(unexpected).close()
        events: list[str] = []
        reporter = Reporter(None, Birth(agent_version="0"))
        monkeypatch.setattr(reporter, "event", lambda kind, *_, **detail: events.append(f"{kind} {detail}"))
        state = observer_state(config)
        clock = TurnedClock()
        executor = executor_on(config, service, observing(config, state), reporter, live, clock)
        int8, raised = artefacts
        return Desk(executor, service, int8, raised, events, state, clock)

    return make


def executor_on(
    config: Config,
    service: EngineService,
    observer: SimpleNamespace,
    reporter: Reporter,
    live: bool = True,
    clock: Clock = SYSTEM_CLOCK,
) -> Executor:
    """Start an executor on a frame path without frames; functions for the main thread run at once."""
    pipeline = SimpleNamespace(is_live=live, observer=observer, last_ts=0.0, **frame_path())
    state = kept_in(config.state_dir)
    run: RunInMainThread = lambda function: function()  # noqa: E731  (its type is a callable's)
    journal = JobJournal(state)
    executor = Executor(config, service, cast(Pipeline, pipeline), reporter, run, journal, state, clock=clock)
    executor.start(0)
    return executor


def stored(config: Config) -> tuple[EngineService, Sequence[Artefact]]:
    """A store whose raised engine is current, the other one previous."""
    model, backend, store = open_model(config.model), open_backend(RUNTIME), Store(config.state_dir)
    with closing(backend.observer(model.reference, model.placement.taps)) as observer:
        seen = observer.observe(np.random.default_rng(0).uniform(size=(1, 3, 8, 8)).astype(np.float32)).histograms
    calibration = calibrate(model, seen, "max", 1, "test")
    service = EngineService(model, backend, store)
    raised = model.with_plan(PrecisionPlan({COLLAPSES: "raised"}))
    artefacts = [
        build_artefact(under, backend, store.place, silent, calibration=calibration, planned_from=origin)
        for under, origin in ((model, ""), (raised, service.precision_origin))
    ]
    for artefact in artefacts:
        store.promote(artefact)
    service.start(unexpected).close()
    return service, artefacts


def snapshot_of(executor: Executor, states: CameraStates) -> BoardSnapshot:
    """Return the board while its observer has found this."""
    observer = cast(Any, executor.pipeline.observer)
    before, observer.states = observer.states, lambda: states
    try:
        return take_snapshot(executor)
    finally:
        observer.states = before


def ask(at: Desk, command: str, frames: int | None = None) -> bool:
    """Ask for a recalibration; return whether a job carries it out."""
    progress = CommandProgress(command, at.results.append)
    at.executor.recalibrate(progress, RecalibrateArgs(frames=frames))
    return not progress.latest.final


def finish(executor: Executor, outcome: JobOutcome) -> None:
    job = executor.state.job
    assert job is not None
    executor.take(fact.ChildEnded(job.id, str(outcome.artefact or ""), outcome.verdict, outcome.error))


def roll_back_often(executor: Executor, times: int = 3) -> None:
    """Candidates have been rolled back so often today."""
    executor.take(fact.Started(times))


def refuse_journal(monkeypatch: pytest.MonkeyPatch, write: str = "start") -> None:
    """Let no job be journaled, or with `enter` no state of one."""

    def refuse(*_: object, **__: object) -> None:
        raise AgentError("state.write", "a full disk", "", "")

    monkeypatch.setattr(JobJournal, write, refuse)
