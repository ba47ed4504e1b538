"""An exchange of one engine for another whose reports and requests are kept in lists."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from raising_world import config_in
from turned_clock import TurnedClock

from agent.camera.capture import Frame
from agent.common.errors import AgentError
from agent.contract.messages import Birth
from agent.control.policies import Policies
from agent.control.summary import RunSummary
from agent.control.swap import EngineSwap
from agent.jobs.job import JobTracker
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.serving.trial import AnswerRecord, TrialEvents
from agent.state.store import StateStore
from agent.uplink.reporter import Reporter
from agent.validation.verdict import Verdict
from agent.vision.task import ServedFrame
from agent.vision.tasks.raw import RawOutputs
from calibrate.errors import TaredError
from calibrate.statistics.evidence import Interval
from engines.errors import EngineError

UNKNOWN, BAD = Interval(0.0, -1.0, 1.0, 0), Interval(-0.4, -0.6, -0.2, 30)
VERDICT = Verdict(True, "", 32, 0, 0.95, 0.9, 0.0, 0.0, 1.0, 1.0, 1.0)
IMAGE = np.zeros((2, 2, 3), np.uint8)
REFUSES = EngineError("store.write", "no space left", "a writable store", "check the disk")


class Calls(list[Any]):
    """A JobTracker that keeps its calls; `journal` is its answer to a probation."""

    journal: AgentError | None = None
    trigger = "alarm"
    started_s = 0.0

    def progress(self, step: str, _percent: int) -> None:
        self.append(("progress", step))

    def enter_probation(self, artefact_id: str) -> None:
        if self.journal is not None:
            raise self.journal
        self.append(("probation", artefact_id))

    def succeed(self, result: dict[str, Any]) -> None:
        self.append(("succeed", result["artefact"]))

    def fail(self, error: TaredError, *, rolled_back: bool = False) -> None:
        self.append(("roll_back" if rolled_back else "fail", error.code))


class Loop:
    """Of the frame path: what it was asked for; `on_trial` is false once it has gone back by itself."""

    on_trial = True
    is_committing = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def commit(self) -> bool:
        self.asked.append("keep")
        return self.on_trial

    def roll_back(self, error: AgentError) -> bool:
        self.asked.append(error.code)
        return self.on_trial


class Bench:
    """A swap of engine `old` for engine `new`, with lists of what its parts were called with."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        config = config_in(folder, state_dir=folder, probation={"frames": 20, "seconds": 1.0})
        self.loop, self.record, self.clock, self.report = Loop(), AnswerRecord(live=False), TurnedClock(), Calls()
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.served: list[tuple[str | None, float]] = []
        self.rolled_back: list[str] = []
        self.rejected: list[tuple[str, str]] = []  # artefact, reason
        self.committed: list[str] = []
        self.closed: list[str] = []
        self.disk: list[TaredError] = []  # its next refusals
        self.frames = 0
        self.summary = RunSummary("old")
        reporter = Reporter(None, Birth(agent_version="0"))
        monkeypatch.setattr(reporter, "event", lambda kind, *_, **detail: self.events.append((kind, detail)))
        state = SimpleNamespace(fidelity=UNKNOWN, gain=UNKNOWN, is_loss=False, drift=None)
        self.pipeline: Any = SimpleNamespace(
            loop=self.loop,
            record=self.record,
            error=None,
            dropped=Counter(),
            trial=None,
            serving_since=lambda ts: {"camera": 7.0 if ts is None else ts},
            observer=SimpleNamespace(measured=None, states=lambda: {"camera": state}),
            start_trial=lambda _id, _engine, events, **_: setattr(self.pipeline, "trial", events),
        )
        service = SimpleNamespace(
            serving=SimpleNamespace(id="old"), is_degraded=False, commit=self._commit, reject=self._reject
        )
        self.exchange = EngineSwap(
            config,
            cast(EngineService, service),
            cast(Pipeline, self.pipeline),
            reporter,
            self.summary,
            lambda function: function(),
            lambda loaded, since: self.served.append((loaded.artefact.id if loaded else None, since["camera"])),
            self.rolled_back.append,
            Policies(config, StateStore(None)),
            self.clock,
        )

    def _commit(self, loaded: LoadedEngine) -> None:
        if self.disk:
            raise self.disk.pop(0)
        self.committed.append(loaded.artefact.id)

    def _reject(self, artefact: Any, rollback: dict[str, Any]) -> None:
        assert self.report == [("probation", "new")] * (
            rollback["reason"] != "state.write"
        )  # its end is not written yet
        self.rejected.append((artefact.id, rollback["reason"]))
        raise REFUSES

    def start(self, trigger: str = "alarm", name: str = "new") -> TrialEvents | None:
        """Return the events of the frame path; None where it has no trial."""
        artefact = SimpleNamespace(id=name, path=Path(name))
        engine = SimpleNamespace(close=lambda: self.closed.append(name))
        loaded = cast(LoadedEngine, SimpleNamespace(artefact=artefact, engine=engine))
        self.pipeline.trial = None
        self.report.trigger = trigger
        self.exchange.start(loaded, cast(JobTracker, self.report), VERDICT)
        return cast("TrialEvents | None", self.pipeline.trial)

    def live(self, trigger: str = "alarm") -> TrialEvents:
        trial = self.start(trigger)
        assert trial is not None
        self.answer(1)
        trial.live(1.0, 0)
        return trial

    def answer(self, count: int, name: str = "new", inferred_s: float = 0.01) -> None:
        for _ in range(count):
            self.frames += 1
            frame = Frame(self.frames, self.frames / 10.0, 0, IMAGE)
            self.record.add(ServedFrame(frame, name, RawOutputs({}), 0, inferred_s))

    def tick(self, gain: Interval = UNKNOWN, drift: str = "calm") -> None:
        state = SimpleNamespace(gain=gain, is_loss=False, drift=SimpleNamespace(state=drift))
        self.exchange.tick(cast(CameraStates, {"camera": state}))

    def recall(self, calls: Calls) -> bool:
        if not self.exchange.can_recall:
            return False
        self.exchange.recall(cast(JobTracker, calls))
        return True

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tmp_path, monkeypatch)
