"""The daemon's side of a recalibration: collect, hand over to the child process, follow its progress."""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from agent.candidate import JobRequest, Outcome, write_job
from agent.child import CandidateProcess
from agent.config import Config
from agent.errors import AgentError
from agent.observer import ObserverThread
from agent.raising import Raising
from agent.service import Service
from agent.verdict import MIN_TELLING
from calibrate.errors import TaredError

CANCELLED = "recalibration.cancelled"
COLLECTING = "COLLECTING"
_COLLECTED_PERCENT = 40  # of the whole job; the child reports the rest

Post = Callable[[Callable[[], None]], None]  # runs a function in the supervisor's thread


class JobObserver(Protocol):
    """Who asked for a job, and hears of it; percent is of the whole job."""

    def progress(self, step: str, percent: int) -> None: ...

    def succeed(self, result: dict[str, Any]) -> None: ...

    def fail(self, error: TaredError) -> None: ...


@dataclass
class Job:
    """One recalibration. trigger: first-start, alarm, precision or command; started_s: monotonic time of the trigger.

    raising: by how much precision is raised, None where it is not.
    """

    trigger: str
    frames: int
    method: str
    report: JobObserver
    raising: Raising | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    started_s: float = field(default_factory=time.monotonic)
    step: str = COLLECTING
    percent: int = 0

    def advance(self, step: str, percent: int) -> None:
        """Note the progress; report it at each new step, and ten percent after ten percent."""
        news = (step, percent // 10) != (self.step, self.percent // 10)
        self.step, self.percent = step, percent
        if news:
            self.report.progress(step, percent)


class Recalibration:
    """At most one job at a time: COLLECTING in the observer, then the child's CALIBRATING, BUILDING, VALIDATING.

    on_candidate(job, outcome) is called in the supervisor's thread with an accepted candidate; the job is over
    for this class then, and its success is the supervisor's to report. Everything is called in that thread.
    """

    def __init__(
        self,
        config: Config,
        service: Service,
        observer: ObserverThread,
        post: Post,
        on_candidate: Callable[[Job, Outcome], None],
    ) -> None:
        self._config = config
        self._service = service
        self._observer = observer
        self._post = post
        self._on_candidate = on_candidate
        self._jobs_dir = config.state_dir / "jobs"
        shutil.rmtree(self._jobs_dir, ignore_errors=True)  # of a daemon that was killed: frames do not outlive it
        self._child: CandidateProcess | None = None
        self._deadline_s = 0.0
        self.job: Job | None = None

    @property
    def building(self) -> bool:
        """Whether a child is at work: from here on no more frames are needed."""
        return self._child is not None

    @property
    def collecting(self) -> bool:
        return self.job is not None and self._child is None

    def request(
        self,
        trigger: str,
        report: JobObserver,
        frames: int | None = None,
        method: str | None = None,
        raising: Raising | None = None,
    ) -> Job | None:
        """Start a job, unless one is running: then None."""
        if self.job is not None:
            return None
        calibration = self._config.calibration
        self.job = Job(trigger, frames or calibration.frames, method or calibration.method, report, raising)
        self._start_clock()
        return self.job

    def tick(self) -> None:
        """Move the job on."""
        job = self.job
        if job is None:
            return
        if time.monotonic() > self._deadline_s:
            found = f"{job.step} took longer than {self._config.recalibration.timeout_s:.0f} s"
            remedy = "ask for fewer frames, or raise recalibration.timeout_s"
            self._give_up(AgentError("recalibration.timeout", found, "an end in time", remedy))
        elif self._child is None:
            state = self._observer.state()
            if state.collected >= job.frames and state.telling >= MIN_TELLING:
                self._start_child(job)
            else:
                job.advance(COLLECTING, min(_COLLECTED_PERCENT * state.collected // job.frames, _COLLECTED_PERCENT - 1))

    def abandon(self, reason: str) -> None:
        """End the job, whatever it is doing; it then fails with this reason."""
        self._give_up(AgentError(CANCELLED, reason, "a job that is left to end", "start it again"))

    def _start_clock(self) -> None:
        self._deadline_s = time.monotonic() + self._config.recalibration.timeout_s

    def _start_child(self, job: Job) -> None:
        service, serving = self._service, self._service.calibrated_path
        frames, histograms, held_out = self._observer.findings.collected()
        request = JobRequest(
            spec=service.model.spec.model_dump(mode="json"),
            model_sha256=service.model.sha256,
            backend=self._config.backend,
            threads=self._config.threads,
            plan=service.plan.to_json(),
            raised_from=service.origin if service.raised or job.raising is not None else "",
            raising=job.raising.as_dict() if job.raising is not None else None,
            dla=self._config.dla,
            method=job.method,
            frames=frames,
            source=self._config.camera.name,
            state_dir=str(self._config.state_dir),
            serving=str(serving) if serving else None,
            max_loss=self._config.recalibration.max_loss,
            nice=self._config.recalibration.nice,
        )
        directory = self._jobs_dir / job.id
        try:
            write_job(directory, request, histograms, held_out)
            self._child = CandidateProcess(
                directory,
                lambda step, percent: self._post(lambda: job.advance(step, percent)),
                lambda outcome: self._post(lambda: self._finish(job, outcome)),
            )
            self._start_clock()
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = f"the job could not be written: {error.strerror}"
            self._give_up(AgentError("recalibration.disk", found, "room for the held-out frames", "free disk space"))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        """The child's outcome; of a job that was given up meanwhile it is no news any more."""
        if job is not self.job:
            return
        self.job, self._child = None, None
        if outcome.error is not None:
            job.report.fail(outcome.error)
        else:
            self._on_candidate(job, outcome)

    def _give_up(self, error: AgentError) -> None:
        (job, self.job), (child, self._child) = (self.job, None), (self._child, None)
        if child is not None:
            child.end()
        if job is not None:
            job.report.fail(error)
