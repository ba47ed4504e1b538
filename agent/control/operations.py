"""Decide and act: start jobs when triggers are due, swap engines, and carry out the operator's commands.

`Operations` wires the decisions of this package together, and moves them on in `tick`:

1. `EngineSwap` judges a candidate on probation.
2. `StateChangeReporter` reports what the observer has noticed.
3. `Triggers` says which job is due; `JobRegistry` and `Recalibration` run it.
4. An accepted candidate goes to `EngineSwap`.

Everything in here runs in the supervisor's thread.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from agent.commands.deliveries import StagedCalibration
from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError, CommandError
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.contract.commands import RecalibrateArgs
from agent.control.events import ServingWatch, StateChangeReporter
from agent.control.summary import RunSummary
from agent.control.swap import EngineSwap, SwapRequest
from agent.control.triggers import Schedule, Trigger, Triggers, answered_times
from agent.jobs.child_process import JobOutcome
from agent.jobs.job import MODEL, Job, JobJournal, JobRegistry, JobTracker
from agent.jobs.limits import ROLLBACK_LOOP, AutomationLimits, PrecisionAttempts
from agent.jobs.new_model import NewModel
from agent.jobs.recalibration import Recalibration
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.store.artefact import read_artefact
from engines.store.retention import StoreCleaner

_RETRY_S = 60.0  # before another attempt to start a job, after the journal has refused one


class Operations:
    """Decides and acts. `summary` keeps what it has done."""

    def __init__(
        self,
        config: Config,
        service: EngineService,
        pipeline: Pipeline,
        reporter: Reporter,
        run_in_main_thread: RunInMainThread,
        journal: JobJournal,
    ) -> None:
        self.config = config
        self._service = service
        self._pipeline = pipeline
        self._reporter = reporter

        def report_error(error: AgentError) -> None:
            run_in_main_thread(lambda: reporter.error(error))

        def kept_path(name: str) -> Path | None:
            return config.state_dir / name if pipeline.is_live else None  # each play of a recording starts from scratch

        pipeline.keep_evidence(config.state_dir, report_error)
        self.summary = RunSummary(str(service.serving.path))
        self._changes = StateChangeReporter(reporter, self.summary.alarms, config)
        self._serving = ServingWatch(config, service, pipeline.observer, reporter, self._changes)
        self._attempts = PrecisionAttempts(kept_path("attempts.json"), service.precision_origin, report_error)
        self._limits = AutomationLimits(
            kept_path("restraint.json"),
            config.recalibration.per_day,
            config.recalibration.cooldown_s,
            config.regimes.cooldown_s,
            config.probation.rollbacks_per_day,
            report_error,
        )
        self._schedule = Schedule(config.recalibration.schedule, answered_times(journal))
        self._triggers = Triggers(
            config, service, self._limits, self._attempts, self._schedule, reporter.error, self._on_view_changed
        )
        cleaner = StoreCleaner(service.store, config.store.keep, config.store.reserve_bytes)
        self._registry = JobRegistry(reporter, journal, self._limits, cleaner, lambda: self._serving.pins)
        self._jobs = Recalibration(
            config, service, pipeline.observer, run_in_main_thread, self._registry.make_room, self._on_candidate
        )
        self.new_model = NewModel(self._jobs, self._registry)
        self._swap = EngineSwap(
            config,
            service,
            pipeline,
            reporter,
            self.summary,
            run_in_main_thread,
            self._serving.engine_changed,
            self._on_rolled_back,
        )
        self._retry_s = 0.0  # monotonic time; before, no job is started

    @property
    def is_building(self) -> bool:
        """True while a candidate is being built, for which no more frames are needed."""
        return self._jobs.is_building

    @property
    def is_swapping(self) -> bool:
        """True while an engine is on trial."""
        return self._swap.is_active

    @property
    def regimes(self) -> tuple[str, ...]:
        """The artefacts of the regimes that are kept."""
        return self._serving.regimes

    @property
    def stopped_by(self) -> str:
        """The reason why no job starts by itself: a configuration key or an error code; empty where jobs may start."""
        if not self.config.recalibration.automatic:
            return "recalibration.automatic"
        return ROLLBACK_LOOP if self._limits.in_rollback_loop else ""

    @property
    def job(self) -> JobTracker | None:
        """The running job, also while its candidate is on probation."""
        return self._registry.job

    @property
    def _idle(self) -> bool:
        """True while a job may start. While an engine still hangs no other could be tried, so none is built."""
        return self.job is None and not self._swap.is_active and not self._pipeline.is_stuck

    def start(self, rolled_back: int) -> None:
        """Report and watch the engine that serves at the start.

        rolled_back: number of candidates that were on probation when the previous process ended.
        """
        for _ in range(rolled_back):
            self._limits.count_rollback()
        if rolled_back:
            self._limits.pause_jobs()
        self._serving.start()

    def tick(self, states: CameraStates) -> None:
        """Judge the candidate on probation, report changes, start what is due, and move the running job on."""
        self._swap.tick(states)
        self._changes.report_changes(states)
        if not self._swap.is_active:  # a candidate on probation teaches nothing
            self._serving.learn(states, self._pipeline.last_ts)
        if self._idle:
            self._registry.tidy()
        if time.monotonic() >= self._retry_s:
            self._start_what_is_due(states)
        closely = any(state.drift is not None and state.drift.closely for state in states.values())
        self._pipeline.observer.set_pace(alert=self._jobs.is_collecting or closely or self._swap.is_active)
        self._pipeline.observer.collection.set_in_use(self._jobs.is_collecting)
        self._jobs.tick()

    def _start_what_is_due(self, states: CameraStates) -> None:
        try:
            self.new_model.tick(self._idle)
            trigger = self._triggers.next_due(states, self._idle)
            if trigger is not None:
                self._start_job(trigger)
        except AgentError as error:
            self._retry_s = time.monotonic() + _RETRY_S
            self._reporter.error(error)

    def stop(self, reason: str) -> None:
        """Cancel the running job, and the probation of a candidate."""
        self._jobs.stop(reason, self._pipeline.error)
        self.new_model.drop(reason)
        self._swap.stop(reason)

    def _start_job(self, trigger: Trigger) -> None:
        """Start the job that is due, or switch regimes. Raises AgentError (`journal.write`)."""
        if trigger.kind == "switch":
            self._switch(trigger.switch_to)
            return
        on_failure = None
        if trigger.raising is not None:
            on_failure = partial(self._attempts.note_failure, self._service.serving.id)
        tracker = self._registry.start(trigger.kind, trigger.request, on_failure=on_failure)
        if trigger.kind != "first-start":  # a camera without an engine of its own has to get one
            self._limits.count_job()
        self._jobs.start(trigger.kind, tracker, raising=trigger.raising)
        if trigger.kind == "schedule":
            self._schedule.mark_answered(trigger.request["due"])
            self._pipeline.observer.collection.restart()

    def _on_view_changed(self) -> None:
        if not self._jobs.is_collecting:
            self._pipeline.observer.collection.restart()

    def _switch(self, identity: str) -> None:
        """Put the artefact of another regime in service; one that cannot serve any more is forgotten.

        Raises AgentError (`journal.write`).
        """
        since_s = time.monotonic()
        try:
            loaded = self._service.load(self._service.store.find(identity))
        except TaredError as error:
            self._limits.pause_switches()
            self._reporter.error(error, trigger="switch")
            self._serving.forget(identity)
            return
        tracker = self._registry.start_with_engine(loaded.engine, "switch", {"artefact": identity})
        self._limits.pause_switches()
        self._swap.start(loaded, SwapRequest("switch", since_s, tracker))

    def _on_candidate(self, job: Job, outcome: JobOutcome) -> None:
        """Put the engine in service that the child has built and accepted.

        A new model needs a new run of the daemon, whose start ends the job.
        """
        if job.trigger == MODEL:
            self.new_model.accept(job)
            return
        try:
            loaded = self._service.load(read_artefact(outcome.artefact or Path(), self._service.store.key))
        except TaredError as error:
            job.tracker.fail(error)
            return
        self._swap.start(loaded, SwapRequest(job.trigger, job.started_s, job.tracker, outcome.verdict, job.max_loss))
        if job.trigger == "command":  # so the operator says that the cameras show what they are meant to show
            for monitor in self._pipeline.observer.monitors.values():
                monitor.reset_view()

    def _on_rolled_back(self, artefact: str) -> None:
        """Count a candidate that failed its probation, and never switch to it again."""
        self._limits.count_rollback()
        self._serving.forget(artefact)

    def configure(self, config: Config) -> None:
        """Apply a configuration that differs only in the keys that `Settings` can set."""
        for each in (self, self._triggers, self._jobs, self._swap, self._changes):
            each.config = config

    def recalibrate(self, command: CommandProgress, args: RecalibrateArgs) -> bool:
        """Recalibrate with fresh frames, by command; False while another job runs.

        A job that collects frames for the same request carries out this command too. Raises AgentError
        (`journal.write`).
        """
        request = {"op": "recalibrate", **args.model_dump()}
        if self._registry.join(request, command):
            return True
        if not self._idle:
            return False
        tracker = self._registry.start("command", request, command)
        self._jobs.start("command", tracker, args.frames, args.method, max_loss=args.max_loss)
        self._pipeline.observer.collection.restart(hurried=True)
        return True

    def try_calibration(self, staged: StagedCalibration) -> None:
        """Try a calibration that a fleet has merged, in a job with fresh frames to judge it.

        Raises CommandError (`command.busy`), AgentError (`journal.write`).
        """
        if not self._idle:
            found, remedy = "a job or a swap under way", "wait for its end, then send it again"
            raise CommandError("command.busy", found, "none", remedy)
        tracker = self._registry.start("command", {"op": "calibration", "file": staged.path.stem}, staged.progress)
        self._jobs.start("command", tracker, merged=staged.path)
        self._pipeline.observer.collection.restart(hurried=True)

    def cancel(self) -> bool:
        """Cancel the running job, also one that waits, by command; False where there is none."""
        if self._jobs.job is None:
            return self.new_model.drop("the operator cancels it")
        self._jobs.abandon("the operator cancels it")
        self._limits.pause_jobs()  # its trigger may still hold
        return True

    def switch(self, loaded: LoadedEngine, command: CommandProgress) -> None:
        """Switch to this regime's engine, by command. Raises AgentError (`journal.write`)."""
        self._jobs.abandon("the operator switches")
        request = {"op": "switch", "artefact": loaded.artefact.id}
        tracker = self._registry.start_with_engine(loaded.engine, "switch", request, command)
        self._limits.pause_switches()
        self._swap.start(loaded, SwapRequest("switch", time.monotonic(), tracker))

    def recall(self, command: CommandProgress) -> bool:
        """Take a candidate on probation back, by command; False where there is none.

        Raises AgentError (`journal.write`).
        """
        if not self._swap.can_recall:
            return False
        self._swap.recall(self._registry.start_recall(self._service.serving.id, command))
        self._limits.pause_jobs()
        return True

    def go_back(self, loaded: LoadedEngine, command: CommandProgress) -> None:
        """Go back to this engine, by command. The present one must not return by itself at once, nor be switched to.

        Raises AgentError (`journal.write`).
        """
        self._jobs.abandon("the operator rolls back")
        tracker = self._registry.start_with_engine(loaded.engine, "rollback", {"op": "rollback"}, command)
        self._limits.pause_jobs()
        if self._service.is_precision_raised and self._service.plan.floats.keys() - loaded.model.plan.floats.keys():
            self._attempts.forbid(loaded.artefact.id)
        self._serving.forget(self._service.serving.id)
        self._swap.start(loaded, SwapRequest("rollback", time.monotonic(), tracker))
