"""A desk at which the daemon decides, state by state; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from executor_bench import executor_on, finish, stored
from raising_world import collapsing_net, config_in, observer_state, observing

from agent.collection.collection import SharedCollection
from agent.commands.dispatcher import CommandProgress
from agent.contract.commands import CommandResult, RecalibrateArgs
from agent.contract.messages import Birth
from agent.control.executor import Executor
from agent.jobs.child_process import JobOutcome
from agent.jobs.job import JobJournal
from agent.monitoring.camera_monitor import CameraMonitor, CameraState
from agent.monitoring.view import ViewState
from agent.uplink.reporter import Reporter
from engines.store.artefact import Artefact

TROUBLES = ["moved", "frozen"]


@dataclass
class Desk:
    """Executor on two engines, the first of which serves; an alarm is on."""

    executor: Executor
    journal: JobJournal
    findings: CameraMonitor
    gathering: SharedCollection
    other: Artefact
    state: CameraState
    reported: list[tuple[str, dict[str, Any]]]
    paces: list[bool]  # whether frames are observed at the alert pace, at each tick
    results: list[CommandResult] = field(default_factory=list)

    def tick(self, trouble: str = "", telling: int = 0, times: int = 2, **drift: Any) -> str:
        """Show one state so many times; return the trigger of the running job."""
        assert self.state.drift is not None
        view = ViewState(trouble, {"alike": 0.12345} if trouble else {})
        state = replace(self.state, view=view, informative=telling, drift=replace(self.state.drift, **drift))
        for _ in range(times):
            self.executor.tick({"camera": state})
        job = self.executor.state.job
        return job.kind.trigger.value if job is not None and self.executor.state.trial is None else ""

    def recalibrate(self) -> None:
        self.executor.recalibrate(CommandProgress("c1", self.results.append), RecalibrateArgs())
        assert self.executor.state.job is not None

    def accept(self) -> None:
        """The running job has built an engine that passed."""
        finish(self.executor, JobOutcome(artefact=self.other.path))

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [detail for each, detail in self.reported if each == kind]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Desk]:
    onnx.save(collapsing_net(), tmp_path / "model.onnx")

    def make(task: str = "classify", frames: int = 1) -> Desk:
        config = config_in(tmp_path, probation={"frames": frames, "seconds": 0.0})
        service, artefacts = stored(config)
        reported: list[tuple[str, dict[str, Any]]] = []
        reporter = Reporter(None, Birth(agent_version="0"))
        monkeypatch.setattr(reporter, "event", lambda kind, *_, **detail: reported.append((kind, detail)))
        state = observer_state(config, drift="alarm", serving_db=9.0)
        observer = observing(config, state)
        spec = config.model.model_copy(update={"task": task})
        executor = executor_on(config.model_copy(update={"model": spec}), service, observer, reporter, live=False)
        other = next(each for each in artefacts if each.id != service.serving.id)
        monitor = observer.monitors["camera"]
        gathering, paces = observer.collection, observer.paces
        return Desk(executor, executor.journal, monitor, gathering, other, state, reported, paces)

    return make
