"""Move a recalibration, or the build of a new model's reference, from its request to an accepted candidate.

`Recalibration` holds the one running `Job` and moves it on in `tick`:

1. COLLECTING in the observer, for as long as `CollectionWait` allows.
2. It waits for headroom, makes room in the store, and hands the collected frames to a child process.
3. CALIBRATING, PLANNING, BUILDING and VALIDATING are the child's steps. `SupervisedChild` pauses the child when the
   board cannot afford it, and limits its time.
4. An accepted candidate goes to `on_candidate`, which starts the swap.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from agent.collection.selection import HELD_OUT_EVERY
from agent.commands.dispatcher import CANCELLED
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.jobs.child_process import JobOutcome, JobProcess
from agent.jobs.headroom import Headroom
from agent.jobs.job import MODEL, Job, JobState
from agent.jobs.refusal import Attempt, settings_id
from agent.jobs.request import JobRequest, write_job, write_reference_job
from agent.models.engine_service import EngineService
from agent.monitoring.drift import Regime
from agent.monitoring.observer import ObserverThread
from agent.system.board import BoardState
from agent.system.state_dir import remove_unfinished_builds
from agent.validation.model_change import ANSWERS
from agent.validation.verdict import MIN_INFORMATIVE, Verdict
from calibrate.errors import TaredError


class SupervisedChild:
    """A child process that may work for timeout_s; the time in which it is paused does not count."""

    def __init__(self, child: JobProcess, headroom: Headroom, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._child = child
        self._headroom = headroom
        self._timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self._is_paused = False

    def tick(self) -> str:
        """Pause or resume the child as the headroom demands; return why it is paused, empty while it works.

        Raises AgentError:
            recalibration.timeout  it has worked for too long
            headroom.pause         it has been paused for too long
        """
        reason = self._headroom.reason_to_pause()
        if reason and not self._is_paused:
            self._child.pause()
        elif self._is_paused and not reason:
            self._child.resume()
        self._is_paused = bool(reason)
        if self._clock.monotonic_s() - self._started_s - self._headroom.paused_s > self._timeout_s:
            found = f"the candidate process took longer than {self._timeout_s:.0f} s"
            remedy = "see in the log what the job was doing, or raise recalibration.timeout_s"
            raise AgentError("recalibration.timeout", found, "a candidate within recalibration.timeout_s", remedy)
        return reason

    def end(self) -> None:
        """End the process, whatever it is doing. This takes a few seconds at most."""
        self._child.end()


class CollectionWait:
    """Waits until there are `frames` frames, and informative ones among those that judge.

    Each frame that counts restarts the clock, because a slow camera needs its time.
    """

    def __init__(self, frames: int, timeout_s: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._frames = frames
        self._timeout_s = timeout_s
        self._counts = (0, 0)  # frames, and informative ones, up to the numbers that are needed
        self.start_clock()

    def start_clock(self) -> None:
        """Restart the time limit."""
        self._deadline_s = self._clock.monotonic_s() + self._timeout_s

    def has_enough(self, collected: int, informative: int) -> bool:
        """Return True once there are enough.

        Raises AgentError (`recalibration.timeout`) if none that counts has come for timeout_s.
        """
        counts = min(collected, self._frames), min(informative, MIN_INFORMATIVE)
        if counts == (self._frames, MIN_INFORMATIVE):
            return True
        if self._clock.monotonic_s() > self._deadline_s:
            found, remedy = f"{counts[0]} of {self._frames} frames", "check the camera, ask for fewer frames"
            if counts[0] == self._frames:
                found = f"only {counts[1]} of the frames that judge show something"
                remedy = "wait until something is in view"
            found = f"{JobState.COLLECTING.value}: {found}, and no more for {self._timeout_s:.0f} s"
            remedy = f"{remedy}, or raise recalibration.timeout_s"
            raise AgentError("recalibration.timeout", found, "as many frames as the job asked for", remedy)
        if any(now > last for now, last in zip(counts, self._counts, strict=True)):
            self.start_clock()
        self._counts = counts
        return False


CHANGED = "model.changed"  # error of a new model that cannot be served
_OF_THE_BOARD = ("recalibration.memory", "store.room", "store.write")  # errors that say nothing of a new model
_PLANNED_WITHIN = 1.0 / 3.0  # share of the child's time limit, to measure plans: builds and verdicts follow
_COLLECTED_PERCENT = 40  # share of the whole job; the child reports the rest


@dataclass
class Recalibration:
    """The one running job, from its request to an accepted candidate. Everything runs in the supervisor's thread.

    Args:
        run_in_main_thread: Brings the child's messages into the supervisor's thread.
        make_room: Called before a child builds; raises TaredError where the disk has no room.
        on_verdict: Called with the job and the outcome's verdict, on a candidate that was accepted or refused.
        on_candidate: Called with the job and an accepted candidate. The job has ended for this class then; its success
            is reported by the swap.
    """

    config: Config
    service: EngineService
    observer: ObserverThread
    run_in_main_thread: RunInMainThread
    make_room: Callable[[], None]
    on_verdict: Callable[[Job, Verdict], None]
    on_candidate: Callable[[Job, JobOutcome], None]
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._board = BoardState()
        self._headroom = Headroom(self.config.recalibration.headroom, self._board, self.clock)  # this job's
        self._child: SupervisedChild | None = None
        self._collecting = CollectionWait(0, 0.0, self.clock)  # this job's
        self.job: Job | None = None

    @property
    def is_building(self) -> bool:
        """True while a child is at work, for which no more frames are needed."""
        return self._child is not None

    @property
    def is_collecting(self) -> bool:
        return self.job is not None and self._child is None

    def start(self, job: Job) -> None:
        """Start a job; no other may be running. One that cannot be journaled fails at once.

        A recalibration collects frames first; offline work and a fleet's calibration need them only for the verdict.
        For a new model the float reference is built, and its answers are compared with those of today.
        """
        if job.merged is not None or job.offline is not None:
            job.frames = (HELD_OUT_EVERY - 1) * self.config.observe.held_out  # by then as many are held out
        job.frames = job.frames or self.config.calibration.frames
        job.method = job.method or self.config.calibration.method
        self.job = job
        self._headroom = Headroom(self.config.recalibration.headroom, self._board, self.clock)
        self._collecting = CollectionWait(job.frames, self.config.recalibration.timeout_s, self.clock)
        try:
            self.make_room()  # before minutes of collecting, which a full disk would waste
            if job.tracker.trigger != MODEL:
                job.tracker.progress(JobState.COLLECTING.value, 0)
        except TaredError as error:
            self.give_up(error)

    def tick(self) -> None:
        """Move the job on."""
        if self.job is None:
            return
        try:
            self._move(self.job)
        except TaredError as error:
            self.give_up(error)

    def end_collection(self) -> bool:
        """Let a job that collects go on with the frames there are, since no more will come, or give it up.

        Return True while the job goes on without frames: with enough for a verdict, or with a child at work.
        """
        if self._child is not None:
            return True
        job = self.job
        if job is None or job.tracker.trigger == MODEL:
            return False
        collected, informative = self.observer.collection.counts
        if not collected or informative < MIN_INFORMATIVE:
            found = f"the recording has ended, and only {informative} of the frames that judge show something"
            remedy = "play the recording in a loop (camera.loop: true), or use a longer one"
            self.give_up(AgentError("recalibration.frames", found, f"at least {MIN_INFORMATIVE}", remedy))
            return False
        if collected < job.frames:
            job.tracker.report_shortage(collected, job.frames)
            job.frames = collected
            self._collecting = CollectionWait(collected, self.config.recalibration.timeout_s, self.clock)
        return True

    def abandon(self, reason: str) -> None:
        """Cancel the job, whatever it is doing, for this reason."""
        self.give_up(AgentError(CANCELLED, reason, "a job that may run to its end", "start the job again"))

    def stop(self, reason: str, error: BaseException | None) -> None:
        """Cancel the job at the end of the frame path; if the frame path ended by an error, the job fails with it."""
        if error is None:
            self.abandon(reason)
        else:
            self.give_up(
                AgentError(
                    "swap.stopped",
                    f"the frame path has failed: {error}",
                    "frames until the job has ended",
                    "see the log for the cause",
                )
            )

    def _move(self, job: Job) -> None:
        """Move the job on. Raises TaredError for a job that has to be given up."""
        if self._child is not None:
            job.tracker.report_waiting(self._child.tick())
            return
        if job.tracker.trigger != MODEL:
            collected, informative = self.observer.collection.counts
            if not self._collecting.has_enough(collected, informative):
                percent = min(_COLLECTED_PERCENT * collected // job.frames, _COLLECTED_PERCENT - 1)
                job.tracker.progress(JobState.COLLECTING.value, percent)
                return
        reason = self._headroom.reason_to_wait()
        job.tracker.report_waiting(reason)
        if reason:
            self._collecting.start_clock()  # frames that have to be collected again by then take their own time
        else:
            self.make_room()
            self._hand_over(job)

    def _hand_over(self, job: Job) -> None:
        """Hand the job with the collected frames over to a child process. Raises AgentError."""
        if job.tracker.trigger == MODEL:
            job.tracker.progress(JobState.BUILDING.value, 0)
            model, accepted = (job.staged.file, job.staged.accepted) if job.staged else (self.config.model.path, False)
            frames, serving = self.observer.collection.collected().held_out, self.service.serving.path
            self._start_child(
                job, lambda path: write_reference_job(path, self.config, model, serving, frames, accepted)
            )
            return
        collected = self.observer.collection.collected()
        job.tracker.report_selection(self.observer.collection.selection_report(), self.config.state_dir)
        job.tracker.progress(JobState.CALIBRATING.value, _COLLECTED_PERCENT)
        if job.raising is None and job.merged is None and job.offline is None:
            settings = settings_id(self.config, self.service, job.frames, job.method, job.max_loss)
            job.attempt = Attempt(settings, Regime.from_scene(collected.histograms))
        request = self._job_request(job, collected.frames)
        job.max_loss = request.max_loss  # probation goes by the verdict's limit, whatever `set` makes of it meanwhile
        self._start_child(job, lambda path: write_job(path, request, collected, job.merged))

    def _job_request(self, job: Job, frames: int) -> JobRequest:
        service = self.service
        return JobRequest(
            spec=service.model.spec.model_dump(mode="json"),
            model_sha256=service.model.sha256,
            backend=self.config.backend,
            threads=self.config.threads,
            plan=service.model.plan.to_json(),
            start=service.plan.to_json(),
            origin=service.precision_origin,
            planning_s=min(self.config.planning.budget_s, _PLANNED_WITHIN * self.config.recalibration.timeout_s),
            raising=asdict(job.raising) if job.raising is not None else None,
            offline={"setting": job.offline.setting, "path": str(job.offline.path)} if job.offline else None,
            dla=self.config.dla,
            reference=self.config.observe.reference,
            method=job.method,
            frames=frames,
            source=", ".join(camera.name for camera in self.config.every_camera),
            state_dir=str(self.config.state_dir),
            serving=None if service.is_degraded else str(service.serving.path),
            float_engine=str(service.serving.path) if service.is_degraded else None,
            max_loss=self.config.max_loss if job.max_loss is None else job.max_loss,
            max_slowdown=self.config.recalibration.max_slowdown,
        )

    def _start_child(self, job: Job, write: Callable[[Path], None]) -> None:
        """Write the job, and start the child process on it.

        Raises AgentError:
            recalibration.disk   the disk refuses
            recalibration.child  no process can be started
        """
        directory = self.config.state_dir / "jobs" / job.tracker.id
        limits, run = self.config.recalibration, self.run_in_main_thread
        try:
            write(directory)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = f"the job could not be written: {error.strerror}"
            raise AgentError("recalibration.disk", found, "room for the held-out frames", "free disk space") from error
        try:
            child = JobProcess(
                directory,
                lambda step, percent: run(lambda: self._advance(job, step, percent)),
                lambda outcome: run(lambda: self._finish(job, outcome)),
                nice=limits.nice,
                memory_bytes=limits.memory_bytes,
                clock=self.clock,
            )
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = f"the candidate process could not be started: {error.strerror}"
            remedy = "free memory or disk space, or raise the limits on processes, threads and open files"
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
            code = "recalibration.disk" if full else "recalibration.child"
            raise AgentError(code, found, "room for one more process and the file of its output", remedy) from error
        self._child = SupervisedChild(child, self._headroom, limits.timeout_s, self.clock)

    def _advance(self, job: Job, step: str, percent: int) -> None:
        """Note the child's progress, unless the job was given up meanwhile."""
        if job is self.job:
            try:
                job.tracker.progress(step, percent)
            except AgentError as error:
                self.give_up(error)

    def _finish(self, job: Job, outcome: JobOutcome) -> None:
        """End the job with the child's outcome, unless it was given up meanwhile."""
        if job is not self.job:
            return
        self.job, self._child = None, None
        remove_unfinished_builds(self.config.state_dir)
        if outcome.verdict is not None:
            self.on_verdict(job, outcome.verdict)
        error = outcome.error
        if error is None:
            self.on_candidate(job, outcome)
            return
        if job.tracker.trigger == MODEL and error.code not in (ANSWERS, *_OF_THE_BOARD):
            found = f"the model's file has changed, and cannot be served: {error.code}: {error.found}"
            error = AgentError(
                CHANGED, found, error.expected, f"{error.remedy}; the engine in service keeps serving until then"
            )
        job.tracker.fail(error)

    def give_up(self, error: TaredError) -> None:
        """End the job, whatever it is doing, with this error."""
        (job, self.job), (child, self._child) = (self.job, None), (self._child, None)
        if child is not None:
            child.end()
            remove_unfinished_builds(self.config.state_dir)
        if job is not None:
            job.tracker.fail(error)
