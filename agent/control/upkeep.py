"""Keep room in the artefact store: before an engine is built, and after each job."""

from __future__ import annotations

from collections.abc import Callable, Collection

from agent.common.heap import release_free_memory
from agent.config import Config
from agent.core import actions as act
from agent.models.engine_service import EngineService
from agent.uplink.reporter import Reporter
from engines.store.retention import Freed, Pins, StoreCleaner


class StoreUpkeep:
    """Removes what nobody needs; what is loaded and the regimes stay."""

    def __init__(
        self, config: Config, service: EngineService, reporter: Reporter, regimes: Callable[[], Collection[str]]
    ) -> None:
        """regimes: returns the artefacts of the known ones."""
        self._cleaner = StoreCleaner(service.store, config.store.keep, config.store.reserve_bytes)
        self._service = service
        self._reporter = reporter
        self._regimes = regimes

    def make_room(self, _action: act.MakeRoom) -> None:
        """Free disk space for one more engine. Raises EngineError as `StoreCleaner.ensure_room`."""
        self._report(self._cleaner.ensure_room(self._cleaner.largest_bytes(), self._pins))

    def tidy(self, _action: act.Tidy) -> None:
        """Remove artefacts that nobody needs any more, and give free memory back; no job may be running."""
        with self._reporter.reporting_errors():
            self._report(self._cleaner.tidy(self._pins))
        release_free_memory()

    @property
    def _pins(self) -> Pins:
        """The artefacts that must stay, by role."""
        return {"loaded": (self._service.serving.id,), "regime": self._regimes()}

    def _report(self, freed: Freed) -> None:
        if freed.nbytes:
            removed = [*freed.artefacts, *freed.cached]
            self._reporter.event("store", state="tidied", removed=list(removed), freed_bytes=freed.nbytes)
