"""What serves, told to the world and watched: by the drift monitor, and as a regime that it may become."""

from __future__ import annotations

from collections.abc import Mapping

from agent.config import Config
from agent.findings import States
from agent.model import Model
from agent.news import News
from agent.observer import ObserverThread
from agent.regimes import RegimeBook, Regimes
from agent.reporting import Reporter
from agent.service import Loaded, Service
from calibrate.errors import TaredError
from engines.calibration import Calibration
from engines.upkeep import Pins


class InService:
    """Errors that do not keep the daemon from going on are told. Runs in the supervisor's thread."""

    def __init__(
        self, config: Config, service: Service, observer: ObserverThread, reporter: Reporter, news: News
    ) -> None:
        """Raises AgentError (`regimes.schema`)."""
        book = RegimeBook(config.state_dir / "regimes.json", service.identity, config.regimes.most)
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

    def serves(self, candidate: Loaded | None, since: Mapping[str, float]) -> None:
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

    def learn(self, states: States, now_ts: float) -> None:
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
