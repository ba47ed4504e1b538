"""A desk at which the daemon decides, state by state; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from operations_bench import operations_on, stored
from raising_world import collapsing_net, config_in, observer_state, observing

from agent.collection.collection import SharedCollection
from agent.commands.dispatcher import CommandProgress
from agent.contract.commands import CommandResult, RecalibrateArgs
from agent.contract.messages import Birth
from agent.control.operations import Operations
from agent.jobs.child_process import JobOutcome
from agent.jobs.job import JobJournal
from agent.monitoring.camera_monitor import CameraMonitor, CameraState
from agent.monitoring.view import ViewState
from agent.uplink.reporter import Reporter
from engines.store.artefact import Artefact

TROUBLES = ["moved", "frozen"]


@dataclass
class Desk:
    """Operations on two engines, the first of which serves; an alarm is on."""

    operations: Operations
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
            self.operations.tick({"camera": state})
        job = self.operations.jobs.job
        return job.tracker.trigger if job is not None else ""

    def recalibrate(self) -> None:
        assert self.operations.recalibrate(CommandProgress("c1", self.results.append), RecalibrateArgs())

    def accept(self) -> None:
        """The running job has built an engine that passed."""
        job, self.operations.jobs.job = self.operations.jobs.job, None
        assert job is not None
        self.operations._on_candidate(job, JobOutcome(artefact=self.other.path))

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
        operations = operations_on(config.model_copy(update={"model": spec}), service, observer, reporter, live=False)
        other = next(each for each in artefacts if each.id != service.serving.id)
        monitor = observer.monitors["camera"]
        gathering, paces = observer.collection, observer.paces
        return Desk(operations, operations.journal, monitor, gathering, other, state, reported, paces)

    return make
