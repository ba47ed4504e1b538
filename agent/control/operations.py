"""What the daemon does about things: drift, low fidelity, candidates, and what the operator wants.

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
from agent.control.swap import EngineSwap, SwapRequest, Witnesses
from agent.control.triggers import Schedule, Trigger, Triggers, answered_times
from agent.jobs.child_protocol import JobOutcome
from agent.jobs.job import MODEL, Job, JobJournal
from agent.jobs.limits import ROLLBACK_LOOP, AutomationLimits, PrecisionAttempts
from agent.jobs.new_model import NewModel
from agent.jobs.recalibration import Recalibration
from agent.jobs.report import Housekeeping, JobRegistry, JobTracker
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError

_RETRY_S = 60.0  # until a journal that took no job is tried again


class Operations:
    """Decides and acts; `summary` is what it has done."""

    def __init__(
        self,
        config: Config,
        service: EngineService,
        pipeline: Pipeline,
        reporter: Reporter,
        post: RunInMainThread,
        journal: JobJournal,
    ) -> None:
        self.config = config
        self._service = service
        self._pipeline = pipeline
        self._reporter = reporter

        def tell(error: AgentError) -> None:
            post(lambda: reporter.error(error))

        def kept(name: str) -> Path | None:
            return config.state_dir / name if pipeline.is_live else None  # a recording that is played once more is news

        pipeline.remember(config.state_dir, tell)
        self.summary = RunSummary(str(service.serving.path))
        self._news = StateChangeReporter(reporter, self.summary.alarms, config)
        self._in_service = ServingWatch(config, service, pipeline.observer, reporter, self._news)
        self._attempts = PrecisionAttempts(kept("attempts.json"), service.origin, tell)
        jobs, probation = config.recalibration, config.probation
        self._restraint = AutomationLimits(
            kept("restraint.json"),
            jobs.per_day,
            jobs.cooldown_s,
            config.regimes.cooldown_s,
            probation.rollbacks_per_day,
            tell,
        )
        self._schedule = Schedule(config.recalibration.schedule, answered_times(journal))
        self._occasions = Triggers(
            config, service, self._restraint, self._attempts, self._schedule, reporter.error, self._other_view
        )
        housekeeping = Housekeeping(service.store, config.store, lambda: self._in_service.needed, reporter)
        self._desk = JobRegistry(reporter, journal, self._restraint, housekeeping)
        self._jobs = Recalibration(config, service, pipeline.observer, post, housekeeping.make_room, self._on_candidate)
        self.new_model = NewModel(self._jobs, self._desk)
        witnesses = Witnesses(self._in_service.serves, self._on_rolled_back)
        self._exchange = EngineSwap(config, service, pipeline, reporter, self.summary, post, witnesses)
        self._retry_s = 0.0  # monotonic; before, the journal takes no job

    @property
    def building(self) -> bool:
        """Whether a candidate is being built, for which no more frames are needed."""
        return self._jobs.building

    @property
    def exchanging(self) -> bool:
        """Whether an engine is on trial."""
        return self._exchange.under_way

    @property
    def regimes(self) -> tuple[str, ...]:
        """The artefacts of the regimes that are kept."""
        return self._in_service.regimes

    @property
    def stopped_by(self) -> str:
        """Why no job starts by itself, as a key of the configuration or the code of an error; empty where it may."""
        if not self.config.recalibration.automatic:
            return "recalibration.automatic"
        return ROLLBACK_LOOP if self._restraint.loops else ""

    @property
    def job(self) -> JobTracker | None:
        """The running one, on probation too."""
        return self._desk.job

    @property
    def _idle(self) -> bool:
        """While a candidate still hangs no other could be tried: nothing is built for nothing."""
        return self.job is None and not self._exchange.under_way and not self._pipeline.stuck

    def start(self, rolled_back: int) -> None:
        """Tell and watch what serves at the start. rolled_back: so many candidates were on probation when the process
        before ended."""
        for _ in range(rolled_back):
            self._restraint.rolled_back()
        if rolled_back:
            self._restraint.pause_jobs()
        self._in_service.start()

    def tick(self, states: CameraStates) -> None:
        """Look at the observer's evidence, start what is due, move the running job on."""
        self._exchange.tick(states)
        self._news.tell(states)
        if not self._exchange.under_way:  # a candidate on probation teaches nothing
            self._in_service.learn(states, self._pipeline.last_ts)
        if self._idle:
            self._desk.tidy()
        if time.monotonic() >= self._retry_s:
            self._start_what_is_due(states)
        closely = any(state.drift is not None and state.drift.closely for state in states.values())
        self._pipeline.observer.set_pace(alert=self._jobs.collecting or closely or self._exchange.under_way)
        self._pipeline.observer.gathering.set_in_use(self._jobs.collecting)
        self._jobs.tick()

    def _start_what_is_due(self, states: CameraStates) -> None:
        try:
            self.new_model.tick(self._idle)
            occasion = self._occasions.look(states, self._idle)
            if occasion is not None:
                self._take(occasion)
        except AgentError as error:
            self._retry_s = time.monotonic() + _RETRY_S
            self._reporter.error(error)

    def stop(self, reason: str) -> None:
        """Abandon the running job, and a candidate on probation."""
        self._jobs.stop(reason, self._pipeline.error)
        self.new_model.drop(reason)
        self._exchange.stop(reason)

    def _take(self, occasion: Trigger) -> None:
        """Raises AgentError (`journal.write`)."""
        trigger, request = occasion.trigger, occasion.request
        if trigger == "switch":
            self._switch(occasion.switch_to)
            return
        raising = occasion.raising
        failed = partial(self._attempts.failed, self._service.serving.id) if raising is not None else None
        report = self._desk.begin(trigger, request, on_failure=failed)
        if trigger != "first-start":  # a camera without an engine of its own has to get one
            self._restraint.takes_job()
        self._jobs.request(trigger, report, raising=raising)
        if trigger == "schedule":
            self._schedule.answered(request["due"])
            self._pipeline.observer.gathering.collect_afresh()

    def _other_view(self) -> None:
        if not self._jobs.collecting:
            self._pipeline.observer.gathering.collect_afresh()

    def _switch(self, identity: str) -> None:
        """Put the artefact of another regime in service; one that cannot serve any more is forgotten. Raises AgentError
        (`journal.write`)."""
        since_s = time.monotonic()
        try:
            loaded = self._service.load(self._service.find(identity))
        except TaredError as error:
            self._restraint.pause_switches()
            self._reporter.error(error, trigger="switch")
            self._in_service.forget(identity)
            return
        report = self._desk.begin_with(loaded.engine, "switch", {"artefact": identity})
        self._restraint.pause_switches()
        self._exchange.start(loaded, SwapRequest("switch", since_s, report))

    def _on_candidate(self, job: Job, outcome: JobOutcome) -> None:
        """The child has built an engine that passed: put it in service. A new model's takes a new run, whose start
        finds the job and ends it."""
        if job.trigger == MODEL:
            self.new_model.passed(job)
            return
        try:
            loaded = self._service.load(self._service.read(outcome.artefact or Path()))
        except TaredError as error:
            job.report.fail(error)
            return
        self._exchange.start(loaded, SwapRequest(job.trigger, job.started_s, job.report, outcome.verdict, job.max_loss))
        if job.trigger == "command":  # the operator's word that the cameras show what they are meant to show
            for findings in self._pipeline.observer.findings.values():
                findings.renew_view()

    def _on_rolled_back(self, artefact: str) -> None:
        """A candidate was taken out of service for what it did: there is not to be another at once, nor this again."""
        self._restraint.rolled_back()
        self._in_service.forget(artefact)

    def configure(self, config: Config) -> None:
        """From now on this holds: another one only in what `Settings` can set."""
        for each in (self, self._occasions, self._jobs, self._exchange, self._news):
            each.config = config

    def recalibrate(self, command: CommandProgress, args: RecalibrateArgs) -> bool:
        """Do so with fresh frames, because the operator says so; False while another job runs. One that collects
        frames for just that carries out this command too. Raises AgentError (`journal.write`)."""
        request = {"op": "recalibrate", **args.model_dump()}
        if self._desk.joins(request, command):
            return True
        if not self._idle:
            return False
        report = self._desk.begin("command", request, command)
        self._jobs.request("command", report, args.frames, args.method, max_loss=args.max_loss)
        self._pipeline.observer.gathering.collect_afresh(hurried=True)
        return True

    def try_calibration(self, staged: StagedCalibration) -> None:
        """Try what a fleet has merged, by a job with fresh frames to judge it on. Raises CommandError (`command.busy`),
        AgentError (`journal.write`)."""
        if not self._idle:
            found, remedy = "a job or a swap under way", "wait for its end, then send it again"
            raise CommandError("command.busy", found, "none", remedy)
        report = self._desk.begin("command", {"op": "calibration", "file": staged.path.stem}, staged.report)
        self._jobs.request("command", report, merged=staged.path)
        self._pipeline.observer.gathering.collect_afresh(hurried=True)

    def cancel(self) -> bool:
        """End the running job, also one that waits, because the operator says so; False where there is none."""
        if self._jobs.job is None:
            return self.new_model.drop("the operator cancels it")
        self._jobs.abandon("the operator cancels it")
        self._restraint.pause_jobs()  # what gave occasion to it may hold on
        return True

    def switch(self, loaded: LoadedEngine, command: CommandProgress) -> None:
        """To this regime's engine, because the operator says so. Raises AgentError (`journal.write`)."""
        self._jobs.abandon("the operator switches")
        request = {"op": "switch", "artefact": loaded.artefact.id}
        report = self._desk.begin_with(loaded.engine, "switch", request, command)
        self._restraint.pause_switches()
        self._exchange.start(loaded, SwapRequest("switch", time.monotonic(), report))

    def recall(self, command: CommandProgress) -> bool:
        """Take a candidate on probation back, because the operator says so; False where there is none.

        Raises AgentError (`journal.write`).
        """
        if not self._exchange.recallable:
            return False
        self._exchange.recall(self._desk.recall(self._service.serving.id, command))
        self._restraint.pause_jobs()
        return True

    def go_back(self, loaded: LoadedEngine, command: CommandProgress) -> None:
        """To this engine; what the operator took back must not return by itself at once, nor be switched to later.

        Raises AgentError (`journal.write`).
        """
        self._jobs.abandon("the operator rolls back")
        report = self._desk.begin_with(loaded.engine, "rollback", {"op": "rollback"}, command)
        self._restraint.pause_jobs()
        if self._service.raised and self._service.plan.floats.keys() - loaded.model.plan.floats.keys():
            self._attempts.forbid(loaded.artefact.id)
        self._in_service.forget(self._service.serving.id)
        self._exchange.start(loaded, SwapRequest("rollback", time.monotonic(), report))
