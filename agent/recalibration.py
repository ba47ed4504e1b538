"""The daemon's side of a recalibration: collect, hand over to the child process, follow its progress."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from agent.build import Model
from agent.candidate import JobRequest, write_job
from agent.config import Config
from agent.errors import AgentError
from agent.observer import ObserverThread
from calibrate.errors import TaredError

MIN_HELD_OUT = 4  # fewer frames cannot judge a candidate

Post = Callable[[Callable[[], None]], None]  # runs a function in the supervisor's thread


class JobObserver(Protocol):
    """Who asked for a job, and hears of it."""

    def progress(self, step: str, percent: int) -> None: ...

    def succeed(self, result: dict[str, Any]) -> None: ...

    def fail(self, error: TaredError) -> None: ...


@dataclass
class Job:
    """One recalibration. trigger: first-start, alarm or command; started_s: monotonic time of the trigger."""

    trigger: str
    frames: int
    method: str
    report: JobObserver
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    started_s: float = field(default_factory=time.monotonic)
    step: str = "COLLECTING"
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
        model: Model,
        observer: ObserverThread,
        post: Post,
        on_candidate: Callable[[Job, Mapping[str, Any]], None],
    ) -> None:
        self._config = config
        self._model = model
        self._observer = observer
        self._post = post
        self._on_candidate = on_candidate
        self._jobs_dir = config.state_dir / "jobs"
        shutil.rmtree(self._jobs_dir, ignore_errors=True)  # of a daemon that was killed: frames do not outlive it
        self._child: CandidateProcess | None = None
        self.job: Job | None = None

    def request(
        self, trigger: str, report: JobObserver, frames: int | None = None, method: str | None = None
    ) -> Job | None:
        """Start a job, unless one is running: then None."""
        if self.job is not None:
            return None
        calibration = self._config.calibration
        self.job = Job(trigger, frames or calibration.frames, method or calibration.method, report)
        return self.job

    def tick(self, serving: Path | None) -> None:
        """Move the job on; `serving` is the artefact in service, None for the reference."""
        job = self.job
        if job is None:
            return
        if self._child is not None:
            self._child.check_deadline()
            return
        state = self._observer.state()
        if state.collected >= job.frames and state.held_out >= MIN_HELD_OUT:
            self._start_child(job, serving)
        else:
            job.advance("COLLECTING", min(100 * state.collected // job.frames, 99))

    def abandon(self, reason: str) -> None:
        """End the job, whatever it is doing; it then fails with this reason."""
        if self._child is not None:
            self._child.end(reason)
        elif self.job is not None:
            self._finish(_failed("recalibration.cancelled", reason, "start it again when that has passed"))

    @property
    def building(self) -> bool:
        """Whether a child is at work: from here on no more frames are needed."""
        return self._child is not None

    def _start_child(self, job: Job, serving: Path | None) -> None:
        frames, histograms, held_out = self._observer.collected()
        request = JobRequest(
            spec=self._model.spec.model_dump(mode="json"),
            model_sha256=self._model.sha256,
            backend=self._config.backend,
            threads=self._config.threads,
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
                directory, self._config.recalibration.timeout_s, self._post, job.advance, self._finish
            )
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            self._finish(
                _failed("recalibration.disk", f"the job could not be written: {error.strerror}", "free disk space")
            )

    def _finish(self, outcome: Mapping[str, Any]) -> None:
        job, self.job, self._child = self.job, None, None
        if job is None:
            return
        if outcome["outcome"] == "accepted":
            self._on_candidate(job, outcome)
        else:
            job.report.fail(AgentError(**outcome["error"]))


def _failed(code: str, found: str, remedy: str) -> dict[str, Any]:
    """An outcome in the child's own form."""
    error = {"code": code, "found": found, "expected": "a job that comes to its end", "remedy": remedy}
    return {"outcome": "failed", "error": error}


class CandidateProcess:
    """The child of one job: followed line by line, ended on request or when its time is up.

    on_progress(step, percent) and on_outcome(message) are posted to the supervisor's thread; an outcome always
    comes, also from a child that dies without a word.
    """

    def __init__(
        self,
        directory: Path,
        timeout_s: float,
        post: Post,
        on_progress: Callable[[str, int], None],
        on_outcome: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Raises OSError when no process can be started."""
        self._directory = directory
        self._deadline = time.monotonic() + timeout_s
        self._post = post
        self._on_progress = on_progress
        self._on_outcome = on_outcome
        self._ended_for = ""
        self._errors = (directory / "stderr").open("w+", encoding="utf-8")
        # Its own session: a Ctrl-C in the terminal is for the daemon, which ends the child itself.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agent.candidate", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=self._follow, name="candidate", daemon=True).start()

    def check_deadline(self) -> None:
        if time.monotonic() > self._deadline:
            self.end("it ran longer than recalibration.timeout_s")

    def end(self, reason: str) -> None:
        """End the child; its outcome is then `failed` with this reason."""
        if not self._ended_for:
            self._ended_for = reason
            self._process.terminate()

    def _follow(self) -> None:
        outcome: Mapping[str, Any] | None = None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            if "outcome" in message:
                outcome = message
            else:
                self._post(lambda m=message: self._on_progress(m["step"], m["percent"]))  # type: ignore[misc]
        status = self._process.wait()
        self._process.stdout.close()
        if outcome is None or self._ended_for:
            reason = self._ended_for or f"it ended with status {status}{self._last_words()}"
            outcome = _failed(
                "recalibration.child", f"the candidate process failed: {reason}", "see the log, then try again"
            )
        self._errors.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        final = outcome
        self._post(lambda: self._on_outcome(final))

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""
