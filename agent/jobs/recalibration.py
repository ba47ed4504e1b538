"""A job's child process as the daemon keeps it: paused when the board cannot afford it, and given a time to end in."""

from __future__ import annotations

import errno
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from agent.collection.selection import HELD_OUT_EVERY
from agent.commands.dispatcher import CANCELLED
from agent.common.errors import AgentError
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.jobs.candidate import JobRequest, write_job
from agent.jobs.child_process import JobProcess
from agent.jobs.child_protocol import JobOutcome
from agent.jobs.headroom import Headroom
from agent.jobs.job import MODEL, Job, JobState, WorkObserver
from agent.jobs.reference import write_reference_job
from agent.models.engine_service import EngineService
from agent.monitoring.observer import ObserverThread
from agent.planning.precision_raise import PrecisionRaise
from agent.system.board import BoardState
from agent.system.state_dir import sweep_builds
from agent.validation.verdict import MIN_TELLING
from calibrate.errors import TaredError


class SupervisedChild:
    """`child` may work for timeout_s; the time in which it stands still does not count."""

    def __init__(self, child: JobProcess, headroom: Headroom, timeout_s: float) -> None:
        self._child = child
        self._headroom = headroom
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self._stands = False

    def tick(self) -> str:
        """Why it stands still now, empty while it works.

        Raises AgentError: `recalibration.timeout`, and `headroom.pause` where it has stood still for too long.
        """
        reason = self._headroom.must_pause()
        if reason and not self._stands:
            self._child.pause()
        elif self._stands and not reason:
            self._child.resume()
        self._stands = bool(reason)
        if time.monotonic() - self._started_s - self._headroom.paused_s > self._timeout_s:
            raise timed_out("the candidate process", self._timeout_s, "see what it was doing")
        return reason

    def end(self) -> None:
        """End the process, whatever it is doing; takes a few seconds at most."""
        self._child.end()


def timed_out(what: str, timeout_s: float, remedy: str) -> AgentError:
    """Why a job is given up that has not come to its end."""
    found = f"{what} took longer than {timeout_s:.0f} s"
    return AgentError("recalibration.timeout", found, "an end in time", f"{remedy}, or raise recalibration.timeout_s")


class CollectionWait:
    """Until there are `frames`, and telling ones among the held-out; each that counts restarts the clock: a slow camera
    needs its time."""

    def __init__(self, frames: int, timeout_s: float) -> None:
        self._frames = frames
        self._timeout_s = timeout_s
        self._counts = (0, 0)  # frames, and telling ones, as far as they are asked for
        self.start_clock()

    def start_clock(self) -> None:
        """It is waited for more from now on."""
        self._deadline_s = time.monotonic() + self._timeout_s

    def has_enough(self, collected: int, telling: int) -> bool:
        """Raises AgentError (`recalibration.timeout`) once nothing that counts has come for timeout_s."""
        counts = min(collected, self._frames), min(telling, MIN_TELLING)
        if counts == (self._frames, MIN_TELLING):
            return True
        if time.monotonic() > self._deadline_s:
            raise self._nothing_more(*counts)
        if any(now > before for now, before in zip(counts, self._counts, strict=True)):
            self.start_clock()
        self._counts = counts
        return False

    def _nothing_more(self, frames: int, telling: int) -> AgentError:
        if frames < self._frames:
            found, remedy = f"{frames} of {self._frames} frames", "see the camera, ask for fewer frames"
        else:
            found = f"nothing is seen on the frames but on {telling} of those that judge"
            remedy = "wait until something is to be seen"
        found = f"{JobState.COLLECTING.value}: {found}, and no more for {self._timeout_s:.0f} s"
        remedy = f"{remedy}, or raise recalibration.timeout_s"
        return AgentError("recalibration.timeout", found, "frames to go by", remedy)


CHANGED = "model.changed"  # a new model that cannot be served
_OF_THE_BOARD = ("recalibration.memory", "store.room", "store.write")  # errors that say nothing of a new model
_COLLECTED_PERCENT = 40  # of the whole job; the child reports the rest


class Recalibration:
    """At most one job at a time: COLLECTING in the observer, then the child's CALIBRATING, BUILDING, VALIDATING.

    make_room is called before a child builds, and raises TaredError where the disk has no room for what it builds.
    on_candidate(job, outcome) is called in the supervisor's thread with an accepted candidate; the job is over
    for this class then, and its success is the supervisor's to report. Everything is called in that thread.
    """

    def __init__(
        self,
        config: Config,
        service: EngineService,
        observer: ObserverThread,
        post: RunInMainThread,
        make_room: Callable[[], None],
        on_candidate: Callable[[Job, JobOutcome], None],
    ) -> None:
        self.config = config
        self._service = service
        self._observer = observer
        self._post = post
        self._make_room = make_room
        self._on_candidate = on_candidate
        self._board = BoardState()
        self._headroom = Headroom(config.recalibration.headroom, self._board)  # of the job
        self._work: SupervisedChild | None = None
        self._collecting = CollectionWait(0, 0.0)  # of the job
        self.job: Job | None = None

    @property
    def building(self) -> bool:
        """Whether a child is at work: from here on no more frames are needed."""
        return self._work is not None

    @property
    def collecting(self) -> bool:
        return self.job is not None and self._work is None

    def request(
        self,
        trigger: str,
        report: WorkObserver,
        frames: int | None = None,
        method: str | None = None,
        raising: PrecisionRaise | None = None,
        max_loss: float | None = None,
        merged: Path | None = None,
    ) -> None:
        """Start a job; none may be running. One that cannot be journaled has failed at once.

        merged: a fleet's calibration, which needs frames only for its verdict.
        """
        calibration = self.config.calibration
        if merged is not None:
            frames = (HELD_OUT_EVERY - 1) * self.config.observe.held_out  # by then as many are held out
        frames, method = frames or calibration.frames, method or calibration.method
        job = Job(trigger, frames, method, report, raising, max_loss, merged=merged)
        self._begin(job)
        if self.job is not None:
            self._advance(self.job, JobState.COLLECTING.value, 0)

    def build_reference(self, report: WorkObserver, model: Path | None = None) -> None:
        """Have the float reference built of what the model's file holds now, or of another one that is meant for its
        place, which tells whether it can be used; none may be running."""
        calibration = self.config.calibration
        self._begin(Job(MODEL, calibration.frames, calibration.method, report, model=model))

    def tick(self) -> None:
        """Move the job on."""
        if self.job is None:
            return
        try:
            self._move(self.job)
        except TaredError as error:
            self._give_up(error)

    def abandon(self, reason: str) -> None:
        """End the job, whatever it is doing: it is cancelled for this reason."""
        self._give_up(AgentError(CANCELLED, reason, "a job that is left to end", "start it again"))

    def stop(self, reason: str, stopped: BaseException | None) -> None:
        """As `abandon`, at the end of the frame path; where that did not end by itself, the job fails for it."""
        if stopped is None:
            self.abandon(reason)
        else:
            self._give_up(AgentError("swap.stopped", f"the frame path has failed: {stopped}", "frames", "see the log"))

    def _begin(self, job: Job) -> None:
        self.job = job
        self._headroom = Headroom(self.config.recalibration.headroom, self._board)
        self._collecting = CollectionWait(job.frames, self.config.recalibration.timeout_s)
        try:
            self._make_room()  # minutes of collecting for a disk that is full anyway help nobody
        except TaredError as error:
            self._give_up(error)

    def _move(self, job: Job) -> None:
        """Raises TaredError for a job that has to be given up."""
        if self._work is not None:
            job.waits(self._work.tick())
        elif job.trigger != MODEL and not self._has_collected(job):
            return
        elif job.waits(self._headroom.may_start()):
            self._collecting.start_clock()  # frames that have to be collected anew by then take their own time
        else:
            self._make_room()
            self._hand_over(job)

    def _has_collected(self, job: Job) -> bool:
        """Raises AgentError (`recalibration.timeout`)."""
        collected, telling = self._observer.gathering.counts
        if self._collecting.has_enough(collected, telling):
            return True
        percent = min(_COLLECTED_PERCENT * collected // job.frames, _COLLECTED_PERCENT - 1)
        self._advance(job, JobState.COLLECTING.value, percent)
        return False

    def _advance(self, job: Job, step: str, percent: int) -> bool:
        """Whether it goes on: not one that was given up meanwhile, nor one whose step cannot be journaled."""
        if job is not self.job:
            return False
        try:
            job.advance(step, percent)
        except AgentError as error:
            self._give_up(error)
        return job is self.job

    def _hand_over(self, job: Job) -> None:
        """To the child, with what was collected."""
        if job.trigger == MODEL:
            if self._advance(job, JobState.BUILDING.value, 0):
                model = job.model or self.config.model.path
                module = "agent.jobs.reference"
                self._start_child(job, module, lambda path: write_reference_job(path, self.config, model))
            return
        frames, histograms, held_out = self._observer.gathering.collected()
        job.report.selected(self._observer.gathering.selection(), self.config.state_dir)
        if self._advance(job, JobState.CALIBRATING.value, _COLLECTED_PERCENT):
            request = self._job_request(job, frames)
            write = partial(write_job, request=request, histograms=histograms, held_out=held_out, merged=job.merged)
            self._start_child(job, "agent.jobs.candidate", write)

    def _job_request(self, job: Job, frames: int) -> JobRequest:
        service, serving = self._service, self._service.calibrated_path
        return JobRequest(
            spec=service.model.spec.model_dump(mode="json"),
            model_sha256=service.model.sha256,
            backend=self.config.backend,
            threads=self.config.threads,
            plan=service.plan.to_json(),
            raised_from=service.origin if service.raised or job.raising is not None else "",
            raising=job.raising.as_dict() if job.raising is not None else None,
            dla=self.config.dla,
            method=job.method,
            frames=frames,
            source=", ".join(camera.name for camera in self.config.every_camera),
            state_dir=str(self.config.state_dir),
            serving=str(serving) if serving else None,
            max_loss=self.config.recalibration.max_loss if job.max_loss is None else job.max_loss,
            max_slowdown=self.config.recalibration.max_slowdown,
        )

    def _start_child(self, job: Job, module: str, write: Callable[[Path], None]) -> None:
        directory = self.config.state_dir / "jobs" / job.report.id
        recalibration = self.config.recalibration
        try:
            write(directory)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = f"the job could not be written: {error.strerror}"
            self._give_up(AgentError("recalibration.disk", found, "room for the held-out frames", "free disk space"))
            return
        try:
            child = JobProcess(
                directory,
                lambda step, percent: self._post(lambda: self._advanced(job, step, percent)),
                lambda outcome: self._post(lambda: self._finish(job, outcome)),
                module,
                recalibration.nice,
                recalibration.memory_bytes,
            )
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = f"the candidate process could not be started: {error.strerror}"
            remedy = "free memory or disk space, or raise the limits on processes, threads and open files"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
            code = "recalibration.disk" if full else "recalibration.child"
            self._give_up(AgentError(code, found, "one more process, with a file for its words", remedy))
            return
        self._work = SupervisedChild(child, self._headroom, recalibration.timeout_s)

    def _advanced(self, job: Job, step: str, percent: int) -> None:
        self._advance(job, step, percent)

    def _finish(self, job: Job, outcome: JobOutcome) -> None:
        """The child's outcome; of a job that was given up meanwhile it is no news any more."""
        if job is not self.job:
            return
        self.job, self._work = None, None
        sweep_builds(self.config.state_dir)
        if outcome.error is not None:
            job.report.fail(_of_new_model(outcome.error) if job.trigger == MODEL else outcome.error)
        else:
            self._on_candidate(job, outcome)

    def _give_up(self, error: TaredError) -> None:
        (job, self.job), (work, self._work) = (self.job, None), (self._work, None)
        if work is not None:
            work.end()
            sweep_builds(self.config.state_dir)
        if job is not None:
            job.report.fail(error)


def _of_new_model(error: TaredError) -> TaredError:
    if error.code in _OF_THE_BOARD:
        return error
    found = f"the model's file has changed, and cannot be served: {error.code}: {error.found}"
    return AgentError(CHANGED, found, error.expected, f"{error.remedy}; what serves goes on until then")
