"""Keep watch over the engine in service: its evidence, the regimes that are known, and the owner's policies.

`Watch` tells the observer what serves, and what to compare with. It announces changes to the fleet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agent.config import Config
from agent.contract.commands import PolicyArgs
from agent.control.events import StateChangeReporter
from agent.control.policies import Policies
from agent.control.summary import RunSummary
from agent.core import actions as act
from agent.core.state import State
from agent.models.engine_service import EngineService, LoadedEngine
from agent.monitoring.audit import Mismatch
from agent.monitoring.camera_monitor import CameraStates
from agent.monitoring.gains import GainRecord
from agent.monitoring.regimes import Regimes, RegimeStore
from agent.serving.pipeline import Pipeline
from agent.state.store import StateStore
from agent.uplink.reporter import Reporter
from calibrate.statistics.fidelity_gain import Recalibrated


@dataclass
class Watch:
    """What is observed and known of the engines. Everything runs in the supervisor's thread.

    Attributes:
        regimes: The artefacts that have served one light well, and the evidence on the one in service.
        policies: What the owner lets be shown of each engine's answers.
    """

    config: Config
    service: EngineService
    pipeline: Pipeline
    reporter: Reporter
    summary: RunSummary
    state: StateStore

    def __post_init__(self) -> None:
        config, service, pipeline = self.config, self.service, self.pipeline
        observer = pipeline.observer
        self.policies = Policies(config, self.state)
        with self.reporter.reporting_errors():
            for before, artefact in service.rebuilt.items():
                self.policies.hand_on(before, artefact)
        pipeline.keep_evidence(config.state_dir, self.state.report)
        self._changes = StateChangeReporter(self.reporter, self.summary.alarms, config)
        kept = self.state if pipeline.is_live else StateStore(None)  # each play of a recording starts from scratch
        self._gains = GainRecord(kept, service.identity)
        for monitor in observer.monitors.values():
            monitor.gains = self._gains
        store = RegimeStore(self.state, service.identity, config.regimes.most)
        self.regimes = Regimes(config, store, observer.monitors.values(), observer.collection)

    def configure(self, config: Config) -> None:
        self.config = self._changes.config = config
        for monitor in self.pipeline.observer.monitors.values():
            monitor.config = config

    def observe(self, states: CameraStates, state: State) -> None:
        """Report what the observer has noticed, learn what has proved itself, and set the pace of observing."""
        observer = self.pipeline.observer
        self._changes.report_changes(states)
        self._changes.report_labelled(observer.measured)
        is_swapping = state.trial is not None or self.pipeline.loop.is_committing
        if not is_swapping:  # a candidate on probation teaches nothing
            self._learn(states)
        compared = [drift for each in states.values() for drift in (each.drift, each.since_refusal)]
        closely = any(drift is not None and drift.closely for drift in compared)
        is_collecting = state.job is not None and state.job.is_collecting
        observer.set_pace(alert=is_collecting or closely or is_swapping)
        observer.collection.set_in_use(is_collecting)

    def _learn(self, states: CameraStates) -> None:
        with self.reporter.reporting_errors():
            learnt = self.regimes.learn_if_proved(states, self.pipeline.last_ts)
            if learnt:
                policy = self.policies.taking_over(learnt)
                self.reporter.event("regime", artefact=learnt, known=len(self.regimes.artefacts), **policy)
                self.reporter.keeps_regimes(self.regimes.artefacts)

    def engine_changed(self, candidate: LoadedEngine | None, since: Mapping[str, float], recall: bool = False) -> None:
        """Announce the engine that serves now, and begin its evidence.

        Args:
            candidate: The engine on probation; None: the engine in service serves.
            since: Capture time from which on it serves, by camera.
            recall: Go on with the evidence that an earlier process kept of it.
        """
        service = self.service
        self._changes.reset()
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

    def restart_collection(self, action: act.RestartCollection) -> None:
        self.pipeline.observer.collection.restart(hurried=action.hurried)

    def compare_with_refused(self, action: act.CompareWithRefused) -> None:
        for monitor in self.pipeline.observer.monitors.values():
            monitor.compare_with_refused(action.scene)

    def answer_mismatch(self, _action: act.AnswerMismatch) -> None:
        self.pipeline.answer_mismatch()

    def reset_views(self, _action: act.ResetViews) -> None:
        for monitor in self.pipeline.observer.monitors.values():
            monitor.reset_view()

    def report_mismatch(self, mismatch: Mismatch) -> None:
        self._changes.report_mismatch(mismatch)

    def learn_gain(self, action: act.LearnGain) -> None:
        """Note what a recalibration has gained over the INT8 engine in service, on the frames that judged it."""
        verdict = action.verdict
        states = self.pipeline.observer.states().values()
        gains_db = [state.drift.serving_db for state in states if state.drift is not None and state.drift.judged]
        frames = verdict.frames - verdict.empty_frames
        if gains_db and frames and verdict.fidelity_serving is not None:
            gained = verdict.fidelity - verdict.fidelity_serving
            loss, gain_db = 1.0 - verdict.fidelity_serving, sum(gains_db) / len(gains_db)
            self._gains.note(Recalibrated(gain_db, loss, gained, frames))

    def forget_regime(self, action: act.ForgetRegime) -> None:
        with self.reporter.reporting_errors():
            self.regimes.forget(action.artefact)
        self.reporter.keeps_regimes(self.regimes.artefacts)

    def set_policy(self, args: PolicyArgs) -> None:
        """Change what is shown of an engine's answers from now on, and report it. Raises as Policies.set."""
        self.policies.set(args)
        self.reporter.event("policy", artefact=args.artefact, policy=self.policies.summary(args.artefact))
        self.reporter.keeps_policies(self.policies.summaries)

    def forget_policies(self, _action: act.ForgetPolicies) -> None:
        with self.reporter.reporting_errors():
            if self.policies.keep_only({path.name for path in self.service.store.places()}):
                self.reporter.keeps_policies(self.policies.summaries)
