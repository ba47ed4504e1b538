"""Fidelity below what the owner accepts, though the scales fit the scene: then INT8 itself is what costs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.config import Config
from agent.errors import AgentError
from agent.findings import ObserverState
from agent.raising import EXHAUSTED
from agent.state_file import StateFile
from calibrate.errors import TaredError

_SCHEMA = 1
_MOST = 100  # artefacts
# What tells of a candidate: by its verdict, as its child compared it, or on probation.
_REFUSED = (
    *(f"recalibration.{reason}" for reason in ("refused", "deadline", "crash")),
    *(f"probation.{reason}" for reason in ("fidelity", "latency", "output", "error", "hang")),
)
_RECALLED = "probation.recalled"
_ENOUGH = 128  # frames: two minutes at the usual pace


def is_low(state: ObserverState, config: Config) -> bool:
    """Whether what serves loses more than `recalibration.max_loss`, with 95 % confidence, and no recalibration helps.

    As many frames have to say so as make a calibration, or 128: neighbours are right and wrong together.
    """
    drift, settled = state.drift, state.settled.interval
    scales_fit = drift is not None and drift.state == "calm" and drift.serving_db <= config.drift.tolerance_db
    sees = not state.outage and not state.view.trouble
    enough = settled.n >= min(config.calibration.frames, _ENOUGH)
    return scales_fit and sees and enough and settled.high < 1.0 - config.recalibration.max_loss


class Attempts:
    """What was tried in vain, by the artefact whose fidelity it was for, and what is not to be tried.

    It holds as long as the owner's word is the same, in the file at `path` over restarts too, for the last hundred
    artefacts. A file of another word, or one that cannot be understood, is begun anew.
    """

    def __init__(self, path: Path | None, origin: str, on_error: Callable[[AgentError], None]) -> None:
        """path: None keeps nothing over a restart, as for a recording. origin: the owner's word, of `Service`.

        Raises AgentError (`attempts.schema`) for the file of a newer tared.
        """
        self._origin = origin
        self._file = StateFile(path, _SCHEMA, "attempts.write", on_error)
        # How many candidates were refused; None where there is to be no other. The latest is the last.
        self._refused: dict[str, int | None] = self._file.read(self._take) or {}

    def next_rung(self, artefact: str) -> int:
        """What to try next for it, as in `Raising`; 0 where nothing is left to try, or nothing to be tried."""
        refused = self._refused.get(artefact, 0)
        return 0 if refused is None else refused + 1

    def failed(self, artefact: str, error: TaredError) -> None:
        """An attempt ended with this error.

        Only what was refused, by its verdict or for what it did, and that nothing is left, tell of precision: a full
        disk, a child that was killed, or a job that took too long do not, and it is tried again as it was. What the
        operator took back on probation is forbidden.
        """
        refused = self._refused.get(artefact, 0)
        if error.code in (EXHAUSTED, _RECALLED):
            self._note(artefact, None)
        elif error.code in _REFUSED and refused is not None:
            self._note(artefact, refused + 1)

    def forbid(self, artefact: str) -> None:
        """Precision was raised for it, and the operator took that back: not again, and no further."""
        self._note(artefact, None)

    def _note(self, artefact: str, refused: int | None) -> None:
        self._refused.pop(artefact, None)
        self._refused[artefact] = refused
        self._refused = dict(list(self._refused.items())[-_MOST:])
        self._file.write({"origin": self._origin, "refused": self._refused})

    def _take(self, document: Mapping[str, Any]) -> dict[str, int | None]:
        """Raises KeyError, TypeError, ValueError for what `_note` has not written, and for another word's."""
        rows = list(document["refused"].items())[-_MOST:]
        if document["origin"] != self._origin or not all(each is None or each > 0 for _, each in rows):
            raise ValueError("attempts of another word, or that nobody made")
        return {artefact: None if each is None else int(each) for artefact, each in rows}
