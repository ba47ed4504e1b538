"""An exchange of the engine in service, `old`, for another one, `new`, on a frame path that serves no frame."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from device import carry_out
from job_bench import JobDeskBench, job_desk, two_engines

from agent.camera.capture import Frame
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult, RollbackArgs, SwitchArgs
from agent.core import facts as fact
from agent.core.kinds import DriftAlarm
from agent.core.state import Job, JobState
from agent.daemon.handlers import EngineHandlers
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.trial import AnswerRecord, TrialEvents
from agent.validation.verdict import Verdict
from agent.vision.task import ServedFrame
from agent.vision.tasks.raw import RawOutputs
from calibrate.errors import TaredError
from calibrate.statistics.evidence import Interval
from engines.errors import EngineError

__all__ = ["job_desk", "two_engines"]  # fixtures

UNKNOWN, BAD = Interval(0.0, -1.0, 1.0, 0), Interval(-0.4, -0.6, -0.2, 30)
VERDICT = Verdict(True, "", 32, 0, 0.95, 0.9, 0.0, 0.0, 1.0, 1.0, 1.0)
IMAGE = np.zeros((2, 2, 3), np.uint8)
REFUSES = EngineError("store.write", "no space left", "a writable store", "check the disk")


class Loop:
    """Of the frame path: what it was asked for; `on_trial` is false once it has gone back by itself."""

    on_trial = True
    is_committing = is_stuck = False

    def __init__(self) -> None:
        self.asked: list[str] = []

    def commit(self) -> bool:
        self.asked.append("keep")
        return self.on_trial

    def roll_back(self, error: AgentError) -> bool:
        self.asked.append(error.code)
        return self.on_trial


class Bench:
    """An executor with lists of what it reported and asked for."""

    def __init__(self, at: JobDeskBench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.executor, self.clock, self.journal = at.executor, at.clock, at.journal
        self.loop, self.record = Loop(), AnswerRecord(live=False)
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.results: list[CommandResult] = []
        self.disk: list[TaredError] = []  # its next refusals
        self.frames = 0
        self.old, self.new = at.service.serving.id, at.other.id
        config = at.executor.config
        probation = config.probation.model_copy(update={"frames": 20, "seconds": 1.0})
        self.executor.configure(config.model_copy(update={"probation": probation}))
        self.pipeline = cast(Any, at.executor.pipeline)
        self.pipeline.loop, self.pipeline.record, self.pipeline.dropped = self.loop, self.record, Counter()
        self.pipeline.start_trial = self._try
        self.pipeline.serving_since = lambda ts: {"camera": 7.0 if ts is None else ts}
        self.state = replace(at.state, gain=UNKNOWN, is_loss=False)
        self.pipeline.observer.states = lambda: {"camera": self.state}
        monkeypatch.setattr(
            at.executor.reporter, "event", lambda kind, *_, **detail: self.events.append((kind, detail))
        )
        promote = at.service.store.promote

        def promoting(artefact: Any) -> None:
            if self.disk:
                raise self.disk.pop(0)
            promote(artefact)

        monkeypatch.setattr(at.service.store, "promote", promoting)
        self.trial: TrialEvents | None = None

    def _try(self, _identity: str, engine: Any, events: TrialEvents, **_: object) -> None:
        engine.close()
        self.trial = events

    @property
    def current(self) -> str:
        """The artefact that the next process would serve."""
        return self.executor.service.store.target("current")

    def start(self, kind: str = "alarm", artefact: str = "") -> TrialEvents:
        """An engine is on trial: of a job by an alarm, or one that has served before."""
        self.trial = None
        executor = self.executor
        progress = CommandProgress(f"c{len(self.journal.records())}", self.results.append)
        if kind == "alarm":
            job = Job(f"{len(self.journal.records())}", DriftAlarm(), self.clock.monotonic_s())
            executor.state = replace(executor.state, pending=job)
            executor.journal.start(job.id, "alarm", {}, [])
            executor.journal.enter(job.id, JobState.VALIDATING)
            executor.state = replace(executor.state, pending=None, job=replace(job, state=JobState.VALIDATING))
            path = executor.service.store.root / "artefacts" / self.new
            executor.take(fact.ChildEnded(job.id, str(path), VERDICT))
        elif kind == "switch":
            wanted = artefact or self.new
            executor.watch.regimes.store.known = (SimpleNamespace(artefact=wanted),)  # type: ignore[assignment]
            executor.take(fact.AskedToSwitch(executor.ledger.expect(progress), SwitchArgs(regime=wanted)))
        else:
            executor.take(fact.AskedToGoBack(executor.ledger.expect(progress), self.new))
        assert self.trial is not None
        return self.trial

    def live(self, kind: str = "alarm") -> TrialEvents:
        trial = self.start(kind)
        self.answer(1)
        trial.live(1.0, 0)
        return trial

    def answer(self, count: int, old: bool = False, inferred_s: float = 0.01) -> None:
        for _ in range(count):
            self.frames += 1
            frame = Frame(self.frames, self.frames / 10.0, 0, IMAGE)
            name = self.old if old else self.new
            self.record.add(ServedFrame(frame, name, RawOutputs({}), 0, inferred_s))

    def tick(self, gain: Interval = UNKNOWN, drift: str = "calm") -> None:
        assert self.state.drift is not None
        state = replace(self.state, gain=gain, drift=replace(self.state.drift, state=drift))
        self.executor.take(fact.Tick(), cast(CameraStates, {"camera": state}))

    def recall(self, command: str) -> CommandResult:
        """The operator's rollback; its result by now."""
        answers: list[CommandResult] = []
        carry_out(EngineHandlers(self.executor), "rollback", RollbackArgs(), answers.append, command)
        self.recalls = answers
        return answers[-1]

    def kinds(self) -> list[str]:
        """The events, but for the steps of jobs."""
        return [kind for kind, _ in self.events if kind != "job"]

    def ends(self) -> list[tuple[str, str]]:
        """State and error of each job."""
        return [(each.state.value, each.error.code if each.error else "") for each in self.journal.records()]


@pytest.fixture
def bench(job_desk: JobDeskBench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(job_desk, monkeypatch)
