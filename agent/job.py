"""A job as whoever carries it out sees it, and who hears of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent.job_states import JobState
from agent.raising import Raising
from agent.selection_report import SelectionReport
from calibrate.errors import TaredError

MODEL = "model"  # the trigger of a job for another content of the model's file
RUNTIME = "runtime"  # of one that a start does because what serves was built for another runtime
CANCELLED = "recalibration.cancelled"
PROVEN = ("switch", "rollback")  # triggers: to engines that have served before, whose first answer is enough


class JobObserver(Protocol):
    """Who asked for a job, and hears of it; percent is of the whole job.

    What is told before something is begun raises AgentError where that cannot be journaled: then it must not begin.
    """

    @property
    def id(self) -> str: ...

    def progress(self, step: str, percent: int) -> None:
        """Before a step, and in it. Raises AgentError."""

    def probation(self, artefact_id: str) -> None:
        """Before the candidate may serve its first frame. Raises AgentError."""

    def succeed(self, result: dict[str, Any]) -> None:
        """Once `current` has moved."""

    def roll_back(self, error: TaredError) -> None:
        """Once the engine from before serves again."""

    def fail(self, error: TaredError) -> None: ...


class WorkObserver(JobObserver, Protocol):
    """Who also hears what becomes of the work before there is a candidate."""

    def waits(self, reason: str) -> None:
        """For the board to have something to spare, and why; empty: no more."""

    def selected(self, selection: SelectionReport, state_dir: Path) -> None:
        """Before they are handed over."""


@dataclass
class Job:
    """One recalibration, or one build of a new model's reference.

    trigger: first-start, alarm, precision, schedule, command or model. started_s: monotonic time of the trigger.
    raising: by how much precision is raised, None where it is not. max_loss: None as configured. reason: why it stands
    still, empty if it does not. model: the file of a new model that is not in its place yet. merged: a calibration of
    the fleet, which is tried in the place of one from the frames.
    """

    trigger: str
    frames: int
    method: str
    report: WorkObserver
    raising: Raising | None = None
    max_loss: float | None = None
    started_s: float = field(default_factory=time.monotonic)
    step: str = JobState.REQUESTED.value
    percent: int = 0
    reason: str = ""
    model: Path | None = None
    merged: Path | None = None

    def advance(self, step: str, percent: int) -> None:
        """Note the progress; report it at each new step, and ten percent after ten percent. Raises AgentError."""
        news = (step, percent // 10) != (self.step, self.percent // 10)
        self.step, self.percent = step, percent
        if news:
            self.report.progress(step, percent)

    def waits(self, reason: str) -> bool:
        """Note why it stands still now, empty if it does not; whether it does."""
        if reason != self.reason:
            self.reason = reason
            self.report.waits(reason)
        return bool(reason)
