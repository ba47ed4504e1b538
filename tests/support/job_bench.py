"""Executor on two engines, with a scripted child, and a frame path that serves at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import onnx
import pytest
from executor_bench import executor_on, stored
from raising_world import collapsing_net, config_in, observer_state, observing
from runtime_under_test import RUNTIME
from turned_clock import TurnedClock
from unexpected import unexpected

from agent.collection.collection import Collected, SharedCollection
from agent.commands.dispatcher import CommandProgress
from agent.contract.commands import CommandResult, RecalibrateArgs
from agent.contract.messages import Birth
from agent.control.executor import Executor
from agent.jobs import workshop
from agent.jobs.child_process import JobOutcome
from agent.jobs.headroom import Headroom
from agent.jobs.job import JobJournal
from agent.models.engine_service import EngineService
from agent.models.model import open_model
from agent.monitoring.camera_monitor import CameraState
from agent.uplink.reporter import Reporter
from calibrate.histogram import AbsHistogram
from engines.interface import Array
from engines.registry import open_backend
from engines.store.artefact import Artefact, Store

SETTINGS = {
    "probation": {"frames": 1, "seconds": 0.0},
    "recalibration": {"automatic": False},
    "store": {"reserve_bytes": 0},
}


class ScriptedChild:
    """Takes the place of a candidate process; the newest one is `latest`."""

    latest: ScriptedChild

    def __init__(
        self,
        directory: Path,
        on_progress: Callable[[str, int], None],
        on_outcome: Callable[[JobOutcome], None],
        **_: object,
    ) -> None:
        self.directory, self.on_progress, self.on_outcome = directory, on_progress, on_outcome
        self.ended = False
        ScriptedChild.latest = self

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def end(self) -> None:
        self.ended = True
        self._clear()

    def ends_with(self, outcome: JobOutcome) -> None:
        self._clear()
        self.on_outcome(outcome)

    def _clear(self) -> None:
        for path in self.directory.glob("*"):
            path.unlink()
        self.directory.rmdir()


@dataclass
class JobDeskBench:
    """Executor on two engines, the first of which serves; `other` is what every job comes to."""

    executor: Executor
    service: EngineService
    journal: JobJournal
    other: Artefact
    state: CameraState
    clock: TurnedClock
    results: list[CommandResult] = field(default_factory=list)

    def configure(self, **recalibration: object) -> None:
        """Change settings of recalibration; a calibration takes 8 frames."""
        config = self.executor.config
        changed = config.recalibration.model_copy(update=recalibration)
        calibration = config.calibration.model_copy(update={"frames": 8})
        self.executor.configure(config.model_copy(update={"recalibration": changed, "calibration": calibration}))

    def recalibrate(
        self, outcome: JobOutcome | None = None, steps: tuple[str, ...] = ("BUILDING", "VALIDATING")
    ) -> None:
        """Recalibrate by command, to the end. outcome: that of its child; None: `other`."""
        report = CommandProgress(f"c{len(self.journal.records())}", self.results.append)
        self.executor.recalibrate(report, RecalibrateArgs(frames=8, method="max"))
        if report.latest.final:
            return
        begun = getattr(ScriptedChild, "latest", None)
        for _ in range(3):
            self.executor.tick({"camera": self.state})
        if ScriptedChild.latest is begun or ScriptedChild.latest.ended:
            return
        for number, step in enumerate(steps):
            ScriptedChild.latest.on_progress(step, 50 + number)
        if not ScriptedChild.latest.ended:
            ScriptedChild.latest.ends_with(outcome or JobOutcome(artefact=self.other.path))

    def finals(self) -> list[CommandResult]:
        return [result for result in self.results if result.final]

    def left(self, state_dir: Path) -> list[Path]:
        return [*state_dir.rglob(".*.new"), *(state_dir / "jobs").glob("*")]


@pytest.fixture(scope="module")
def two_engines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, and a state directory with two engines."""
    folder = tmp_path_factory.mktemp("store")
    onnx.save(collapsing_net(), folder / "model.onnx")
    stored(config_in(folder, **SETTINGS))
    return folder


@pytest.fixture
def job_desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_engines: Path) -> JobDeskBench:
    shutil.copytree(two_engines, tmp_path, symlinks=True, dirs_exist_ok=True)
    ScriptedChild.latest = cast(ScriptedChild, SimpleNamespace(ended=True))
    monkeypatch.setattr(workshop, "JobProcess", ScriptedChild)
    monkeypatch.setattr(Headroom, "reason_to_wait", lambda _: "")  # what this machine has to spare is its own affair
    monkeypatch.setattr(Headroom, "reason_to_pause", lambda _: "")
    config = config_in(tmp_path, **SETTINGS)
    service = EngineService(open_model(config.model), open_backend(RUNTIME), Store(config.state_dir))
    service.start(unexpected).close()
    reporter = Reporter(None, Birth(agent_version="0"))
    state = replace(observer_state(config), collected=100, informative=100)
    observer = observing(config, state)
    seen = {"tap": AbsHistogram(np.ones(8, np.int64), 0, 0.5, 0, 0)}
    monkeypatch.setattr(SharedCollection, "counts", (100, 100))
    held_out: list[Array] = [np.zeros((1, 3, 8, 8), np.float32)]
    monkeypatch.setattr(SharedCollection, "collected", lambda _: Collected(100, seen, held_out, []))
    clock = TurnedClock()
    executor = executor_on(config, service, observer, reporter, clock=clock)
    previous = service.store.read("previous")
    assert previous is not None
    return JobDeskBench(executor, service, executor.journal, previous, state, clock)
