"""The store of a running daemon kept small, while no child works in it and nothing is on probation."""

from __future__ import annotations

from collections.abc import Callable

from agent.config import StoreConfig
from agent.reporting import Reporter
from engines.backend import EngineError
from engines.store import Store
from engines.upkeep import Freed, Pins, Upkeep


class Housekeeping:
    """needed: what must stay, by role, at the time of each call."""

    def __init__(self, store: Store, config: StoreConfig, needed: Callable[[], Pins], reporter: Reporter) -> None:
        self._upkeep = Upkeep(store, config.keep, config.reserve_bytes)
        self._needed = needed
        self._reporter = reporter

    def tidy(self) -> None:
        """Remove what nobody needs any more; a disk that refuses is told of."""
        try:
            freed = self._upkeep.tidy(self._needed())
        except EngineError as error:
            self._reporter.error(error)
            return
        self._tell(freed)

    def make_room(self) -> None:
        """For one more engine. Raises EngineError as `Upkeep.ensure_room`."""
        self._tell(self._upkeep.ensure_room(self._upkeep.largest_bytes(), self._needed()))

    def _tell(self, freed: Freed) -> None:
        if freed.nbytes:
            removed = [*freed.artefacts, *freed.cached]
            self._reporter.event("store", state="tidied", removed=list(removed), freed_bytes=freed.nbytes)
