"""Which engine serves: chosen at the start, exchanged between two frames, remembered in the store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.build import build_artefact
from agent.first_engine import FirstEngine
from agent.model import Model, check_calibration
from agent.rejection import reject
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.artefact import Artefact, check_runtime, fingerprint, read_artefact
from engines.backend import Backend, Engine, EngineError, Progress, silent
from engines.calibration import Calibration, load_calibration
from engines.seal import canonical
from engines.store import Store


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
        """Load the first engine that can serve, as FirstEngine finds it, or else the reference.

        Each that cannot serve goes to on_error. may_build: as for FirstEngine; the reference is built all the same.
        Raises TaredError where not even the reference can.
        """
        loaded = FirstEngine(self, self._backend, self.store, on_error, progress, proven, may_build).find()
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

    def load(self, artefact: Artefact) -> Loaded:
        """Make an artefact ready to serve, under its own plan.

        Raises EngineError, of `check_runtime` too, and CalibrationError for another model's.
        """
        check_runtime(artefact, self._backend.describe())
        calibration = load_calibration(artefact.path / "calibration.json")
        model = self.under_its_plan(artefact)
        check_calibration(model, calibration)
        return Loaded(artefact, self._backend.load(artefact.read_engine()), calibration, model)

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

    def commit(self, loaded: Loaded) -> None:
        """The artefact has stood its probation: it is what serves, and becomes current in the store.

        Raises EngineError (`store.write`) when the store cannot be changed; it serves all the same, and this may be
        called again.
        """
        self.serving, self.calibration, self.planned = loaded.artefact, loaded.calibration, loaded.model
        self.store.promote(loaded.artefact)

    def reject(self, artefact: Artefact, rollback: Mapping[str, Any]) -> None:
        """It has not stood its probation, and why. Raises EngineError as `agent.rejection.reject`."""
        if artefact.id != self.serving.id:  # which may serve though the disk has refused to make it current
            reject(self.store, artefact.id, rollback)


def _is_under(inputs: Mapping[str, Any], plan: PrecisionPlan) -> bool:
    """Whether what has these inputs was built under this plan, or under none."""
    built_under = inputs.get("plan")
    return built_under is None or canonical(built_under) == canonical(plan.essence)
