"""Carry out what agent.core decides: gather facts, act, and bring back the events that follow.

`Executor` owns the state and the devices that act: JobLedger (journal, reports, answers to commands), Workshop (the
child process), EngineExchange (engines), Watch (what is observed), StoreUpkeep and KeptMemory. They never call it. What
follows from an action, and what their threads have to say, are events, which it takes one after the other.
"""

from __future__ import annotations

import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

from agent.commands.deliveries import StagedCalibration, StagedModel
from agent.commands.dispatcher import CommandProgress
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.main_thread import RunInMainThread
from agent.config import Config
from agent.contract.commands import RecalibrateArgs
from agent.control.exchange import EngineExchange
from agent.control.summary import RunSummary
from agent.control.upkeep import StoreUpkeep
from agent.control.watch import Watch
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.decide import decide
from agent.core.kinds import FleetCalibration, Requested, Trigger
from agent.core.state import State
from agent.jobs.fingerprints import raising_id, settings_id
from agent.jobs.job import JobJournal
from agent.jobs.kept_memory import KeptMemory
from agent.jobs.ledger import JobLedger, JobSummary
from agent.jobs.offline_queue import OfflineQueue, attempts_in_vain
from agent.jobs.workshop import DeliveredModels, Workshop
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.audit import Mismatch
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Pipeline
from agent.state.store import StateStore
from agent.uplink.reporter import Reporter
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError


@dataclass
class Executor:
    """Acts as agent.core decides. Everything in here runs in the supervisor's thread, but for `post`.

    Attributes:
        kept: What the board remembers over a restart.
        unused_plan: Why the configured plan is not used; None where it is.
        state: The state on which decisions rest.
        summary: What has been done.
        ledger, watch: The devices, for those who show what is going on.
    """

    config: Config
    service: EngineService
    pipeline: Pipeline
    reporter: Reporter
    run_in_main_thread: RunInMainThread
    journal: JobJournal
    kept: StateStore
    unused_plan: TaredError | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        config, service, pipeline, reporter, clock = (
            self.config, self.service, self.pipeline, self.reporter, self.clock,
        )  # fmt: skip

        self._events = deque[fact.Event]()
        then = self._events.append
        self._is_taking = False
        self.summary = RunSummary(str(service.serving.path))
        self.ledger = JobLedger(reporter, self.journal, then)
        self.watch = Watch(config, service, pipeline, reporter, self.summary, self.kept)
        self._models = DeliveredModels()
        self._workshop = Workshop(
            config, service, pipeline.observer.collection, then, self.post, reporter, self._models, clock
        )
        self._exchange = EngineExchange(
            config, service, pipeline, reporter, self.summary, then, self.post, self._engine_changed,
            self.watch.policies, clock,
        )  # fmt: skip
        self._offline = OfflineQueue(config, service, reporter.error)
        # Each play of a recording starts from scratch.
        memory = KeptMemory(self.kept if pipeline.is_live else StateStore(None), clock)
        upkeep = StoreUpkeep(config, service, reporter, lambda: self.watch.regimes.artefacts)
        self._do = _doers(self.ledger, self._workshop, self._exchange, self.watch, self._models, memory, upkeep)
        self._find_settings()
        records = self.journal.records()
        self.state = State(
            memory.read(self._raising),
            answered=frozenset(str(each.request.get("due")) for each in records if each.trigger == Trigger.SCHEDULE),
            vain=attempts_in_vain(records),
            last_error=records[-1].error if records else None,
        )
        if pipeline.mismatch is not None:
            self.configure(config)

    @property
    def now(self) -> fact.Now:
        return fact.Now(self.clock.monotonic_s(), self.clock.wall_s())

    def post(self, event: fact.Event) -> None:
        """Take an event that another thread has to tell, in the supervisor's thread."""
        self.run_in_main_thread(partial(self.take, event))

    def take(self, event: fact.Event, states: CameraStates | None = None) -> None:
        """Take an event, and all that follow from it, and act.

        states: what the observer has found; None: ask it.
        """
        self._events.append(event)
        if self._is_taking:
            return
        self._is_taking = True
        try:
            while self._events:
                self._take(self._events.popleft(), states)
        finally:
            self._is_taking = False

    def _take(self, event: fact.Event, states: CameraStates | None) -> None:
        if isinstance(event, fact.ChildEnded) and self.state.job is not None and self.state.job.id == event.job:
            self._workshop.clear()
            self._exchange.verdict = event.verdict
        tried = event.action if isinstance(event, fact.Failed) else None
        if isinstance(event, fact.MadeCurrent) or isinstance(tried, act.MakeCurrent):  # it serves in either case
            self._find_settings()
            self._events.append(fact.SettingsChanged())
        decision = decide(self.now, self.config, self.state, self.facts(event, states), event)
        self.state = decision.state
        actions = iter(decision.actions)
        try:
            for action in actions:
                if not self._has_done(action):
                    return
        except OSError:  # which no device has foreseen: whoever waits for the job's end hears of it
            for action in actions:
                if isinstance(action, (act.End, act.AnswerCommand)):
                    self._do[type(action)](action)
            raise

    def _has_done(self, action: act.Action) -> bool:
        try:
            self._do[type(action)](action)
        except TaredError as error:
            self._events.appendleft(fact.Failed(action, error))
            return False
        return True

    def facts(self, event: fact.Event, states: CameraStates | None = None) -> fact.BoardFacts:
        """Gather the facts as of now."""
        service, loop, observer, job = self.service, self.pipeline.loop, self.pipeline.observer, self.state.job
        cameras, on_trial = observer.states() if states is None else states, self.state.trial is not None
        is_last = isinstance(event, fact.TrialEnded)
        is_tick = isinstance(event, fact.Tick) and not on_trial
        may_begin = is_tick and job is None
        return fact.BoardFacts(
            fresh=uuid.uuid4().hex[:12],
            cameras=cameras,
            serving=service.serving.id,
            is_degraded=service.is_degraded,
            known=self.watch.regimes.artefacts,
            settings=self._settings,
            raising=self._raising,
            is_committing=loop.is_committing,
            is_stuck=loop.is_stuck,
            path_error=self.pipeline.error,
            collected=observer.collection.counts,
            headroom=self._workshop.headroom(job) if is_tick and job is not None else "",
            paused_s=self._workshop.paused_s,
            probation=self._exchange.probation(cameras, is_last) if on_trial else None,
            offline=self._offline.works(self._settings, self.state.vain) if may_begin and service.is_degraded else (),
            detects=open_task(self.config.model).finds_objects,
        )

    @property
    def unused(self) -> list[TaredError]:
        """Reasons why offline work of the owner is not used: the plan, and the start of a first calibration."""
        plan = [self.unused_plan] if self.unused_plan is not None else []
        return [*plan, *self._offline.unused(self._settings, self.state.vain)]

    @property
    def jobs(self) -> list[JobSummary]:
        """The jobs of this process, the newest last."""
        job = self.state.job
        running = [JobSummary(job.kind.trigger.value, job.state.value, "")] if job is not None else []
        return [*self.ledger.ended, *running]

    def start(self, rolled_back: int) -> None:
        """Report and watch the engine that serves at the start, and report a plan that is not used.

        rolled_back: number of candidates that were on probation when the previous process ended.
        """
        if self.unused_plan is not None:
            self.reporter.error(self.unused_plan)
        self.take(fact.Started(rolled_back))
        self.reporter.keeps_policies(self.watch.policies.summaries)
        self._engine_changed(None, {}, recall=True)
        if self.pipeline.open_mismatch is not None:  # the previous process was killed before it could act on it
            self.distrust_reference(self.pipeline.open_mismatch)

    def tick(self, states: CameraStates) -> None:
        """Look at what the observer has found, and move on what is under way."""
        self.take(fact.Tick(), states)
        self.watch.observe(states, self.state)

    def configure(self, config: Config) -> None:
        """Apply a configuration that differs only in the keys that `Settings` can set.

        The reference of jobs is ONNX Runtime's once an audit has found the runtime's own one wrong.
        """
        if self.pipeline.mismatch is not None:
            observe = config.observe.model_copy(update={"reference": "onnxruntime"})
            config = config.model_copy(update={"observe": observe})
        self.config = self._workshop.config = self._exchange.config = config
        self.watch.configure(config)
        self._find_settings()
        self.take(fact.SettingsChanged())

    def distrust_reference(self, mismatch: Mismatch) -> None:
        """Report that the reference is wrong, and drop all that it has shown; ONNX Runtime's takes its place."""
        self.watch.report_mismatch(mismatch)
        self.configure(self.config)
        self.take(fact.ReferenceWrong())

    def recalibrate(self, progress: CommandProgress, args: RecalibrateArgs) -> None:
        """Recalibrate with fresh frames, by command."""
        kind = Requested(args.frames, args.method, args.max_loss)
        self.take(fact.Asked(self.ledger.expect(progress), kind))

    def try_calibration(self, staged: StagedCalibration) -> None:
        """Try a calibration that a fleet has merged, in a job with fresh frames to judge it."""
        kind = FleetCalibration(str(staged.path), staged.path.stem)
        self.take(fact.Asked(self.ledger.expect(staged.progress), kind))

    def try_model(self, staged: StagedModel) -> None:
        """Try a model that was delivered."""
        self._models.expect(staged)
        self.take(fact.ModelDelivered(staged.content, self.ledger.expect(staged.progress)))

    def end_collection(self) -> bool:
        """Let the running job make do with the frames there are, and start no other; True while it goes on.

        Called once no more frames will come.
        """
        self.take(fact.FramesEnded())
        job = self.state.job
        return job is not None and self.state.trial is None and (job.child_since_s is not None or job.kind.collects)

    def stop(self, reason: str) -> None:
        """Cancel what is under way."""
        self.take(fact.Stopping(reason))

    def _engine_changed(self, candidate: LoadedEngine | None, since: Mapping[str, float], recall: bool = False) -> None:
        self._find_settings()
        self.watch.engine_changed(candidate, since, recall)
        self.take(fact.SettingsChanged())

    def _find_settings(self) -> None:
        """Find the fingerprints of all that a candidate depends on; they change with the settings and the engine."""
        self._settings = settings_id(self.config, self.service)
        self._raising = raising_id(self.config, self.service)


def _doers(*devices: object) -> Mapping[type[act.Action], Callable[[Any], object]]:
    """Return what carries out each kind of action: the method of its name, of the device that has one.

    A method raises TaredError for an action that has failed. Raises ValueError unless one device knows an action.
    """
    doers = {}
    for kind in get_args(act.Action):
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
        (doers[kind],) = [getattr(each, name) for each in devices if hasattr(each, name)]
    return doers
