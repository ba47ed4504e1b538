"""A mean over frames, and the evidence for drift beside it, in a file that outlives the daemon.

Every frame and every block is written when it is seen, without forcing it to the disk: a killed process loses at most
the block that was not over, a power cut the last seconds. Once the file is long, what its frames add up to takes their
place: nothing is lost, however many they were. Only of a live camera is it taken up again: a recording that is played
once more is news.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from agent.common.errors import AgentError
from agent.common.state_files import Journal, understood
from engines.store.artefact import fingerprint

_SCHEMA = 2
_ROW = "row "
_LINES = 5000  # after which the file is written anew: hours at the normal pace, and less than a second to read


class Mean(Protocol):
    """What is remembered: one of agent/monitoring/estimates.py."""

    def start(self, since: float) -> None: ...

    def add(self, ts: float, value: float | None) -> None: ...

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True)
class RecalledEvidence:
    """drift: what `DriftMonitor.memory` gave, None before the first block. since: capture time of the latest start."""

    drift: Mapping[str, Any] | None
    since: float


def forget_others(
    state_dir: Path, names: Sequence[str], kept: Collection[Path], on_error: Callable[[AgentError], None]
) -> None:
    """Remove the files that EvidenceFile has kept in `state_dir` under these names, with any suffix, but for `kept`."""
    for path in (path for name in names for path in state_dir.glob(f"{name}*.jsonl")):
        if path in kept or not re.fullmatch(r"[a-z]+(-[0-9a-f]{12})?", path.stem):
            continue
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            found = f"{path}: {error.strerror}"
            on_error(AgentError("memory.write", found, "a writable state directory", "remove it, or set its rights"))


class EvidenceFile:
    """One engine at a time. A disk that refuses is told of once, and nothing is remembered until the next engine."""

    def __init__(self, path: Path, source: str, on_error: Callable[[AgentError], None]) -> None:
        """source: of the frames: what was seen elsewhere says nothing here. It may hold a password, and is not kept."""
        self._path = path
        self._identity = fingerprint({"schema": _SCHEMA, "source": source})
        self._on_error = on_error
        self._journal: Journal | None = None
        self._mean: Mean | None = None
        self._engine, self._since = "", 0.0
        self._next = 0  # number of the next row
        self._lines = 0

    def begin(self, engine: str, since: float, recall: bool, mean: Mean) -> RecalledEvidence | None:
        """Remember what `mean` takes while `engine` serves, which it does from capture time `since` on.

        The first call puts `mean` where another process left it. Where that was of the same engine, and is to be
        recalled, it goes on from there, and so does what is returned; else it is started.
        """
        first, self._mean = self._mean is None, mean
        with self._writing():
            if self._journal is None:
                self._journal = Journal(self._path, self._identity, "memory.write")
                self._lines = self._journal.size
        recalled = self._take_up(mean) if first else None
        if not recall or self._engine != engine:
            recalled = None
        if recalled is None:
            mean.start(since)
            self._engine, self._since = engine, since
        if self._journal is not None:
            with self._writing():
                if recalled is None:
                    self._journal.forget("drift")
                    self._journal.shorten()  # before the next engine is named: no kill may leave it with this drift
                self._put_mean(self._journal, mean)
        return recalled

    def block(self, drift: Mapping[str, Any]) -> None:
        """A block is over: what the drift monitor knows now."""
        self._put("drift", dict(drift))

    def frame(self, ts: float, value: float | None) -> None:
        """The mean has taken a frame."""
        self._put_row([ts, value])

    def starts(self, since: float) -> None:
        """The mean was started: what was observed before capture time `since` is of another scene."""
        self._since = since
        self._put_row([since])

    def _take_up(self, mean: Mean) -> RecalledEvidence | None:
        """What begins with another schema, or cannot be understood, is none."""
        journal = self._journal
        if journal is None:
            return None
        nothing = mean.state()
        recalled = understood(lambda: self._replay_all(journal, mean))
        if recalled is None:
            mean.restore(nothing)  # whatever was understood before what was not
            for key in [key for key, _ in journal.items()]:
                journal.forget(key)
        return recalled

    def _replay_all(self, journal: Journal, mean: Mean) -> RecalledEvidence:
        """Raises what `understood` takes for a file that no process has left."""
        kept = cast("Any", journal.get("mean"))
        rows = {_number(key.removeprefix(_ROW)): row for key, row in journal.items() if key.startswith(_ROW)}
        engine, first, self._since = str(kept["engine"]), _number(kept["next"]), _time(kept["since"])
        mean.restore(kept["state"])
        for number, row in sorted(rows.items()):
            if number >= first:
                self._replay(mean, cast("list[Any]", row))
        self._engine, self._next = engine, max([first, *(number + 1 for number in rows)])
        return RecalledEvidence(cast("Any", journal.get("drift")), self._since)

    def _replay(self, mean: Mean, row: list[Any]) -> None:
        ts, *values = _time(row[0]), *row[1:]
        if not values:
            self._since = ts
            mean.start(ts)
            return
        (value,) = values
        mean.add(ts, None if value is None else _share(value))

    def _put_row(self, row: list[float | None]) -> None:
        number, self._next = self._next, self._next + 1
        self._put(f"{_ROW}{number}", row)

    def _put(self, key: str, value: Any) -> None:
        if self._journal is None or self._mean is None:
            return
        with self._writing():
            self._journal.put(key, value)
            self._lines += 1
            if self._lines > _LINES:
                self._put_mean(self._journal, self._mean)

    def _put_mean(self, journal: Journal, mean: Mean) -> None:
        """What the rows add up to, in their place; after a kill in between, `next` says which of them it has."""
        kept: dict[str, Any] = {"engine": self._engine, "since": self._since, "next": self._next, "state": mean.state()}
        journal.put("mean", kept)
        for key in [key for key, _ in journal.items() if key.startswith(_ROW)]:
            journal.forget(key)
        journal.shorten()
        self._lines = journal.size

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except AgentError as error:
            self._journal = None
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # what is known there is old from now on
            self._on_error(error)


def _time(value: Any) -> float:
    """Raises ValueError, TypeError or OverflowError for what is no finite number."""
    if not math.isfinite(value):
        raise ValueError(f"{value!r} where a number was kept")
    return float(value)


def _share(value: Any) -> float:
    """Raises ValueError or TypeError for what lies outside [0, 1]: some means notice only later."""
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{value!r} where a value in [0, 1] was kept")
    return float(value)


def _number(value: Any) -> int:
    """Raises ValueError, TypeError or OverflowError for what numbers no row."""
    number = int(value)
    if not 0 <= number <= sys.maxsize:
        raise ValueError(f"{value!r} where a row was numbered")
    return number
