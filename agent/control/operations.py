"""Decide and act: start jobs when triggers are due, swap engines, and carry out the operator's commands.

`Operations` wires the decisions of this package together, and moves them on in `tick`:

1. `EngineSwap` judges a candidate on probation.
2. `StateChangeReporter` reports what the observer has noticed.
3. `Triggers` says which job is due; `JobRegistry` and `Recalibration` run it.
4. An accepted candidate goes to `EngineSwap`.

Everything in here runs in the supervisor's thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agent.commands.deliveries import StagedCalibration
from agent.commands.dispatcher import CommandProgress
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, CommandError
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.contract.commands import PolicyArgs, RecalibrateArgs
from agent.control.events import StateChangeReporter
from agent.control.policies import Policies
from agent.control.summary import JobSummary, RunSummary
from agent.control.swap import EngineSwap
from agent.control.triggers import Hindrance, Schedule, Trigger, Triggers, answered_times
from agent.jobs.child_process import JobOutcome
from agent.jobs.job import MODEL, Job, JobJournal, JobRegistry, JobTracker
from agent.jobs.limits import ROLLBACK_LOOP, AutomationLimits, PrecisionAttempts
from agent.jobs.new_model import NewModel
from agent.jobs.offline_queue import OfflineQueue
from agent.jobs.recalibration import Recalibration
from agent.jobs.refusal import RefusalMemory, raising_id, settings_id
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.audit import Mismatch
from agent.monitoring.camera_monitor import CameraStates
from agent.monitoring.gains import GainRecord
from agent.monitoring.regimes import Regimes, RegimeStore
from agent.serving.pipeline import Pipeline
from agent.state.store import StateStore
from agent.uplink.reporter import Reporter
from agent.validation.verdict import Verdict
from calibrate.errors import TaredError
from calibrate.statistics.fidelity_gain import Recalibrated
from engines.store.artefact import read_artefact
from engines.store.retention import Pins, StoreCleaner

_RETRY_S = 60.0  # before another attempt to start a job, after the journal has refused one


@dataclass
class Operations:
    """Decides and acts.

    Attributes:
        service, pipeline: The engines and the frame path, as given.
        unused_plan: Why the configured plan is not used; None where it is.
        summary: What it has done.
        policies: What the owner lets be shown of each engine's answers.
        regimes: The artefacts that have served one light well, and the evidence on the one in service.
        jobs: The recalibration that runs, if there is one.
        swap: The engine on trial, if there is one.
        new_model: The model to serve next, if there is one.
    """

    config: Config
    service: EngineService
    pipeline: Pipeline
    reporter: Reporter
    run_in_main_thread: RunInMainThread
    journal: JobJournal
    state: StateStore
    unused_plan: TaredError | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        config, service, pipeline, reporter = self.config, self.service, self.pipeline, self.reporter

        def report_error(error: AgentError) -> None:
            self.run_in_main_thread(lambda: reporter.error(error))

        kept = self.state if pipeline.is_live else StateStore(None)  # each play of a recording starts from scratch
        self.policies = Policies(config, self.state)
        with reporter.reporting_errors():
            for before, artefact in service.rebuilt.items():
                self.policies.hand_on(before, artefact)
        pipeline.keep_evidence(config.state_dir, report_error)
        self.summary = RunSummary(str(service.serving.path))
        self._changes = StateChangeReporter(reporter, self.summary.alarms, config)
        self._gains = GainRecord(kept, service.identity)
        for monitor in pipeline.observer.monitors.values():
            monitor.gains = self._gains
        store = RegimeStore(self.state, service.identity, config.regimes.most)
        observer = pipeline.observer
        self.regimes = Regimes(config, store, observer.monitors.values(), observer.collection)
        self._attempts = PrecisionAttempts(kept, raising_id(config, service))
        self._refusals = RefusalMemory(kept)
        self._offline = OfflineQueue(config, service, self.journal, reporter.error)
        self._limits = AutomationLimits(
            kept,
            config.recalibration.per_day,
            config.recalibration.cooldown_s,
            config.regimes.cooldown_s,
            config.probation.rollbacks_per_day,
            report_error,
            self.clock,
        )
        self._schedule = Schedule(config.recalibration.schedule, answered_times(self.journal))
        self._triggers = Triggers(
            config,
            service,
            self._limits,
            self._attempts,
            self._schedule,
            self._refusals,
            self._offline,
            reporter.error,
            self._on_view_changed,
            self.clock,
        )
        cleaner = StoreCleaner(service.store, config.store.keep, config.store.reserve_bytes)
        self._registry = JobRegistry(reporter, self.journal, self._limits, cleaner, self._pins, self.clock)
        self.jobs = Recalibration(
            config,
            service,
            observer,
            self.run_in_main_thread,
            self._registry.make_room,
            self._learn_gain,
            self._on_candidate,
            self.clock,
        )
        self.new_model = NewModel(
            self.jobs, self._registry, lambda tracker, reason: self.swap.withdraw(tracker, reason), self.clock
        )
        self.swap = EngineSwap(
            config,
            service,
            pipeline,
            reporter,
            self.summary,
            self.run_in_main_thread,
            self._engine_changed,
            self._on_rolled_back,
            self.policies,
            self.clock,
        )
        self._retry_s = 0.0  # monotonic time; before, no job is started
        if pipeline.mismatch is not None:
            self.configure(config)

    @property
    def stopped_by(self) -> str:
        """The reason why no job starts by itself: a configuration key or an error code; empty where jobs may start."""
        if not self.config.recalibration.automatic:
            return "recalibration.automatic"
        return ROLLBACK_LOOP if self._limits.in_rollback_loop else ""

    @property
    def held_back(self) -> Hindrance | None:
        """The hindrance of the job or switch that is due; None where none is due, or one is under way."""
        if self.pipeline.loop.is_stuck:
            found = "a candidate that was rolled back still hangs"
            return Hindrance("probation.hang", found, "restart the daemon, to free the memory that the candidate holds")
        return self._triggers.held_back

    @property
    def unused(self) -> tuple[TaredError, ...]:
        """Reasons why offline work of the owner is not used: the plan, and the start of a first calibration."""
        plan = (self.unused_plan,) if self.unused_plan is not None else ()
        return (*plan, *self._offline.unused.values())

    @property
    def last_error(self) -> TaredError | None:
        """The error with which the latest job ended; None if it ended well, or none has ended."""
        return self._registry.last_error

    @property
    def job_summaries(self) -> tuple[JobSummary, ...]:
        """The jobs of this process, the newest last."""
        jobs = self._registry.started
        return tuple(JobSummary(job.trigger, job.state.value, str(job.error) if job.error else "") for job in jobs)

    @property
    def job(self) -> JobTracker | None:
        """The running job, also while its candidate is on probation."""
        return self._registry.job

    @property
    def _idle(self) -> bool:
        """True while a job may start. While an engine still hangs no other could be tried, so none is built."""
        return self.job is None and not self.swap.is_active and not self.pipeline.loop.is_stuck

    def start(self, rolled_back: int) -> None:
        """Report and watch the engine that serves at the start, and report a plan that is not used.

        rolled_back: number of candidates that were on probation when the previous process ended.
        """
        if self.unused_plan is not None:
            self.reporter.error(self.unused_plan)
        for _ in range(rolled_back):
            self._limits.count_rollback()
        if rolled_back:
            self._limits.pause_jobs()
        self.reporter.keeps_policies(self.policies.summaries())
        self._engine_changed(None, {}, recall=True)
        if self.pipeline.open_mismatch is not None:  # the previous process was killed before it could act on it
            self.distrust_reference(self.pipeline.open_mismatch)

    def tick(self, states: CameraStates) -> None:
        """Judge the candidate on probation, report changes, start what is due, and move the running job on."""
        self.swap.tick(states)
        self._changes.report_changes(states)
        self._changes.report_labelled(self.pipeline.observer.measured)
        if not self.swap.is_active:  # a candidate on probation teaches nothing
            with self.reporter.reporting_errors():
                learnt = self.regimes.learn_if_proved(states, self.pipeline.last_ts)
                if learnt:
                    policy = self.policies.taking_over(learnt)
                    self.reporter.event("regime", artefact=learnt, known=len(self.regimes.artefacts), **policy)
                    self.reporter.keeps_regimes(self.regimes.artefacts)
        if self._idle and self._registry.tidy():
            self._forget_policies()
        if self.clock.monotonic_s() >= self._retry_s:
            self._start_what_is_due(states)
        compared = [drift for state in states.values() for drift in (state.drift, state.since_refusal)]
        closely = any(drift is not None and drift.closely for drift in compared)
        self.pipeline.observer.set_pace(alert=self.jobs.is_collecting or closely or self.swap.is_active)
        self.pipeline.observer.collection.set_in_use(self.jobs.is_collecting)
        self.jobs.tick()

    def _start_what_is_due(self, states: CameraStates) -> None:
        try:
            self.new_model.tick(self._idle)
            trigger = self._triggers.next_due(states, self._idle)
            if trigger is not None:
                self._start_job(trigger)
        except AgentError as error:
            self._retry_s = self.clock.monotonic_s() + _RETRY_S
            self.reporter.error(error)

    def end_collection(self) -> bool:
        """Let the running job make do with the frames there are, and start no other; True while it goes on.

        Called once no more frames will come.
        """
        self._retry_s = math.inf
        return self.jobs.end_collection()

    def stop(self, reason: str) -> None:
        """Cancel the running job, and the probation of a candidate."""
        self.jobs.stop(reason, self.pipeline.error)
        self.new_model.drop(reason)
        self.swap.stop(reason)

    def _start_job(self, trigger: Trigger) -> None:
        """Start the job that is due, or switch regimes. Raises AgentError (`state.write`)."""
        if trigger.kind == "switch":
            self._switch(trigger.request["artefact"])
            return
        registry = self._registry
        work = trigger.offline.work if trigger.offline is not None else None
        tracker = registry.start(trigger.kind, trigger.request, on_failure=lambda error: self._on_failure(job, error))
        job = Job(tracker, raising=trigger.raising, offline=work)
        self._limits.count_job()
        self.jobs.start(job)
        if self._triggers.is_reference_new:  # any job's frames are observed by it
            self._triggers.is_reference_new = False
            self.pipeline.answer_mismatch()
        if trigger.kind == "schedule":
            self._schedule.mark_answered(trigger.request["due"])
        if work is not None:
            message = f"the first calibration begins with {work.setting}: {work.path}"
            self.reporter.event("job", trigger=trigger.kind, step=tracker.state.value, message=message)
            self.pipeline.observer.collection.restart(hurried=True)
        elif trigger.kind == "schedule" or self._refusals.standing is not None:  # no frame of the refused job's scene
            self.pipeline.observer.collection.restart()

    def _on_failure(self, job: Job, error: TaredError) -> None:
        """Note what must not be tried again, or not before something has changed."""
        if job.raising is not None:
            self._attempts.note_failure(job.tracker.request["for"], error)
        elif job.offline is not None:
            self._offline.note_failure(job.tracker.request["attempt"], error)
            self.pipeline.observer.collection.restart()  # the frames of the board's own calibration are chosen
        elif job.attempt is not None and self._refusals.note(job.attempt, error):
            self._compare_with_refused()

    def _settings_changed(self) -> None:
        """Find out whether the latest refusal holds for the present engine and settings."""
        settings = settings_id(self.config, self.service)
        if settings != self._refusals.settings:
            self._refusals.settings = settings
            self._compare_with_refused()

    def _compare_with_refused(self) -> None:
        """Let each camera compare its scene with that of the refused job from now on, if a refusal stands."""
        refusal = self._refusals.standing
        for monitor in self.pipeline.observer.monitors.values():
            monitor.compare_with_refused(refusal.attempt.scene if refusal is not None else None)

    def _pins(self) -> Pins:
        return {"loaded": (self.service.serving.id,), "regime": self.regimes.artefacts}

    def _engine_changed(self, candidate: LoadedEngine | None, since: Mapping[str, float], recall: bool = False) -> None:
        """Report the engine that serves now, and start fresh evidence for it.

        Args:
            candidate: The engine on probation; None: the service's own engine serves.
            since: Capture time from which on it serves, by camera.
            recall: Go on with the evidence that an earlier process kept of it.
        """
        service = self.service
        self._changes.reset()
        self._settings_changed()
        artefact, calibration, model = service.serving, service.calibration, service.serving_model
        if candidate is not None:
            artefact, calibration, model = candidate.artefact, candidate.calibration, candidate.model
        precision, share = artefact.manifest["inputs"].get("precision"), artefact.manifest.get("int8_macs_share")
        calibrated = calibration.id if calibration is not None else None
        self.reporter.serves(artefact.id, calibrated, precision, share, self.regimes.artefacts)
        if calibration is None:
            self.regimes.unwatch()
            return
        with self.reporter.reporting_errors():
            self.regimes.watch(artefact.id, service.watched(model), calibration, since, recall)

    def _on_view_changed(self) -> None:
        self._compare_with_refused()  # the evidence since the refusal is of another view
        if not self.jobs.is_collecting:
            self.pipeline.observer.collection.restart()

    def _switch(self, identity: str) -> None:
        """Put the artefact of another regime in service; one that cannot serve any more is forgotten.

        Raises AgentError (`state.write`).
        """
        since_s = self.clock.monotonic_s()
        try:
            loaded = self.service.load(self.service.store.find(identity))
        except TaredError as error:
            self._limits.pause_switches()
            self.reporter.error(error, trigger="switch")
            self._forget_regime(identity)
            return
        tracker = self._registry.start_with_engine(loaded.engine, "switch", {"artefact": identity})
        tracker.started_s = since_s
        self._limits.pause_switches()
        self.swap.start(loaded, tracker)

    def _learn_gain(self, job: Job, verdict: Verdict) -> None:
        """Note what a recalibration has gained over the INT8 engine in service, on the frames that judged it.

        One that raises precision gains otherwise.
        """
        states = self.pipeline.observer.states().values()
        gains_db = [state.drift.serving_db for state in states if state.drift is not None and state.drift.judged]
        frames = verdict.frames - verdict.empty_frames
        if gains_db and frames and verdict.fidelity_serving is not None and job.raising is None:
            gained = verdict.fidelity - verdict.fidelity_serving
            loss, gain_db = 1.0 - verdict.fidelity_serving, sum(gains_db) / len(gains_db)
            self._gains.note(Recalibrated(gain_db, loss, gained, frames))

    def _on_candidate(self, job: Job, outcome: JobOutcome) -> None:
        """Put the engine in service that the child has built and accepted, or that of a new model.

        A new model that passes needs a new run of the daemon, whose start ends the job.
        """
        tracker, is_model = job.tracker, job.tracker.trigger == MODEL
        load = self.service.load_float if is_model else self.service.load
        try:
            loaded = load(read_artefact(outcome.artefact or Path(), self.service.store.key))
        except TaredError as error:
            tracker.fail(error)
            return
        if is_model:
            self.swap.start(loaded, tracker, on_commit=lambda: self.new_model.commit(tracker))
            return
        self.swap.start(loaded, tracker, outcome.verdict, job.max_loss)
        if job.tracker.trigger == "command":  # so the operator says that the cameras show what they are meant to show
            for monitor in self.pipeline.observer.monitors.values():
                monitor.reset_view()

    def set_policy(self, args: PolicyArgs) -> None:
        """Change what is shown of an engine's answers from now on, and report it. Raises as Policies.set."""
        self.policies.set(args)
        self.reporter.event("policy", artefact=args.artefact, policy=self.policies.summary(args.artefact))
        self.reporter.keeps_policies(self.policies.summaries())

    def _forget_policies(self) -> None:
        """Remove the policies of artefacts that the store has removed."""
        with self.reporter.reporting_errors():
            if self.policies.keep_only({path.name for path in self.service.store.places()}):
                self.reporter.keeps_policies(self.policies.summaries())

    def _forget_regime(self, artefact: str) -> None:
        with self.reporter.reporting_errors():
            self.regimes.forget(artefact)
        self.reporter.keeps_regimes(self.regimes.artefacts)

    def _on_rolled_back(self, artefact: str) -> None:
        """Count a candidate that failed its probation, and never switch to it again."""
        self._limits.count_rollback()
        self._forget_regime(artefact)

    def configure(self, config: Config) -> None:
        """Apply a configuration that differs only in the keys that `Settings` can set.

        The reference of jobs is ONNX Runtime's once an audit has found the runtime's own one wrong.
        """
        if self.pipeline.mismatch is not None:
            observe = config.observe.model_copy(update={"reference": "onnxruntime"})
            config = config.model_copy(update={"observe": observe})
        for each in (self, self._triggers, self.jobs, self.swap, self._changes):
            each.config = config
        for monitor in self.pipeline.observer.monitors.values():
            monitor.config = config
        self._attempts.renew(raising_id(config, self.service))
        self._settings_changed()

    def distrust_reference(self, mismatch: Mismatch) -> None:
        """Report that the reference is wrong, and drop all that it has shown; ONNX Runtime's takes its place.

        Calibrations and regimes were made with it. A job with fresh frames, judged by ONNX Runtime, replaces them.
        """
        self._changes.report_mismatch(mismatch)
        self.configure(self.config)
        for artefact in self.regimes.artefacts:
            self._forget_regime(artefact)
        if self.jobs.job is not None:
            self.jobs.abandon("its frames were observed by a wrong reference")
        self.pipeline.observer.collection.restart()
        if not self.swap.is_active:
            self._engine_changed(None, self.pipeline.serving_since(None))
        self._triggers.is_reference_new = not self.service.is_degraded
        if self.service.is_degraded:  # the first calibration is yet to come
            self.pipeline.answer_mismatch()

    def recalibrate(self, command: CommandProgress, args: RecalibrateArgs) -> bool:
        """Recalibrate with fresh frames, by command; False while another job runs.

        A job that collects frames for the same request carries out this command too. Raises AgentError
        (`state.write`).
        """
        request = {"op": "recalibrate", **args.model_dump()}
        if self._registry.join(request, command):
            return True
        if not self._idle:
            return False
        tracker = self._registry.start("command", request, command, lambda error: self._on_failure(job, error))
        job = Job(tracker, args.frames or 0, args.method or "", max_loss=args.max_loss)
        self.jobs.start(job)
        self.pipeline.observer.collection.restart(hurried=True)
        return True

    def try_calibration(self, staged: StagedCalibration) -> None:
        """Try a calibration that a fleet has merged, in a job with fresh frames to judge it.

        Raises CommandError (`command.busy`), AgentError (`state.write`).
        """
        if not self._idle:
            found, remedy = "a job or a swap under way", "wait for its end, then send the command again"
            raise CommandError("command.busy", found, "one job or swap at a time", remedy)
        tracker = self._registry.start("command", {"op": "calibration", "file": staged.path.stem}, staged.progress)
        self.jobs.start(Job(tracker, merged=staged.path))
        self.pipeline.observer.collection.restart(hurried=True)

    def cancel(self) -> bool:
        """Cancel the running job, also one that waits, by command; False where there is none."""
        if self.jobs.job is None:
            return self.new_model.drop("the operator cancels it")
        self.jobs.abandon("the operator cancels it")
        self._limits.pause_jobs()  # its trigger may still hold
        return True

    def fail_job(self, error: AgentError) -> None:
        """End what is under way, since a decision on it has failed: what the system refused may have cost its state."""
        if self.swap.is_active:
            self.swap.give_up(error)
            return
        self.jobs.give_up(error)
        if self.job is not None:  # between its child and the swap
            self.job.fail(error)

    def switch(self, loaded: LoadedEngine, command: CommandProgress) -> None:
        """Switch to this regime's engine, by command. Raises AgentError (`state.write`)."""
        self.jobs.abandon("the operator switches")
        request = {"op": "switch", "artefact": loaded.artefact.id}
        tracker = self._registry.start_with_engine(loaded.engine, "switch", request, command)
        self._limits.pause_switches()
        self.swap.start(loaded, tracker)

    def recall(self, command: CommandProgress) -> bool:
        """Take a candidate on probation back, by command; False where there is none.

        Raises AgentError (`state.write`).
        """
        if not self.swap.can_recall:
            return False
        self.swap.recall(self._registry.start_recall(self.service.serving.id, command))
        self._limits.pause_jobs()
        return True

    def go_back(self, loaded: LoadedEngine, command: CommandProgress) -> None:
        """Go back to this engine, by command. The present one must not return by itself at once, nor be switched to.

        Raises AgentError (`state.write`).
        """
        self.jobs.abandon("the operator rolls back")
        tracker = self._registry.start_with_engine(loaded.engine, "rollback", {"op": "rollback"}, command)
        self._limits.pause_jobs()
        if self.service.plan.floats.keys() - loaded.model.plan.floats.keys():
            self._attempts.forbid(loaded.artefact.id)
        self._forget_regime(self.service.serving.id)
        self.swap.start(loaded, tracker)
