"""Load the engine of the regime that is expected next, before it is needed.

Dusk comes at nearly the same time every day. `SwitchTimes` remembers when regimes changed; `WarmRegime` loads the
engine that was switched to at about this time on three of the last seven days, and runs it once. Nothing is switched:
the switch still asks the evidence, and then finds the engine warm.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from agent.common.errors import AgentError
from agent.common.state_files import StateFile, finite
from agent.models.engine_service import EngineService, LoadedEngine
from calibrate.errors import TaredError

_SCHEMA = 1
_DAY_S = 86_400.0
_DAYS, _ENOUGH_DAYS = 7, 3
_AHEAD_S, _LATE_S = 900.0, 1800.0  # before and after the usual time of day, in which a switch is expected
_MOST_SWITCHES = 256
_CHECK_S = 30.0


class SwitchTimes:
    """The times at which regimes were switched to, in a file; damage costs the memory alone."""

    def __init__(self, path: Path | None, on_error: Callable[[AgentError], None]) -> None:
        """path: None keeps nothing. Raises AgentError (`switches.schema`) for the file of a newer tared."""
        self._file = StateFile(path, _SCHEMA, "switches.write", on_error)
        self._switches: list[tuple[str, float]] = self._file.read(_parse) or []

    def note(self, artefact: str, now_s: float) -> None:
        """Note a switch to this artefact at Unix time `now_s`."""
        recent = [(known, at_s) for known, at_s in self._switches if abs(now_s - at_s) <= _DAYS * _DAY_S]
        self._switches = [*recent, (artefact, now_s)][-_MOST_SWITCHES:]
        self._file.write({"switches": [list(each) for each in self._switches]})

    def expected(self, now_s: float, among: Collection[str]) -> str:
        """Return the artefact that is likely to be switched to about now, of those that are known; else empty.

        Days are counted by the clock's, so a switch that flickers counts once a day.
        """
        days: dict[str, set[int]] = defaultdict(set)
        for artefact, at_s in self._switches:
            days_ago = round((now_s - at_s) / _DAY_S)
            late_s = now_s - at_s - days_ago * _DAY_S
            if artefact in among and 0 < days_ago <= _DAYS and -_AHEAD_S <= late_s <= _LATE_S:
                days[artefact].add(days_ago)
        artefact = max(days, key=lambda each: len(days[each]), default="")
        return artefact if len(days[artefact]) >= _ENOUGH_DAYS else ""


def _parse(document: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(str(artefact), finite(at_s)) for artefact, at_s in document["switches"]]


class WarmRegime:
    """The loaded engine of the expected regime, if there is memory for it. The supervisor's thread uses it."""

    def __init__(
        self,
        service: EngineService,
        times: SwitchTimes,
        least_memory_bytes: int | None,
        on_error: Callable[[TaredError], None],
    ) -> None:
        """Args:
        least_memory_bytes: Memory that has to be available before an engine is loaded; None: it is not checked.
        on_error: Called with the error of an artefact that cannot be loaded, once for each time it is expected.
        """
        self._service = service
        self._times = times
        self._least_memory_bytes = least_memory_bytes
        self._on_error = on_error
        self._loaded: LoadedEngine | None = None
        self._tried = ""  # of what is expected now: loaded, or not to be had
        self._next_s = 0.0  # monotonic

    @property
    def artefact(self) -> str:
        """The artefact whose engine is warm; empty for none."""
        return self._loaded.artefact.id if self._loaded is not None else ""

    def tick(self, now_s: float, known: Collection[str]) -> None:
        """Load what is expected at Unix time `now_s`, and drop what no longer is. known: the regimes' artefacts."""
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + _CHECK_S
        expected = self._times.expected(now_s, [each for each in known if each != self._service.serving.id])
        if expected == self._tried:
            return
        self.drop()
        if expected and self._has_memory():
            self._tried = expected
            try:
                self._loaded = self._load(expected)
            except TaredError as error:
                self._on_error(error)

    def take(self, artefact: str) -> LoadedEngine | None:
        """Return the warm engine if it is of this artefact; the caller owns it."""
        if self.artefact != artefact:
            return None
        loaded, self._loaded, self._tried = self._loaded, None, ""
        return loaded

    def drop(self) -> None:
        """Free the engine, which nobody needs now."""
        if self._loaded is not None:
            self._loaded.engine.close()
        self._loaded, self._tried = None, ""

    def _has_memory(self) -> bool:
        return self._least_memory_bytes is None or psutil.virtual_memory().available >= self._least_memory_bytes

    def _load(self, artefact: str) -> LoadedEngine:
        loaded = self._service.load(self._service.store.find(artefact))
        try:
            loaded.engine.infer(np.zeros(self._service.model.input_shape, loaded.engine.inputs[0].dtype))
        except BaseException:
            loaded.engine.close()
            raise
        return loaded
