"""Numbers of the outbox that will not come, in SQLite: runs of them in an epoch, counted by kind."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.common.database import Database

Key = tuple[int, int]  # epoch, seq
START: Key = (0, 0)  # before every number
_END: Key = (2**63 - 1, 2**63 - 1)
_RUN_BYTES = 30  # in the file, without its counts


@dataclass(frozen=True)
class DroppedRange:
    """Numbers of an epoch, from first to last, that will not come. counts: how many, by kind."""

    epoch: int
    first: int
    last: int
    counts: Mapping[str, int] = field(default_factory=dict)

    @property
    def key(self) -> Key:
        return self.epoch, self.first

    @property
    def last_key(self) -> Key:
        """The greatest number that is told with it."""
        return self.epoch, self.last

    @property
    def identity(self) -> tuple[int, int, int]:
        """What tells it from what it becomes with a neighbour."""
        return self.epoch, self.first, self.last


class DroppedRanges:
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

    def due(self, after: Key, limit: int, upto: Key = _END) -> list[DroppedRange]:
        """What the broker has not acknowledged, with keys beyond `after`, up to `last_key`, in their order."""
        found = self._db.execute(
            "SELECT epoch, first, last, counts FROM runs WHERE (epoch, first) > (?, ?) AND (epoch, first) <= (?, ?) "
            "AND sent = 0 ORDER BY epoch, first LIMIT ?",
            (*after, *upto, limit),
        )
        return [DroppedRange(epoch, first, last, json.loads(counts)) for epoch, first, last, counts in found]

    def mark_sent(self, runs: Iterable[DroppedRange]) -> None:
        """The broker has acknowledged these."""
        which = "epoch = ? AND first = ? AND last = ?"
        self._db.executemany(f"UPDATE runs SET sent = 1 WHERE {which}", [run.identity for run in runs])

    def remove(self, runs: Iterable[DroppedRange]) -> None:
        """These have arrived where they were meant to."""
        which = "epoch = ? AND first = ? AND last = ?"
        self._db.executemany(f"DELETE FROM runs WHERE {which}", [run.identity for run in runs])

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


# Ranks: when the outbox is full, rows of the lowest rank are dropped first.
SAMPLE = 0
EVENT = 1
ALARM = 2
_MIGRATIONS = (
    """
    CREATE TABLE rows (
        place INTEGER PRIMARY KEY,
        epoch INTEGER NOT NULL,
        seq INTEGER NOT NULL,
        kind TEXT NOT NULL,
        rank INTEGER NOT NULL,
        wall REAL NOT NULL,
        sent INTEGER NOT NULL,
        payload BLOB NOT NULL,
        UNIQUE (epoch, seq)
    );
    CREATE TABLE runs (
        epoch INTEGER NOT NULL,
        first INTEGER NOT NULL,
        last INTEGER NOT NULL,
        counts TEXT NOT NULL,
        sent INTEGER NOT NULL,
        PRIMARY KEY (epoch, first)
    ) WITHOUT ROWID;
    CREATE INDEX rows_by_rank ON rows (rank, epoch, seq);
    CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
    """,
)
# One fsync for a commit, and what is committed survives a power cut; the log stays small.
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 100", "journal_size_limit = 1000000")
_DROPPED_AT_ONCE = 20  # rows, before it is looked again what all takes
_COLUMNS = {"rows": "epoch, seq, kind, rank, wall, sent, payload", "runs": "epoch, first, last, counts, sent"}


@dataclass(frozen=True)
class OutboxRow:
    """A numbered message. kind: telemetry, or the event's. rank: one of the above. wall: Unix time it is of, in s."""

    epoch: int
    seq: int
    kind: str
    rank: int
    wall: float
    payload: bytes

    @property
    def key(self) -> Key:
        return self.epoch, self.seq

    @property
    def last_key(self) -> Key:
        """The greatest number that is told with it."""
        return self.key


def database(path: Path) -> Database:
    """The file that keeps them."""
    holds, loss = "what waits for the fleet's collector", "what nobody had collected yet is lost"
    return Database(path, "outbox", holds, loss, _MIGRATIONS, _PRAGMAS)


def in_memory() -> sqlite3.Connection:
    """What stands in for the file while the disk refuses."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.executescript(_MIGRATIONS[0])
    return db


class OutboxTable:
    """Everything that is asked of the rows and the `ranges` among them; the caller's transactions, and one thread's."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.ranges = DroppedRanges(db)

    def add(self, rows: Iterable[OutboxRow]) -> None:
        """New ones, which nobody has been sent."""
        values = [(row.epoch, row.seq, row.kind, row.rank, row.wall, row.payload) for row in rows]
        self.db.executemany(
            "INSERT INTO rows (epoch, seq, kind, rank, wall, sent, payload) VALUES (?, ?, ?, ?, ?, 0, ?)", values
        )

    def due(self, after: Key, limit: int) -> list[OutboxRow | DroppedRange]:
        """What the broker has not acknowledged, with numbers beyond `after`, in their order."""
        found = self.db.execute(
            "SELECT epoch, seq, kind, rank, wall, payload FROM rows "
            "WHERE (epoch, seq) > (?, ?) AND sent = 0 ORDER BY epoch, seq LIMIT ?",
            (*after, limit),
        )
        due: list[OutboxRow | DroppedRange] = [OutboxRow(*values) for values in found]
        return sorted([*due, *self.ranges.due(after, limit)], key=lambda each: each.key)[:limit]

    def mark_sent(self, rows: Iterable[OutboxRow]) -> None:
        """The broker has acknowledged these."""
        self.db.executemany("UPDATE rows SET sent = 1 WHERE epoch = ? AND seq = ?", [row.key for row in rows])

    def remove(self, rows: Iterable[OutboxRow]) -> None:
        """These have arrived where they were meant to."""
        self.db.executemany("DELETE FROM rows WHERE epoch = ? AND seq = ?", [row.key for row in rows])

    def forget(self, epoch: int, upto: int) -> None:
        """All of an epoch up to a number."""
        self.db.execute("DELETE FROM rows WHERE epoch = ? AND seq <= ?", (epoch, upto))
        self.db.execute("DELETE FROM runs WHERE epoch = ? AND last <= ?", (epoch, upto))

    def mark_all_due(self) -> None:
        """All are due again."""
        for table in ("rows", "runs"):
            self.db.execute(f"UPDATE {table} SET sent = 0 WHERE sent = 1")

    def oldest_seq(self, epoch: int) -> int | None:
        """The least number of an epoch that is still there, also of a run; None without one."""
        found = self.db.execute(
            "SELECT min(number) FROM (SELECT min(seq) AS number FROM rows WHERE epoch = ? "
            "UNION ALL SELECT min(first) FROM runs WHERE epoch = ?)",
            (epoch, epoch),
        ).fetchone()[0]
        return int(found) if found is not None else None

    def oldest_key(self) -> Key | None:
        """The least number of all rows."""
        return self.db.execute("SELECT epoch, seq FROM rows ORDER BY epoch, seq LIMIT 1").fetchone()  # type: ignore[no-any-return]  # sqlite3 knows no types

    def last_epoch(self) -> int:
        """The greatest one that anything is of; 0 without."""
        (found,) = self.db.execute(
            "SELECT max(coalesce((SELECT max(epoch) FROM rows), 0), coalesce((SELECT max(epoch) FROM runs), 0))"
        ).fetchone()
        return int(found)

    def size_bytes(self) -> int:
        """What all of this takes, as pages that are in use."""
        pages, free, size = (
            self.db.execute(f"PRAGMA {of}").fetchone()[0] for of in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def drop_oldest(self, size_bytes: int) -> Counter[str]:
        """Samples before news before alarms, the oldest first, until so much is left; what went, by kind."""
        dropped: Counter[str] = Counter()
        while self.size_bytes() > size_bytes:
            lowest = "SELECT epoch, seq, kind FROM rows WHERE rank = (SELECT min(rank) FROM rows)"
            going = self.db.execute(f"{lowest} ORDER BY epoch, seq LIMIT ?", (_DROPPED_AT_ONCE,)).fetchall()
            if not going:
                break
            dropped += self._drop(going)
        return dropped

    def drop(self, rows: Iterable[OutboxRow]) -> Counter[str]:
        """These; what went, by kind."""
        return self._drop([(row.epoch, row.seq, row.kind) for row in rows])

    def drop_older(self, wall: float) -> Counter[str]:
        """What is of a time before `wall`; what went, by kind."""
        going = self.db.execute(
            "SELECT epoch, seq, kind FROM rows WHERE wall < ? ORDER BY epoch, seq", (wall,)
        ).fetchall()
        return self._drop(going)

    def shift_dates(self, upto_wall: float, by_s: float) -> None:
        """The clock was wrong until `upto_wall`, by so many seconds."""
        self.db.execute("UPDATE rows SET wall = wall + ? WHERE wall <= ?", (by_s, upto_wall))

    def set_missing_dates(self, before_wall: float, wall: float) -> None:
        """What is dated before `before_wall` is of `wall`."""
        self.db.execute("UPDATE rows SET wall = ? WHERE wall < ?", (wall, before_wall))

    def fact(self, name: str) -> int:
        """A number that was kept, 0 where it was not."""
        found = self.db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return int(found[0]) if found is not None else 0

    def keep_fact(self, name: str, value: int) -> None:
        """A number that only grows."""
        keep = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)"
        self.db.execute(keep, (name, value))

    def copy_to(self, other: OutboxTable) -> None:
        """All rows and runs."""
        for table, columns in _COLUMNS.items():
            content = self.db.execute(f"SELECT {columns} FROM {table}").fetchall()
            places = ", ".join("?" * (columns.count(",") + 1))
            other.db.executemany(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({places})", content)

    def _drop(self, going: Sequence[tuple[int, int, str]]) -> Counter[str]:
        """Put runs in the place of rows."""
        dropped: Counter[str] = Counter()
        for epoch, seq, kind in going:
            self.db.execute("DELETE FROM rows WHERE epoch = ? AND seq = ?", (epoch, seq))
            self.ranges.add(epoch, seq, seq, {kind: 1})
            dropped[kind] += 1
        return dropped
