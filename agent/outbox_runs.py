"""Numbers of the outbox that will not come, in SQLite: runs of them in an epoch, counted by kind."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

Key = tuple[int, int]  # epoch, seq
START: Key = (0, 0)  # before every number
_END: Key = (2**63 - 1, 2**63 - 1)
_RUN_BYTES = 30  # in the file, without its counts


@dataclass(frozen=True)
class Run:
    """Numbers of an epoch, from first to last, that will not come. counts: how many, by kind."""

    epoch: int
    first: int
    last: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.epoch, self.first

    @property
    def upto(self) -> Key:
        """The greatest number that is told with it."""
        return self.epoch, self.last

    @property
    def ends(self) -> tuple[int, int, int]:
        """What tells it from what it becomes with a neighbour."""
        return self.epoch, self.first, self.last


class Runs:
    """Everything that is asked of them; the caller's transactions, and one thread's.

    grown: all that were added, or have grown, since somebody set it to None, come after this key.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.grown: Key | None = None
        self._db = db

    def add(self, epoch: int, first: int, last: int, counts: Mapping[str, int]) -> None:
        """Numbers that will not come; with their neighbours among the runs they make one."""
        beside = self._db.execute(
            "SELECT first, last, counts FROM runs WHERE epoch = ? AND last >= ? AND first <= ?",
            (epoch, first - 1, last + 1),
        ).fetchall()
        total = Counter(counts)
        for other_first, other_last, other_counts in beside:
            first, last = min(first, other_first), max(last, other_last)
            total += Counter(json.loads(other_counts))
        self._db.executemany("DELETE FROM runs WHERE epoch = ? AND first = ?", [(epoch, run[0]) for run in beside])
        self._db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, 0)", (epoch, first, last, json.dumps(total)))
        before = epoch, first - 1
        self.grown = before if self.grown is None else min(self.grown, before)

    def due(self, after: Key, limit: int, upto: Key = _END) -> list[Run]:
        """What the broker has not acknowledged, with keys beyond `after`, up to `upto`, in their order."""
        found = self._db.execute(
            "SELECT epoch, first, last, counts FROM runs WHERE (epoch, first) > (?, ?) AND (epoch, first) <= (?, ?) "
            "AND sent = 0 ORDER BY epoch, first LIMIT ?",
            (*after, *upto, limit),
        )
        return [Run(epoch, first, last, json.loads(counts)) for epoch, first, last, counts in found]

    def sent(self, runs: Iterable[Run]) -> None:
        """The broker has acknowledged these."""
        which = "epoch = ? AND first = ? AND last = ?"
        self._db.executemany(f"UPDATE runs SET sent = 1 WHERE {which}", [run.ends for run in runs])

    def gone(self, runs: Iterable[Run]) -> None:
        """These have arrived where they were meant to."""
        which = "epoch = ? AND first = ? AND last = ?"
        self._db.executemany(f"DELETE FROM runs WHERE {which}", [run.ends for run in runs])

    def forget_epochs(self, going_on: int, size_bytes: int) -> int:
        """Where epochs of which there are runs alone take more than so much, forget the oldest until the rest take half
        of it; how many runs that were. going_on: an epoch that is not forgotten.

        Of an epoch that nothing more will come of, nobody misses them: a collector waits for what comes after a hole.
        """
        alone = "epoch <> ? AND NOT EXISTS (SELECT 1 FROM rows WHERE rows.epoch = runs.epoch)"
        sizes = self._db.execute(
            f"SELECT epoch, sum(length(counts) + ?) FROM runs WHERE {alone} GROUP BY epoch ORDER BY epoch DESC",
            (_RUN_BYTES, going_on),
        )
        total, newest = 0, 0
        for epoch, size in sizes:
            total += size
            if not newest and total > size_bytes // 2:
                newest = epoch
        if total <= size_bytes:
            return 0
        return self._db.execute(f"DELETE FROM runs WHERE epoch <= ? AND {alone}", (newest, going_on)).rowcount
