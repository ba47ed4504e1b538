"""Keep how a board has done over time: fidelity, drift and engine, for the report on its state.

A row each few seconds at first, in a file of bounded size, which is thinned: the last hours are fine, and the months
before them coarse. Rows are written as they come, without forcing them to the
disk: a power cut costs the last of them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, FiniteFloat, TypeAdapter, ValidationError

from agent.common.errors import AgentError
from agent.common.timing import thinned
from engines.store.files import read_regular, replace_files

FILE = "history.jsonl"
_SPACING_S = 5.0  # capture time between two rows
_MOST_ROWS = 2000  # 400 kB
_OWNER_ONLY = 0o600


def _three_or_none(figures: Sequence[float]) -> Sequence[float]:
    if len(figures) not in (0, 3):
        raise ValueError("estimate, low and high, or nothing")
    return figures


Figures = Annotated[Sequence[FiniteFloat], AfterValidator(_three_or_none)]


@dataclass(frozen=True)
class HistoryRow:
    """One camera at one moment.

    ts: capture time in s, Unix time for a live camera. engine: id of the artefact that serves, on probation too.
    is_int8: whether it has INT8. fidelity, accuracy: (estimate, low, high), empty where nothing was measured. drift:
    its state, empty without one. gain_db: what a recalibration would gain; gain: the same in fidelity, as (estimate,
    low, high).
    """

    ts: FiniteFloat
    camera: str
    engine: str
    is_int8: bool
    fidelity: Figures = ()
    accuracy: Figures = ()
    drift: str = ""
    gain_db: FiniteFloat | None = None
    gain: Figures = ()


_ROW = TypeAdapter(HistoryRow)


class History:
    """The file of a running daemon; one thread uses it. A disk that refuses is reported once."""

    def __init__(self, state_dir: Path, on_error: Callable[[AgentError], None], is_live: bool) -> None:
        """is_live: times are those of a clock, which may be set; else a time before the last is of another run."""
        self._path = state_dir / FILE
        self._on_error = on_error
        self._is_live = is_live
        rows = read_history(state_dir)
        self._count, self._last_ts = len(rows), rows[-1].ts if rows else math.nan
        self._has_failed = False
        self._is_cut = _ends_within_a_line(self._path)

    def is_due(self, ts: float) -> bool:
        """Return True if the next rows are to be added at capture time `ts`."""
        return not 0.0 <= ts - self._last_ts < _SPACING_S

    def add(self, ts: float, rows: Sequence[HistoryRow]) -> None:
        """Append the rows of one moment. Where a recording runs again, a new history begins."""
        text, is_again = "".join(map(_line, rows)), ts < self._last_ts and not self._is_live
        if self._is_cut and not is_again:
            text = f"\n{text}"
        self._count, self._last_ts = len(rows) + (0 if is_again else self._count), ts
        try:
            if is_again:
                replace_files({self._path: text.encode()}, mode=_OWNER_ONLY)
            else:
                with open(self._path, "a", encoding="utf-8", opener=_open_own) as file:
                    file.write(text)
            self._is_cut = False
            if self._count > _MOST_ROWS:
                self._thin()
        except OSError as error:
            if not self._has_failed:
                found, expected = f"{self._path}: {error.strerror or error}", "a disk with room for the history"
                remedy = "free some space; the history then continues"
                self._on_error(AgentError("state.write", found, expected, remedy))
            self._has_failed = True

    def _thin(self) -> None:
        kept = thinned(read_history(self._path.parent), _MOST_ROWS)
        replace_files({self._path: "".join(map(_line, kept)).encode()}, mode=_OWNER_ONLY)
        self._count = len(kept)


def _open_own(path: str, flags: int) -> int:
    """Open a file for its owner alone; a pipe in its place is an error, and does not block. Raises OSError."""
    return os.open(path, flags | os.O_NONBLOCK, _OWNER_ONLY)


def _ends_within_a_line(path: Path) -> bool:
    """Return True for a file whose last row a power cut has cut: the next one would be lost with it."""
    try:
        content = read_regular(path)
    except OSError:
        return False
    return bool(content) and not content.endswith(b"\n")


def read_history(state_dir: Path) -> list[HistoryRow]:
    """Return the rows that a daemon has kept, the oldest first; rows that cannot be read are left out."""
    try:
        lines = read_regular(state_dir / FILE).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines[-2 * _MOST_ROWS :]:
        with suppress(ValidationError):
            rows.append(_ROW.validate_json(line, strict=True))  # the keys of a newer tared are ignored
    return rows


def _line(row: HistoryRow) -> str:
    kept: Mapping[str, Any] = {name: value for name, value in asdict(row).items() if value not in ("", None, ())}
    return json.dumps(kept) + "\n"
