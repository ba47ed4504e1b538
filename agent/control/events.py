"""What the observer has found, told once when it changes: drift, low fidelity, trouble with the view, values that are
no numbers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from agent.config import Config
from agent.control.summary import Alarm
from agent.control.triggers import is_low
from agent.models.engine_service import EngineService, LoadedEngine
from agent.models.model import Model
from agent.monitoring.camera_monitor import CameraState, CameraStates
from agent.monitoring.drift import DriftState
from agent.monitoring.observer import ObserverThread
from agent.monitoring.regimes import Regimes, RegimeStore
from agent.monitoring.view import ViewState
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.calibration import Calibration
from engines.store.retention import Pins


@dataclass
class _Reported:
    """Of one camera."""

    drift: str = "calm"
    low: bool = False
    trouble: str = ""
    nonfinite: frozenset[str] = frozenset()


class StateChangeReporter:
    """Compares what the observer says with what was told before. alarms: takes every alarm that rises."""

    def __init__(self, reporter: Reporter, alarms: list[Alarm], config: Config) -> None:
        self._reporter = reporter
        self._alarms = alarms
        self.config = config
        self._told: dict[str, _Reported] = {}

    def serves_anew(self) -> None:
        """Another engine serves: what drifted from the one before is old, and what that one lost."""
        for told in self._told.values():
            told.drift, told.low = "calm", False

    def tell(self, states: CameraStates) -> None:
        """Report what is new."""
        for camera, state in states.items():
            self._tell(camera, state, self._told.setdefault(camera, _Reported()))

    def _tell(self, camera: str, state: CameraState, told: _Reported) -> None:
        fresh = sorted(set(state.nonfinite) - told.nonfinite)
        if fresh:
            told.nonfinite |= set(fresh)
            message = f"NaN or infinite values in {fresh}"
            self._reporter.event("error", logging.ERROR, code="observer.nonfinite", camera=camera, message=message)
        if state.drift is not None and state.drift.state != told.drift:
            told.drift = state.drift.state
            self._tell_drift(camera, state.drift, state.drift_since, state.view)
        if not told.low and is_low(state, self.config):
            told.low = True
            self._tell_low_fidelity(camera, state)
        if state.view.trouble != told.trouble:
            told.trouble = state.view.trouble
            self._tell_view(camera, state.view, state.drift)

    def _tell_drift(self, camera: str, drift: DriftState, since: float, view: ViewState) -> None:
        """An alarm goes with the trouble that the view is in, which explains it, and why no job answers it."""
        detail: dict[str, JsonValue] = {
            "camera": camera,
            "capture_ts": since,
            "gain_db": round(drift.gain_db, 2),
            "e_value": round(drift.e_value, 1),
            "clipping_share": round(drift.clipping_share, 2),
        }
        if drift.state != "alarm":
            self._reporter.event("drift", state=drift.state, **detail)
            return
        onset_ts = drift.onset_ts if drift.onset_ts is not None else since
        trouble: dict[str, JsonValue] = {"trouble": view.trouble, **_rounded(view)} if view.trouble else {}
        self._reporter.event("alarm", logging.WARNING, onset_ts=onset_ts, **detail, **trouble)
        self._alarms.append(Alarm(since, onset_ts, drift.gain_db, drift.e_value, camera))

    def _tell_low_fidelity(self, camera: str, state: CameraState) -> None:
        """Once for each engine in service; the gain says that a recalibration would not help."""
        self._reporter.event(
            "fidelity",
            logging.WARNING,
            camera=camera,
            state="low",
            since=state.settled.since,
            gain_db=round(state.drift.serving_db, 2) if state.drift is not None else None,
            accepted=1.0 - self.config.recalibration.max_loss,
            **asdict(state.settled.interval),
        )

    def _tell_view(self, camera: str, view: ViewState, drift: DriftState | None) -> None:
        """Of what only somebody at the camera can cure; the gain says that a recalibration would not."""
        gain_db = round(drift.gain_db, 2) if drift is not None else None
        level = logging.WARNING if view.trouble else logging.INFO
        self._reporter.event("view", level, camera=camera, trouble=view.trouble, gain_db=gain_db, **_rounded(view))


def _rounded(view: ViewState) -> dict[str, float]:
    """Its evidence, as it is told."""
    return {name: round(figure, 3) for name, figure in view.evidence.items()}


class ServingWatch:
    """Errors that do not keep the daemon from going on are told. Runs in the supervisor's thread."""

    def __init__(
        self,
        config: Config,
        service: EngineService,
        observer: ObserverThread,
        reporter: Reporter,
        news: StateChangeReporter,
    ) -> None:
        """Raises AgentError (`regimes.schema`)."""
        book = RegimeStore(config.state_dir / "regimes.json", service.identity, config.regimes.most)
        self._regimes = Regimes(config, book, observer.findings.values(), observer.gathering)
        self._service = service
        self._reporter = reporter
        self._news = news

    @property
    def regimes(self) -> tuple[str, ...]:
        """The artefacts of the regimes that are kept."""
        return tuple(self._regimes.artefacts)

    @property
    def needed(self) -> Pins:
        """Artefacts that must stay in the store, by role."""
        return {"loaded": (self._service.serving.id,), "regime": self._regimes.artefacts}

    def start(self) -> None:
        """What the service has at the start serves on with what is remembered of it."""
        service = self._service
        if service.calibration is None:
            self._reporter.serves(service.serving.id, None)
        else:
            self._watch(service.serving.id, service.calibration, service.planned, {}, recall=True)

    def serves(self, candidate: LoadedEngine | None, since: Mapping[str, float]) -> None:
        """A candidate serves from capture time `since` on, by camera; None: what the service has does so again."""
        service = self._service
        if candidate is not None:
            self._watch(candidate.artefact.id, candidate.calibration, candidate.model, since)
        elif service.calibration is not None:
            self._watch(service.serving.id, service.calibration, service.planned, since)
        else:
            self._news.serves_anew()
            self._reporter.serves(service.serving.id, None)
            self._regimes.unwatch()

    def learn(self, states: CameraStates, now_ts: float) -> None:
        """What has served its light well becomes a regime, at capture time `now_ts`."""
        try:
            learnt = self._regimes.learns(states, now_ts)
        except TaredError as error:
            self._reporter.error(error)
            return
        if learnt:
            self._reporter.event("regime", artefact=learnt, known=len(self.regimes))

    def forget(self, artefact: str) -> None:
        """It is not to be switched to."""
        try:
            self._regimes.forget(artefact)
        except TaredError as error:
            self._reporter.error(error)

    def _watch(
        self, artefact: str, calibration: Calibration, planned: Model, since: Mapping[str, float], recall: bool = False
    ) -> None:
        """From capture time `since` on, by camera: fresh evidence for it."""
        self._news.serves_anew()
        self._reporter.serves(artefact, calibration.id)
        try:
            self._regimes.watch(artefact, planned, calibration, since, recall)
        except TaredError as error:
            self._reporter.error(error)
