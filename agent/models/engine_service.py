"""Which calibrated engine serves first: the ways there are, the best one first, each that leads nowhere told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.models.build import build_artefact
from agent.models.model import Model, check_calibration
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.errors import EngineError
from engines.interface import Backend, Engine, Progress, silent
from engines.store.artefact import Artefact, check_runtime, fingerprint, read_artefact
from engines.store.retention import record_refusal
from engines.store.signing import canonical, read_manifest
from engines.store.store import LINKS, Store

if TYPE_CHECKING:  # the service asks here
    pass

log = logging.getLogger(__package__)

# An engine that its calibration can replace: damaged, or refused by another library that calls itself the same version.
_REPLACEABLE = ("artefact.damaged", "engine.unreadable")

CURRENT = "current"
Way = Callable[[], "Artefact | None"]


class StartEngine:
    """Finds an artefact that loads. on_error hears of each that cannot serve.

    proven: ids of artefacts that were once kept. Others may lie in the store that nobody came to try.
    may_build: False where a builder ended the process before: nothing is built anew then, a job's child does it.
    """

    def __init__(
        self,
        service: EngineService,
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

    def find(self) -> LoadedEngine | None:
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

    def _try(self, link: str, way: Way) -> LoadedEngine | None:
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


def reject(store: Store, identity: str, rollback: Mapping[str, Any]) -> None:
    """Remove an artefact, for it could serve one day as the newest one left; `refused/` keeps its verdict, and why.

    What `current` or `previous` leads to stays, and what is not there is no matter. rollback: in JSON's types.
    Raises EngineError: `store.write`, `artefact.unreadable`.
    """
    path = next((place for place in store.places() if place.name == identity), None)
    if path is None or identity in [store.target(link) for link in LINKS]:
        return
    try:
        record_refusal(store.root, identity, {"rollback": dict(rollback), "verdict": _verdict(path)})
    except OSError as error:  # it goes all the same
        log.warning("refusal_not_kept error=%r", error.strerror)
    store.discard(path)


def _verdict(path: Path) -> Any:
    """What its manifest says; whoever signed it, for it is only kept to be looked at."""
    try:
        return read_manifest(path, None).get("verdict")
    except EngineError:
        return None


@dataclass(frozen=True)
class LoadedEngine:
    """An artefact that can serve: its engine, its calibration, and the model under its plan."""

    artefact: Artefact
    engine: Engine
    calibration: Calibration
    model: Model


class EngineService:
    """The artefacts of one model on one backend, and the one in service.

    Without a calibrated artefact the float reference serves: the camera is never blind, the state is degraded.
    model: under the owner's plan. planned: under that of what serves, which may have been raised from the owner's, so
    that more layers are float: such an artefact serves, and is built anew, as long as the owner's word stays the same.
    """

    def __init__(self, model: Model, backend: Backend, store: Store) -> None:
        self.model = self.planned = model
        self._backend = backend
        self.store = store
        self.serving: Artefact
        self.calibration: Calibration | None = None

    @property
    def degraded(self) -> bool:
        """Whether the reference serves."""
        return self.calibration is None

    @property
    def origin(self) -> str:
        """The owner's word on precision, plan and rules, as a fingerprint: what a raised plan was raised from."""
        rules = self.model.spec.precision.model_dump(mode="json")
        return fingerprint({"plan": self.model.plan.essence, "rules": rules})

    @property
    def raised(self) -> bool:
        """Whether what serves leaves more float than the owner's plan."""
        return self.is_raised(self.serving)

    @property
    def plan(self) -> PrecisionPlan:
        """What the next engine is built under: the raised plan where one serves, else the owner's."""
        return self.planned.plan if self.raised else self.model.plan

    @property
    def calibrated_path(self) -> Path | None:
        """The artefact in service, None for the reference."""
        return None if self.degraded else self.serving.path

    def start(
        self,
        on_error: Callable[[TaredError], None],
        progress: Progress = silent,
        proven: Collection[str] = (),
        may_build: bool = True,
    ) -> Engine:
        """Load the first engine that can serve, as StartEngine finds it, or else the reference.

        Each that cannot serve goes to on_error. may_build: as for StartEngine; the reference is built all the same.
        Raises TaredError where not even the reference can.
        """
        loaded = StartEngine(self, self._backend, self.store, on_error, progress, proven, may_build).find()
        if loaded is not None:
            self.serving, self.calibration, self.planned = loaded.artefact, loaded.calibration, loaded.model
            return loaded.engine
        self.serving = self._build_reference(progress)
        try:
            return self._backend.load(self.serving.read_engine())
        except EngineError as error:
            if error.code != "engine.unreadable":  # what another library refuses that calls itself the same version
                raise
            on_error(error)
        self.store.discard(self.serving.path)
        self.serving = self._build_reference(progress)
        return self._backend.load(self.serving.read_engine())

    def _build_reference(self, progress: Progress) -> Artefact:
        """The float reference as an artefact, or the one that is there."""
        return build_artefact(
            self.model,
            self._backend,
            self.store.place,
            progress,
            calibration=None,
            precision=self._backend.precisions[0],
            key=self.store.key,
        )

    @property
    def identity(self) -> str:
        """Of all artefacts that may take one another's place: of one model, spec, owner's plan and runtime."""
        model, backend = self.model, self._backend
        parts = {"model": model.sha256, "spec": model.spec_id, "plan": model.plan.essence}
        return fingerprint({**parts, "backend": {**backend.describe(), **backend.flags()}})

    def find(self, identity: str) -> Artefact:
        """The artefact of this id in the store, verified. Raises EngineError as `Store.find`."""
        return self.store.find(identity)

    def read(self, path: Path) -> Artefact:
        """An artefact of the store, verified. Raises EngineError as read_artefact."""
        return read_artefact(path, self.store.key)

    def load(self, artefact: Artefact) -> LoadedEngine:
        """Make an artefact ready to serve, under its own plan.

        Raises EngineError, of `check_runtime` too, and CalibrationError for another model's.
        """
        check_runtime(artefact, self._backend.describe())
        calibration = load_calibration(artefact.path / "calibration.json")
        model = self.under_its_plan(artefact)
        check_calibration(model, calibration)
        return LoadedEngine(artefact, self._backend.load(artefact.read_engine()), calibration, model)

    def under_its_plan(self, artefact: Artefact) -> Model:
        """The model under the plan that the artefact was built under. Raises as `Artefact.read_file`."""
        for known in (self.model, self.planned):
            if _is_under(artefact.manifest["inputs"], known.plan):
                return known
        return self.model.under(PrecisionPlan.from_json(artefact.read_file("plan.json").decode()))

    def is_raised(self, artefact: Artefact) -> bool:
        """Whether it leaves more float than the owner's plan, by the owner's word as it is now."""
        return self._is_raised(artefact.manifest["inputs"])

    def is_under(self, artefact: Artefact) -> bool:
        """Whether it was built under the owner's plan, or under none."""
        return _is_under(artefact.manifest["inputs"], self.model.plan)

    def is_ours(self, inputs: Mapping[str, Any]) -> bool:
        """Whether an artefact of these inputs is of this model, and under the owner's word on precision."""
        return inputs.get("model") == self.model.sha256 and (
            self._is_raised(inputs) or _is_under(inputs, self.model.plan)
        )

    def _is_raised(self, inputs: Mapping[str, Any]) -> bool:
        return bool(inputs.get("raised_from") == self.origin)

    def previous(self) -> Artefact | None:
        """The artefact before the current one."""
        return self.store.read("previous")

    def commit(self, loaded: LoadedEngine) -> None:
        """The artefact has stood its probation: it is what serves, and becomes current in the store.

        Raises EngineError (`store.write`) when the store cannot be changed; it serves all the same, and this may be
        called again.
        """
        self.serving, self.calibration, self.planned = loaded.artefact, loaded.calibration, loaded.model
        self.store.promote(loaded.artefact)

    def reject(self, artefact: Artefact, rollback: Mapping[str, Any]) -> None:
        """It has not stood its probation, and why. Raises EngineError as `agent.models.engine_service.reject`."""
        if artefact.id != self.serving.id:  # which may serve though the disk has refused to make it current
            reject(self.store, artefact.id, rollback)


def _is_under(inputs: Mapping[str, Any], plan: PrecisionPlan) -> bool:
    """Whether what has these inputs was built under this plan, or under none."""
    built_under = inputs.get("plan")
    return built_under is None or canonical(built_under) == canonical(plan.essence)
