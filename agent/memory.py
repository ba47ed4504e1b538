"""What the observer has found about the engine in service, in a file that outlives the daemon.

Every block and every frame is written when it is seen, without forcing it to the disk: a killed process loses at most
the block that was not over, a power cut the last seconds. Only of a live camera is it taken up again: a recording that
is played once more is news.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from agent.errors import AgentError
from agent.journal import Journal
from engines.store import fingerprint

_FRAMES = 5000  # whose fidelity is remembered: ten hours at one in seven seconds
_LINES = 20_000  # some megabytes, a day of blocks, after which the file is written anew


@dataclass(frozen=True)
class Recalled:
    """drift: what `DriftMonitor.memory` gave, None before the first block.

    fidelity: capture times and values, None for an empty frame, of frames from capture time `since` on.
    """

    drift: Mapping[str, Any] | None = None
    since: float | None = None
    fidelity: tuple[tuple[float, float | None], ...] = ()


class Memory:
    """One engine at a time. A disk that refuses is told of once, and nothing is remembered from there on."""

    def __init__(self, path: Path, source: str, on_error: Callable[[AgentError], None]) -> None:
        """source: of the frames: what was seen elsewhere says nothing here. It may hold a password, and is not kept."""
        self._path = path
        self._source = source
        self._on_error = on_error
        self._journal: Journal | None = None
        self._first = self._next = 0  # of the frames remembered
        self._lines = 0

    def begin(self, identity: str, recall: bool) -> Recalled:
        """Remember an engine from now on; what is known of the same identity is recalled, or forgotten if not asked."""
        self._journal, self._first, self._next = None, 0, 0
        with self._writing():
            if not recall:
                self._remove()
            self._journal = Journal(
                self._path, fingerprint({"engine": identity, "source": self._source}), "memory.write"
            )
            self._lines = self._journal.size
        return self._recalled() if self._journal is not None else Recalled()

    def block(self, drift: Mapping[str, Any]) -> None:
        """A block is over: what the drift monitor knows now."""
        self._put("drift", dict(drift))

    def frame(self, ts: float, fidelity: float | None) -> None:
        """A frame was observed."""
        self._put(f"frame {self._next}", [ts, fidelity])
        self._next += 1
        if self._next - self._first > 2 * _FRAMES:
            self._forget(self._next - _FRAMES)

    def fidelity_starts(self, since: float) -> None:
        """What was observed before capture time `since` is of another engine, or of another scene."""
        self._put("since", since)
        self._forget(self._next)

    def _recalled(self) -> Recalled:
        journal = self._journal
        assert journal is not None
        rows = {int(key.split()[1]): cast("Any", row) for key, row in journal.items() if key.startswith("frame ")}
        self._first, self._next = min(rows, default=0), max(rows, default=-1) + 1
        frames = tuple((ts, value) for _, (ts, value) in sorted(rows.items()))
        return Recalled(cast("Any", journal.get("drift")), cast("Any", journal.get("since")), frames)

    def _put(self, key: str, value: Any) -> None:
        if self._journal is None:
            return
        with self._writing():
            self._journal.put(key, value)
            self._lines += 1
            if self._lines > _LINES:
                self._journal.shorten()
                self._lines = self._journal.size

    def _forget(self, before: int) -> None:
        if self._journal is None:
            return
        with self._writing():
            for number in range(self._first, before):
                self._journal.forget(f"frame {number}")
            self._first = before
            self._journal.shorten()
            self._lines = self._journal.size

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except AgentError as error:
            self._journal = None
            with suppress(AgentError):
                self._remove()  # what is known there is old from now on
            self._on_error(error)

    def _remove(self) -> None:
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            found = f"{self._path}: {error.strerror}"
            raise AgentError("memory.write", found, "a writable state directory", "make room, or its rights") from error
