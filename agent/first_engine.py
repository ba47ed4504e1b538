"""Which calibrated engine serves first: the ways there are, the best one first, each that leads nowhere told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.build import build_artefact
from calibrate.errors import TaredError
from engines.artefact import Artefact, check_runtime, fingerprint
from engines.backend import Backend, EngineError, Progress
from engines.calibration import Calibration, load_calibration
from engines.seal import read_manifest
from engines.store import LINKS, Store

if TYPE_CHECKING:  # the service asks here
    from agent.service import Loaded, Service

log = logging.getLogger(__name__)

# An engine that its calibration can replace: damaged, or refused by another library that calls itself the same version.
_REPLACEABLE = ("artefact.damaged", "engine.unreadable")

CURRENT = "current"
Way = Callable[[], "Artefact | None"]


class FirstEngine:
    """Finds an artefact that loads. on_error hears of each that cannot serve.

    proven: ids of artefacts that were once kept. Others may lie in the store that nobody came to try.
    may_build: False where a builder ended the process before: nothing is built anew then, a job's child does it.
    """

    def __init__(
        self,
        service: Service,
        backend: Backend,
        store: Store,
        on_error: Callable[[TaredError], None],
        progress: Progress,
        proven: Collection[str],
        may_build: bool = True,
    ) -> None:
        self._service = service
        self._backend = backend
        self._store = store
        self._on_error = on_error
        self._progress = progress
        self._proven = proven
        self._may_build = may_build
        self._failed: dict[str, str] = {}  # by link, the code of what was wrong with what it leads to

    def find(self) -> Loaded | None:
        """`current`, or else `previous`; one of them built anew from its calibration; the newest other one.

        One that was built for another runtime, board or GPU is built anew from its own calibration. Another one serves
        only in the place of what is damaged: an engine that nothing ever led to has not proved itself. What was built,
        or found, in the place of what a link leads to, is what it leads to then. None where only the reference can
        serve.
        """
        for link in LINKS:
            loaded = self._try(link, partial(self._linked, link))
            if loaded is not None:
                return loaded
        for link in LINKS:
            if self._failed.get(link) in _REPLACEABLE:
                loaded = self._try(link, partial(self._salvaged, link))
                if loaded is not None:
                    return loaded
        for path in self._others() if any(map(_is_damage, self._failed.values())) else ():
            loaded = self._try(CURRENT, partial(self._found, path))
            if loaded is not None:
                return loaded
        return None

    def _try(self, link: str, way: Way) -> Loaded | None:
        """What this way leads to, loaded, and linked to; None where it leads nowhere."""
        try:
            artefact = way()
            loaded = self._service.load(artefact) if artefact is not None else None
        except TaredError as error:
            self._on_error(error)
            self._failed.setdefault(link, error.code)
            return None
        if loaded is not None:
            try:
                if self._store.target(link) != loaded.artefact.id:
                    self._store.replace(link, loaded.artefact)
            except EngineError as error:  # it serves all the same
                self._on_error(error)
        return loaded

    def _linked(self, link: str) -> Artefact | None:
        artefact = self._store.read(link)
        return self._of_this_machine(artefact) if artefact is not None else None

    def _salvaged(self, link: str) -> Artefact | None:
        """Built anew from what is whole of the artefact behind a link."""
        artefact = self._store.salvage(link)
        return self._rebuilt(artefact) if artefact is not None else None

    def _found(self, path: Path) -> Artefact | None:
        return self._of_this_machine(self._store.find(path.name))

    def _others(self) -> Iterator[Path]:
        """Proven artefacts of this model under the owner's plan that no link leads to, the newest first."""
        try:
            linked = [self._store.target(link) for link in LINKS]
            places = [path for path in self._store.places() if path.name in self._proven and path.name not in linked]
        except EngineError as error:
            self._on_error(error)
            return
        for path in sorted(places, key=lambda place: place.lstat().st_mtime, reverse=True):
            try:
                inputs: Mapping[str, Any] = read_manifest(path, self._store.key)["inputs"]
            except EngineError:  # nobody relied on it
                continue
            if "calibration" in inputs and self._service.is_ours(inputs):
                yield path

    def _of_this_machine(self, artefact: Artefact) -> Artefact | None:
        """The artefact; another of the same calibration where this one was built elsewhere, or the owner's plan is now
        another."""
        try:
            check_runtime(artefact, self._backend.describe())
            if self._service.is_raised(artefact) or self._service.is_under(artefact):
                return artefact
            log.info("plan=changed artefact=%s step=BUILDING", artefact.id)
        except EngineError as error:
            if error.code != "artefact.runtime":
                raise
            self._on_error(error)
        return self._rebuilt(artefact)

    def _rebuilt(self, artefact: Artefact) -> Artefact | None:
        """Another of the same calibration, in the place of this one where it is of the same inputs."""
        if not self._may_build:
            log.warning("rebuild=skipped artefact=%s reason=the_last_one_was_interrupted", artefact.id)
            return None
        calibration = self._calibration(artefact)
        raised = self._service.is_raised(artefact)
        model = self._service.under_its_plan(artefact) if raised else self._service.model

        def place(inputs: Mapping[str, Any]) -> Path:
            return artefact.path if fingerprint(inputs) == artefact.id else self._store.place(inputs)

        return build_artefact(
            model,
            self._backend,
            place,
            self._progress,
            calibration=calibration,
            precision=artefact.manifest["inputs"]["precision"],
            key=self._store.key,
            raised_from=self._service.origin if raised else "",
            instead_of=artefact.id,
        )

    def _calibration(self, artefact: Artefact) -> Calibration:
        """Raises EngineError (`artefact.damaged`) unless its files are what the manifest names by hash."""
        for name in ("calibration.json", "calibration.npz"):
            artefact.read_file(name)
        return load_calibration(artefact.path / "calibration.json")


def _is_damage(code: str) -> bool:
    """Rather than an engine of another model, or one that the device has no room for."""
    return code.startswith("artefact.") or code in ("store.link", "engine.unreadable")
