"""A new model in the place of the one that is served: it is tried by a child process, and taken up by a new run."""

from __future__ import annotations

import time

from agent.commands.deliveries import StagedModel
from agent.commands.dispatcher import CANCELLED
from agent.common.errors import AgentError
from agent.jobs.job import MODEL, Job
from agent.jobs.recalibration import CHANGED, Recalibration
from agent.jobs.report import JobRegistry, JobTracker
from calibrate.errors import TaredError

_AGAIN_S = 60.0  # after what says nothing of the model: no headroom, a full disk, a rollback that came between
_SUPERSEDED = "superseded by a newer model"


class NewModel:
    """Whether it can be used is a job's to find out: of the model's file, or of one that was delivered beside it, which
    takes its place once the job has passed it. What becomes of a delivered one is told to who sent it, and it is tried
    once: the next try is the sender's."""

    def __init__(self, jobs: Recalibration, desk: JobRegistry) -> None:
        self._jobs = jobs
        self._desk = desk
        self._content = ""
        self._staged: StagedModel | None = None
        self._untried = False
        self._trial: JobTracker | None = None
        self._try_at_s = 0.0
        self.usable = False  # it has been built, and waits for this run to end

    def found(self, content: str) -> None:
        """The model's file holds something else; empty: again what is served. The running job is superseded."""
        if self.usable and content == self._content:  # a delivered one, in its place by now
            return
        if not content and self._staged is not None:  # which is to be tried all the same
            return
        job = self._jobs.job
        if content or (job is not None and job.trigger == MODEL):
            self._jobs.abandon(_SUPERSEDED)
        self._expect(content)

    def bring(self, staged: StagedModel) -> None:
        """One was delivered. The running job is superseded."""
        self._jobs.abandon(_SUPERSEDED)
        self._expect(staged.content)
        self._staged = staged

    def passed(self, job: Job) -> None:
        """It has been built."""
        if self._staged is not None:
            try:
                self._staged.install()
            except AgentError as error:
                job.report.fail(error)
                return
            self._staged = None
        self.usable = True

    def drop(self, reason: str) -> bool:
        """End one that was delivered, and waits; False where there is none."""
        staged, self._staged = self._staged, None
        if staged is None:
            return False
        self._untried, self._trial = False, None
        staged.discard()
        staged.report.fail(AgentError(CANCELLED, reason, "a delivery that is left to end", "send it again"))
        return True

    def tick(self, idle: bool) -> None:
        """Try it as soon as nothing is on probation, and again where a trial has said nothing of it. Raises AgentError
        (`journal.write`)."""
        if self._trial is not None and self._trial.over:
            again = not self.drop("its trial has ended")  # its sender has been told by the job
            self._trial, self._untried, self._try_at_s = None, again, time.monotonic() + _AGAIN_S
        if self._untried and idle and time.monotonic() >= self._try_at_s:
            command, file = (self._staged.report, self._staged.file) if self._staged is not None else (None, None)
            report = self._desk.begin(MODEL, {"content": self._content}, command, self._on_failure)
            self._trial, self._untried = report, False
            self._jobs.build_reference(report, file)

    def _expect(self, content: str) -> None:
        self.drop(_SUPERSEDED)
        self._content, self._untried, self.usable = content, bool(content), False
        self._trial, self._try_at_s = None, 0.0

    def _on_failure(self, error: TaredError) -> None:
        if error.code == CHANGED:  # and cannot be used
            self._trial = None
            if self._staged is not None:
                self._staged.forget()
            self._staged = None
