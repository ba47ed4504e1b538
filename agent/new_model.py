"""A new model in the place of the one that is served: it is tried by a child process, and taken up by a new run."""

from __future__ import annotations

import time

from agent.job import MODEL
from agent.job_desk import JobDesk
from agent.job_report import JobReport
from agent.recalibration import CHANGED, Recalibration
from calibrate.errors import TaredError

_AGAIN_S = 60.0  # after what says nothing of the model: no headroom, a full disk, a rollback that came between


class NewModel:
    """Whether it can be used is a job's to find out."""

    def __init__(self, jobs: Recalibration, desk: JobDesk) -> None:
        self._jobs = jobs
        self._desk = desk
        self._content = ""
        self._untried = False
        self._trial: JobReport | None = None
        self._try_at_s = 0.0
        self.usable = False  # it has been built, and waits for this run to end

    def found(self, content: str) -> None:
        """The model's file holds something else; empty: again what is served. The running job is superseded."""
        job = self._jobs.job
        if content or (job is not None and job.trigger == MODEL):
            self._jobs.abandon("superseded by a newer model")
        self._content, self._untried, self.usable = content, bool(content), False
        self._trial, self._try_at_s = None, 0.0

    def tick(self, idle: bool) -> None:
        """Try it as soon as nothing is on probation, and again where a trial has said nothing of it. Raises AgentError
        (`journal.write`)."""
        if self._trial is not None and self._trial.over:
            self._trial, self._untried, self._try_at_s = None, True, time.monotonic() + _AGAIN_S
        if self._untried and idle and time.monotonic() >= self._try_at_s:
            report = self._desk.begin(MODEL, {"content": self._content}, on_failure=self._on_failure)
            self._trial, self._untried = report, False
            self._jobs.build_reference(report)

    def _on_failure(self, error: TaredError) -> None:
        if error.code == CHANGED:  # and cannot be used
            self._trial = None
