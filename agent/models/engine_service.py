"""Keep the engines of one model: which one serves, which serves first after a start, and which may not come back.

`EngineService` knows the artefact in service and commits its successors. `StartEngine` chooses the engine that serves
first: `current`, else `previous`, else one of the two rebuilt from its own calibration. Where none of them can serve,
the float reference does, and the service is degraded. `reject` removes a candidate that failed its probation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from agent.models.build import PLANNED_FROM, build_artefact
from agent.models.model import Model, check_calibration
from calibrate.errors import TaredError
from calibrate.plan import PrecisionPlan
from engines.calibration import Calibration, load_calibration
from engines.errors import EngineError
from engines.interface import Backend, Engine, Progress, silent
from engines.store.artefact import LINKS, Artefact, Store, check_runtime, fingerprint
from engines.store.retention import record_refusal
from engines.store.signing import canonical, read_manifest

log = logging.getLogger(__package__)

# An engine that its calibration can replace: damaged, or refused by another library that calls itself the same version.
_REPLACEABLE = ("artefact.damaged", "engine.unreadable")


@dataclass(frozen=True)
class LoadedEngine:
    """An artefact that can serve: its engine, its calibration, and the model under its plan.

    The float engine of a new model has no calibration, and `model` is the one that it shall replace.
    """

    artefact: Artefact
    engine: Engine
    calibration: Calibration | None
    model: Model


class EngineService:
    """The artefacts of one model on one backend, and the one in service.

    Without a calibrated artefact the float reference serves: the camera is never blind, the state is degraded.

    Attributes:
        model: The model under the configured plan, whose tensors are observed.
        serving_model: The model under the plan of the artefact in service, which a job may have found, beginning with
            the configured one. Such an artefact serves, and is rebuilt, as long as the configured plan and rules stay
            the same.
        calibration: Its calibration; None while the reference serves.
        rebuilt: By the id of an artefact that could not serve, the one that the start has built in its place.
    """

    def __init__(self, model: Model, backend: Backend, store: Store) -> None:
        self.model = self.serving_model = model
        self.backend = backend
        self.store = store
        self.serving: Artefact
        self.calibration: Calibration | None = None
        self.rebuilt: dict[str, str] = {}

    @property
    def is_degraded(self) -> bool:
        """True while the reference serves."""
        return self.calibration is None

    @cached_property
    def precision_origin(self) -> str:
        """Fingerprint of the configured plan and precision rules, with which the planning of jobs begins."""
        rules = self.model.spec.precision.model_dump(mode="json")
        return fingerprint({"plan": self.model.plan.essence, "rules": rules})

    @property
    def is_precision_raised(self) -> bool:
        """True while the artefact in service leaves more float than the configured plan."""
        return bool(self.plan.floats.keys() - self.model.plan.floats.keys())

    @property
    def plan(self) -> PrecisionPlan:
        """The plan with which the next job begins: that of the artefact in service, or else the configured one."""
        return self.serving_model.plan if self.is_planned(self.serving) else self.model.plan

    @property
    def identity(self) -> str:
        """Fingerprint of model, spec, configured plan and runtime. Artefacts of one identity may replace each other."""
        model, backend = self.model, self.backend
        parts = {"model": model.sha256, "spec": model.spec_id, "plan": model.plan.essence}
        return fingerprint({**parts, "backend": {**backend.describe(), **backend.flags()}})

    def start(
        self, on_error: Callable[[TaredError], None], progress: Progress = silent, may_build: bool = True
    ) -> Engine:
        """Load the first engine that can serve, as StartEngine chooses it, or else the reference.

        Args:
            on_error: Called with the reason for each artefact that cannot serve.
            may_build: As for StartEngine; the reference is built in any case.

        Raises TaredError where not even the reference can serve.
        """
        loaded = StartEngine(self, on_error, progress, may_build).load()
        if loaded is not None:
            self.serving, self.calibration, self.serving_model = loaded.artefact, loaded.calibration, loaded.model
            return loaded.engine
        self.serving = self._build_reference(progress)
        try:
            return self.backend.load(self.serving.read_engine())
        except EngineError as error:
            if error.code != "engine.unreadable":  # another library of the same version may refuse it
                raise
            on_error(error)
        self.store.discard(self.serving.path)
        self.serving = self._build_reference(progress)
        return self.backend.load(self.serving.read_engine())

    def _build_reference(self, progress: Progress) -> Artefact:
        """Return the float reference as an artefact, built unless it is in the store."""
        return build_artefact(
            self.model,
            self.backend,
            self.store.place,
            progress,
            calibration=None,
            precision=self.backend.precisions[0],
            key=self.store.key,
        )

    def load(self, artefact: Artefact) -> LoadedEngine:
        """Make an artefact ready to serve, under its own plan.

        Raises EngineError, also as `check_runtime`; CalibrationError for another model's artefact.
        """
        check_runtime(artefact, self.backend.describe())
        calibration = load_calibration(artefact.path / "calibration.json")
        model = self.model_for(artefact)
        check_calibration(model, calibration)
        return LoadedEngine(artefact, self.backend.load(artefact.read_engine()), calibration, model)

    def load_float(self, artefact: Artefact) -> LoadedEngine:
        """Make the float engine of a new model ready to be tried. Raises EngineError."""
        return LoadedEngine(artefact, self.backend.load(artefact.read_engine()), None, self.model)

    def model_for(self, artefact: Artefact) -> Model:
        """Return the model under the plan that the artefact was built under. Raises as `Artefact.read_file`."""
        for known in (self.model, self.serving_model):
            if _was_built_under(artefact, known.plan):
                return known
        return self.model.with_plan(PrecisionPlan.from_json(artefact.read_file("plan.json").decode()))

    def is_planned(self, artefact: Artefact) -> bool:
        """Return True if a job found the artefact's plan, beginning with the configured one."""
        return bool(artefact.manifest["inputs"].get(PLANNED_FROM) == self.precision_origin)

    def watched(self, model: Model) -> Model:
        """Return the model of an engine as it is observed: a job's plan may divide what is observed undivided."""
        if model.observed_id == self.model.observed_id:
            return model
        return self.model.with_plan(replace(self.model.plan, floats=model.plan.floats, evidence=model.plan.evidence))

    def commit(self, loaded: LoadedEngine) -> None:
        """Make the artefact the one in service and `current` in the store: it has passed its probation.

        Raises EngineError (`store.write`) when the store cannot be changed. The artefact serves all the same, and this
        may be called again.
        """
        self.serving, self.calibration, self.serving_model = loaded.artefact, loaded.calibration, loaded.model
        self.store.promote(loaded.artefact)

    def reject(self, artefact: Artefact, rollback: Mapping[str, Any]) -> None:
        """Remove an artefact that failed its probation. rollback: why. Raises EngineError as the function `reject`."""
        if artefact.id != self.serving.id:  # which may serve though the disk has refused to make it current
            reject(self.store, artefact.id, rollback)


def _was_built_under(artefact: Artefact, plan: PrecisionPlan) -> bool:
    """Return True if the artefact was built under this plan, or under none."""
    built_under = artefact.manifest["inputs"].get("plan")
    return built_under is None or canonical(built_under) == canonical(plan.essence)


@dataclass
class StartEngine:
    """Choose the calibrated engine that serves first after a start.

    Only what `current` or `previous` leads to may serve: an engine that no link ever led to has not proved itself.

    1. `current`, else `previous`. An artefact that was built for another runtime, board or GPU, or under a plan that is
       no longer configured, is rebuilt from its own calibration.
    2. Where both fail: `current`, else `previous`, rebuilt from its own calibration if only the engine is damaged.

    The link then leads to what was built.

    Args:
        service: Has the artefacts to choose among.
        on_error: Called with the reason for each artefact that cannot serve.
        may_build: False if a builder ended the process before. Nothing is rebuilt then; a job's child does it.
    """

    service: EngineService
    on_error: Callable[[TaredError], None]
    progress: Progress
    may_build: bool = True

    def load(self) -> LoadedEngine | None:
        """Load the first engine that can serve; None where only the reference can."""
        failed: dict[str, str] = {}  # by link, the code of the error
        for link in LINKS:
            loaded = self._try(link, self._read, failed)
            if loaded is not None:
                return loaded
        for link in LINKS:
            if failed.get(link) in _REPLACEABLE:
                loaded = self._try(link, self._salvage, failed)
                if loaded is not None:
                    return loaded
        return None

    def _try(self, link: str, read: Callable[[str], Artefact | None], failed: dict[str, str]) -> LoadedEngine | None:
        """Load the artefact that `read` returns for the link, and make the link lead to it; None where it fails."""
        try:
            artefact = read(link)
            loaded = self.service.load(artefact) if artefact is not None else None
        except TaredError as error:
            self.on_error(error)
            failed.setdefault(link, error.code)
            return None
        if loaded is not None:
            try:
                before = self.service.store.target(link)
                if before != loaded.artefact.id:
                    self.service.rebuilt[before] = loaded.artefact.id
                    self.service.store.replace(link, loaded.artefact)
            except EngineError as error:  # it serves all the same
                self.on_error(error)
        return loaded

    def _read(self, link: str) -> Artefact | None:
        """Return the artefact behind a link, rebuilt if it is for another runtime or a plan that is not configured."""
        artefact = self.service.store.read(link)
        if artefact is None:
            return None
        try:
            check_runtime(artefact, self.service.backend.describe())
            if self.service.is_planned(artefact) or _was_built_under(artefact, self.service.model.plan):
                return artefact
            log.info("plan=changed artefact=%s step=BUILDING", artefact.id)
        except EngineError as error:
            if error.code != "artefact.runtime":
                raise
            self.on_error(error)
        return self._rebuild(artefact)

    def _salvage(self, link: str) -> Artefact | None:
        """Rebuild the artefact behind a link from its undamaged files."""
        artefact = self.service.store.salvage(link)
        return self._rebuild(artefact) if artefact is not None else None

    def _rebuild(self, artefact: Artefact) -> Artefact | None:
        """Build another artefact of the same calibration; it replaces this one where its inputs are the same.

        Raises EngineError (`artefact.damaged`) unless the calibration's files are those that the manifest names by
        hash.
        """
        if not self.may_build:
            log.warning("rebuild=skipped artefact=%s reason=the_last_one_was_interrupted", artefact.id)
            return None
        for name in ("calibration.json", "calibration.npz"):
            artefact.read_file(name)
        service = self.service
        model = service.model_for(artefact) if service.is_planned(artefact) else self._configured(artefact)

        def place(inputs: Mapping[str, Any]) -> Path:
            return artefact.path if fingerprint(inputs) == artefact.id else self.service.store.place(inputs)

        return build_artefact(
            model,
            service.backend,
            place,
            self.progress,
            calibration=load_calibration(artefact.path / "calibration.json"),
            precision=artefact.manifest["inputs"]["precision"],
            key=self.service.store.key,
            planned_from="" if model is service.model else service.precision_origin,
            instead_of=artefact.id,
        )

    def _configured(self, artefact: Artefact) -> Model:
        """Return the model under the configured plan, with the repairs that a job found for the artefact's.

        The owner's plan has its own repairs. Rules have none, and what they leave in INT8 needs the repairs as before.
        """
        model = self.service.model
        if model.plan.repairs or model.plan.evidence or PLANNED_FROM not in artefact.manifest["inputs"]:
            return model
        repairs = PrecisionPlan.from_json(artefact.read_file("plan.json").decode()).repairs
        return model.with_plan(replace(model.plan, repairs=repairs)) if repairs else model


def reject(store: Store, identity: str, rollback: Mapping[str, Any]) -> None:
    """Remove an artefact that failed its probation; `refused/` keeps its verdict and the reason.

    An artefact that `current` or `previous` leads to stays. One that is not in the store is ignored.

    Args:
        rollback: Why it was taken back, in JSON's types.

    Raises EngineError:
        store.write          the disk refuses
        artefact.unreadable  the store cannot be read
    """
    path = next((place for place in store.places() if place.name == identity), None)
    if path is None or identity in [store.target(link) for link in LINKS]:
        return
    try:
        verdict = read_manifest(path, None).get("verdict")  # any signer's, because it is only kept for people
    except EngineError:
        verdict = None
    try:
        record_refusal(store.root, identity, {"rollback": dict(rollback), "verdict": verdict})
    except OSError as error:  # the artefact goes all the same
        log.warning("refusal=not_kept error=%r", error.strerror)
    store.discard(path)
