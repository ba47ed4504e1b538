"""Make candidates: hand a job to a child process, watch what the board can afford, and end the child.

`Workshop` carries out the actions that concern the child process. What the child says comes back as events of
agent.core.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agent.collection.collection import SharedCollection
from agent.commands.deliveries import StagedModel
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.config import Config
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.kinds import FleetCalibration, NewModel, OfflineStart, RaisedPrecision, Requested
from agent.core.state import Attempt, Job
from agent.core.work import collects_enough
from agent.jobs.child_process import JobOutcome, JobProcess
from agent.jobs.fingerprints import settings_id
from agent.jobs.headroom import Headroom
from agent.jobs.request import JobRequest, write_job, write_reference_job
from agent.models.engine_service import EngineService
from agent.monitoring.drift import Regime
from agent.system.board import BoardState
from agent.system.state_dir import remove_unfinished_builds
from agent.uplink.reporter import Reporter

_PLANNED_WITHIN = 1.0 / 3.0  # share of the child's time limit, to measure plans: builds and verdicts follow


class DeliveredModels:
    """The models that commands have delivered, until each has been tried."""

    def __init__(self) -> None:
        self._by_command: dict[str, StagedModel] = {}

    def expect(self, staged: StagedModel) -> None:
        self._by_command[staged.progress.latest.id] = staged

    def staged(self, job: Job) -> StagedModel:
        """Return the model that the job tries."""
        return self._by_command[job.commands[0]]

    def install_model(self, action: act.InstallModel) -> None:
        """Raises AgentError as `StagedModel.install`."""
        self._by_command[action.command].install()

    def drop_model(self, action: act.DropModel) -> None:
        staged = self._by_command.pop(action.command)
        if action.for_good:
            staged.forget()
        else:
            staged.discard()


@dataclass
class Workshop:
    """The child process of the running job, and its headroom. Everything runs in the supervisor's thread.

    Args:
        then: Takes the event that follows from an action.
        post: Takes what the child says, from its threads.
    """

    config: Config
    service: EngineService
    collection: SharedCollection
    then: Callable[[fact.Event], None]
    post: Callable[[fact.Event], None]
    reporter: Reporter
    models: DeliveredModels
    clock: Clock = SYSTEM_CLOCK
    _child: JobProcess | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._board = BoardState()
        self._headroom = Headroom(self.config.recalibration.headroom, self._board, self.clock)
        self._job = ""  # whose headroom it is

    @property
    def paused_s(self) -> float:
        """How long the child process has been paused."""
        return self._headroom.paused_s

    def headroom(self, job: Job) -> str | AgentError:
        """Return why the board cannot afford the job's next step, empty where it can; the error after too long."""
        if job.id != self._job:
            self._job, self._headroom = job.id, Headroom(self.config.recalibration.headroom, self._board, self.clock)
        try:
            if job.child_since_s is not None:
                return self._headroom.reason_to_pause()
            return self._headroom.reason_to_wait() if collects_enough(job, self.collection.counts) else ""
        except AgentError as error:
            return error

    def report_selection(self, action: act.ReportSelection) -> None:
        """Report how the frames were chosen, as an event and in the state directory."""
        job, selection = action.job, self.collection.selection_report()
        trigger, step = job.kind.trigger.value, job.state.value
        self.reporter.event("job", trigger=trigger, step=step, percent=job.percent, selection=selection.detail())
        selection.write(self.config.state_dir, self.reporter.error)

    def hand_over(self, action: act.HandOver) -> None:
        """Write the job with the collected frames, and start the child process on it.

        Raises AgentError:
            recalibration.disk   the disk refuses
            recalibration.child  no process can be started
        """
        job, collected = action.job, self.collection.collected()
        if isinstance(job.kind, NewModel):
            staged = self.models.staged(job) if job.commands else None
            model, accepted = (staged.file, staged.accepted) if staged else (self.config.model.path, False)
            serving, frames = self.service.serving.path, collected.held_out
            self._start(job, lambda path: write_reference_job(path, self.config, model, serving, frames, accepted))
            self.then(fact.HandedOver(job.id, None, job.max_loss))
            return
        request, attempt = self._request(job, collected.frames), None
        if job.kind.calibrates:
            settings = settings_id(self.config, self.service, job.frames, request.method, job.max_loss)
            attempt = Attempt(settings, Regime.from_scene(collected.histograms))
        merged = Path(job.kind.file) if isinstance(job.kind, FleetCalibration) else None
        self._start(job, lambda path: write_job(path, request, collected, merged))
        # Probation goes by the verdict's limit, whatever `set` makes of it meanwhile.
        self.then(fact.HandedOver(job.id, attempt, request.max_loss))

    def _request(self, job: Job, frames: int) -> JobRequest:
        service, kind, config = self.service, job.kind, self.config
        method = kind.method if isinstance(kind, Requested) else None
        raising = {"rung": kind.rung, "fidelity": kind.fidelity} if isinstance(kind, RaisedPrecision) else None
        offline = {"setting": kind.setting, "path": kind.path} if isinstance(kind, OfflineStart) else None
        return JobRequest(
            spec=service.model.spec.model_dump(mode="json"),
            model_sha256=service.model.sha256,
            backend=config.backend,
            threads=config.threads,
            plan=service.model.plan.to_json(),
            start=service.plan.to_json(),
            origin=service.precision_origin,
            planning_s=min(config.planning.budget_s, _PLANNED_WITHIN * config.recalibration.timeout_s),
            raising=raising,
            offline=offline,
            dla=config.dla,
            reference=config.observe.reference,
            method=method or config.calibration.method,
            frames=frames,
            source=", ".join(camera.name for camera in config.every_camera),
            state_dir=str(config.state_dir),
            serving=None if service.is_degraded else str(service.serving.path),
            float_engine=str(service.serving.path) if service.is_degraded else None,
            max_loss=config.max_loss if job.max_loss is None else job.max_loss,
            max_slowdown=config.recalibration.max_slowdown,
        )

    def _start(self, job: Job, write: Callable[[Path], None]) -> None:
        directory, limits = self.config.state_dir / "jobs" / job.id, self.config.recalibration
        try:
            write(directory)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            found = f"the job could not be written: {error.strerror}"
            raise AgentError("recalibration.disk", found, "room for the held-out frames", "free disk space") from error
        try:
            self._child = JobProcess(
                directory,
                lambda step, percent: self.post(fact.ChildAdvanced(job.id, step, percent)),
                lambda outcome: self.post(self._ended(job, outcome)),
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

    @staticmethod
    def _ended(job: Job, outcome: JobOutcome) -> fact.ChildEnded:
        return fact.ChildEnded(job.id, str(outcome.artefact or ""), outcome.verdict, outcome.error)

    def pause_child(self, _action: act.PauseChild) -> None:
        if self._child is not None:
            self._child.pause()

    def resume_child(self, _action: act.ResumeChild) -> None:
        if self._child is not None:
            self._child.resume()

    def end_child(self, _action: act.EndChild) -> None:
        """End the child process, whatever it is doing; this takes a few seconds at most."""
        child, self._child = self._child, None
        if child is not None:
            child.end()
            self.clear()

    def clear(self) -> None:
        """Remove what a child that has ended has left half built."""
        self._child = None
        remove_unfinished_builds(self.config.state_dir)
