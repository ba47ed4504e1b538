"""Which engine serves: chosen at the start, exchanged between two frames, remembered in the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.build import build_artefact
from agent.model import Model, check_calibration
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.backend import Backend, Engine, EngineError, Progress, silent
from engines.calibration import Calibration, load_calibration
from engines.seal import canonical
from engines.store import Artefact, Store, check_runtime, fingerprint, read_artefact

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """An artefact that can serve: its engine, its calibration, and the model under its plan."""

    artefact: Artefact
    engine: Engine
    calibration: Calibration
    model: Model


class Service:
    """The artefacts of one model on one backend, and the one in service.

    Without a calibrated artefact the float reference serves: the camera is never blind, the state is degraded.
    model: under the owner's plan. planned: under that of what serves, which may have been raised from the owner's, so
    that more layers are float: such an artefact serves, and is built anew, as long as the owner's word stays the same.
    """

    def __init__(self, model: Model, backend: Backend, store: Store) -> None:
        self.model = self.planned = model
        self._backend = backend
        self._store = store
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
        return self._is_raised(self.serving)

    @property
    def plan(self) -> PrecisionPlan:
        """What the next engine is built under: the raised plan where one serves, else the owner's."""
        return self.planned.plan if self.raised else self.model.plan

    @property
    def calibrated_path(self) -> Path | None:
        """The artefact in service, None for the reference."""
        return None if self.degraded else self.serving.path

    def start(self, on_error: Callable[[TaredError], None], progress: Progress = silent) -> Engine:
        """Load `current`, or else `previous`, or else the reference; each that cannot serve goes to on_error.

        One that was built for another runtime, board or GPU is built anew from its own calibration.
        """
        for link in ("current", "previous"):
            try:
                artefact = self._store.read(link)
                if artefact is None:
                    continue
                self.serving = self._of_this_machine(link, artefact, on_error, progress)
                loaded = self.load(self.serving)
                self.calibration, self.planned = loaded.calibration, loaded.model
                return loaded.engine
            except TaredError as error:
                on_error(error)
        self.serving = self._build_reference(progress)
        try:
            return self._backend.load(self.serving.read_engine())
        except EngineError as error:
            if error.code != "engine.unreadable":  # what another library refuses that calls itself the same version
                raise
            on_error(error)
        self._store.discard(self.serving.path)
        self.serving = self._build_reference(progress)
        return self._backend.load(self.serving.read_engine())

    def _build_reference(self, progress: Progress) -> Artefact:
        """The float reference as an artefact, or the one that is there."""
        return build_artefact(
            self.model,
            self._backend,
            self._store.place,
            progress,
            calibration=None,
            precision=self._backend.precisions[0],
            key=self._store.key,
        )

    @property
    def identity(self) -> str:
        """Of all artefacts that may take one another's place: of one model, spec, owner's plan and runtime."""
        model, backend = self.model, self._backend
        parts = {"model": model.sha256, "spec": model.spec_id, "plan": model.plan.essence}
        return fingerprint({**parts, "backend": {**backend.describe(), **backend.flags()}})

    def find(self, identity: str) -> Artefact:
        """The artefact of this id in the store, verified. Raises EngineError as `Store.find`."""
        return self._store.find(identity)

    def read(self, path: Path) -> Artefact:
        """An artefact of the store, verified. Raises EngineError as read_artefact."""
        return read_artefact(path, self._store.key)

    def load(self, artefact: Artefact) -> Loaded:
        """Make an artefact ready to serve, under its own plan.

        Raises EngineError, of `check_runtime` too, and CalibrationError for another model's.
        """
        check_runtime(artefact, self._backend.describe())
        calibration = load_calibration(artefact.path / "calibration.json")
        model = self._under_its_plan(artefact)
        check_calibration(model, calibration)
        return Loaded(artefact, self._backend.load(artefact.read_engine()), calibration, model)

    def _under_its_plan(self, artefact: Artefact) -> Model:
        for known in (self.model, self.planned):
            if _is_under(artefact, known.plan):
                return known
        return self.model.under(PrecisionPlan.from_json(artefact.read_file("plan.json").decode()))

    def _is_raised(self, artefact: Artefact) -> bool:
        """From the owner's word as it is now."""
        return bool(artefact.manifest["inputs"].get("raised_from") == self.origin)

    def _of_this_machine(
        self, link: str, artefact: Artefact, on_error: Callable[[TaredError], None], progress: Progress
    ) -> Artefact:
        """The artefact; another of the same calibration where this one was built elsewhere, or the owner's plan is now
        another."""
        raised = self._is_raised(artefact)
        try:
            check_runtime(artefact, self._backend.describe())
            if raised or _is_under(artefact, self.model.plan):
                return artefact
            log.info("plan=changed artefact=%s step=BUILDING", artefact.id)
        except EngineError as error:
            if error.code != "artefact.runtime":
                raise
            on_error(error)
        rebuilt = build_artefact(
            self._under_its_plan(artefact) if raised else self.model,
            self._backend,
            self._store.place,
            progress,
            calibration=load_calibration(artefact.path / "calibration.json"),
            precision=artefact.manifest["inputs"]["precision"],
            key=self._store.key,
            raised_from=self.origin if raised else "",
        )
        self._store.replace(link, rebuilt)
        return rebuilt

    def previous(self) -> Artefact | None:
        """The artefact before the current one."""
        return self._store.read("previous")

    def commit(self, loaded: Loaded) -> None:
        """The artefact has served its first frame: it is what serves, and becomes current in the store.

        Raises EngineError (`store.write`) when the store cannot be changed; it serves all the same.
        """
        self.serving, self.calibration, self.planned = loaded.artefact, loaded.calibration, loaded.model
        self._store.promote(loaded.artefact)


def _is_under(artefact: Artefact, plan: PrecisionPlan) -> bool:
    """Whether it was built under this plan, or under none."""
    built_under = artefact.manifest["inputs"].get("plan")
    return built_under is None or canonical(built_under) == canonical(plan.essence)
