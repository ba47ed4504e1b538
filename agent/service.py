"""Which engine serves: chosen at the start, exchanged between two frames, remembered in the store."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from agent.build import Model, build_artefact, check_calibration
from calibrate.errors import TaredError
from engines.backend import Backend, Engine
from engines.calibration import Calibration, load_calibration
from engines.store import Artefact, Store

log = logging.getLogger(__name__)


class Service:
    """The artefacts of one model on one backend, and the one in service.

    Without a calibrated artefact the float reference serves: the camera is never blind, the state is degraded.
    """

    def __init__(self, model: Model, backend: Backend, store: Store) -> None:
        self.model = model
        self._backend = backend
        self._store = store
        self.serving: Artefact
        self.calibration: Calibration | None = None

    @property
    def degraded(self) -> bool:
        """Whether the reference serves."""
        return self.calibration is None

    @property
    def calibrated_path(self) -> Path | None:
        """The artefact in service, None for the reference."""
        return None if self.degraded else self.serving.path

    def start(self, on_error: Callable[[TaredError], None]) -> Engine:
        """Load `current`, or else `previous`, or else the reference; each that cannot serve goes to on_error."""
        for link in ("current", "previous"):
            try:
                artefact = self._store.read(link)
                if artefact is None:
                    continue
                engine, self.calibration = self.load(artefact)
                self.serving = artefact
                return engine
            except TaredError as error:
                on_error(error)
        precision = self._backend.precisions[0]
        self.serving = build_artefact(
            self.model, self._backend, self._store.place, lambda *_: None, calibration=None, precision=precision
        )
        return self._backend.load(self.serving.engine_path)

    def load(self, artefact: Artefact) -> tuple[Engine, Calibration]:
        """An artefact's engine and calibration. Raises EngineError, and CalibrationError for another model's."""
        calibration = load_calibration(artefact.path / "calibration.json")
        check_calibration(self.model, calibration)
        return self._backend.load(artefact.engine_path), calibration

    def previous(self) -> Artefact | None:
        """The artefact before the current one."""
        return self._store.read("previous")

    def commit(self, artefact: Artefact, calibration: Calibration) -> None:
        """The artefact has served its first frame: it is what serves, and becomes current in the store.

        Raises EngineError (`store.write`) when the store cannot be changed; it serves all the same.
        """
        self.serving, self.calibration = artefact, calibration
        self._store.promote(artefact)
