"""Store the outbox's rows and dropped ranges in SQLite.

`OutboxTable` holds numbered messages, `DroppedRanges` the ranges of numbers that will not come. Every number of an
epoch is in one of the two, until its receiver has confirmed it. The caller owns the transactions; the outbox's thread
is the only user. The table names in the file are `rows`, `runs` (the ranges) and `facts`.
"""

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

# Ranks: when the outbox is full, rows of the lowest rank are dropped first.
SAMPLE = 0
EVENT = 1
ALARM = 2

_RANGE_BYTES = 30  # of a range in the file, without its counts
_DROPPED_AT_ONCE = 20  # rows, before the size is measured again
_COLUMNS = {"rows": "epoch, seq, kind, rank, wall, sent, payload", "runs": "epoch, first, last, counts, sent"}
# One fsync for a commit, and what is committed survives a power cut; the log stays small.
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 100", "journal_size_limit = 1000000")
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


def database(path: Path) -> Database:
    """Return the file that keeps the tables."""
    holds, loss = "what waits for the fleet's collector", "what nobody had collected yet is lost"
    return Database(path, "outbox", holds, loss, _MIGRATIONS, _PRAGMAS)


def in_memory() -> sqlite3.Connection:
    """Return empty tables in memory, which replace the file while the disk refuses."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.executescript(_MIGRATIONS[0])
    return db


@dataclass(frozen=True)
class OutboxRow:
    """A numbered message.

    Args:
        epoch: The start of the daemon that it belongs to.
        seq: Its number in the epoch, from 1.
        kind: `telemetry`, or the event's kind.
        rank: SAMPLE, EVENT or ALARM.
        wall: Unix time in s at which it was put.
        payload: The document.
    """

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
        """The greatest number that its message covers."""
        return self.key


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
        """The greatest number that its messages cover."""
        return self.epoch, self.last

    @property
    def identity(self) -> tuple[int, int, int]:
        """Identifies this exact range; it differs from the range that results when a neighbour is merged into it."""
        return self.epoch, self.first, self.last


Parcel = OutboxRow | DroppedRange  # what the broker is sent, and acknowledges, as one


class OutboxTable:
    """The rows of one database, and the dropped `ranges` between them."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.ranges = DroppedRanges(db)

    def add(self, rows: Iterable[OutboxRow]) -> None:
        """Insert new rows, which nobody has been sent."""
        values = [(row.epoch, row.seq, row.kind, row.rank, row.wall, row.payload) for row in rows]
        self.db.executemany(
            "INSERT INTO rows (epoch, seq, kind, rank, wall, sent, payload) VALUES (?, ?, ?, ?, ?, 0, ?)", values
        )

    def due(self, after: Key, limit: int) -> list[Parcel]:
        """Return rows and ranges beyond `after` that the broker has not acknowledged, in order."""
        rows = self.db.execute(
            "SELECT epoch, seq, kind, rank, wall, payload FROM rows "
            "WHERE (epoch, seq) > (?, ?) AND sent = 0 ORDER BY epoch, seq LIMIT ?",
            (*after, limit),
        )
        due: list[Parcel] = [OutboxRow(*values) for values in rows]
        return sorted([*due, *self.ranges.due(after, limit)], key=lambda each: each.key)[:limit]

    def mark_sent(self, parcels: Sequence[Parcel]) -> None:
        """Note that the broker has acknowledged these; a collector has yet to confirm them."""
        self._change("UPDATE {table} SET sent = 1", parcels)

    def remove(self, parcels: Sequence[Parcel]) -> None:
        """Delete parcels that have arrived."""
        self._change("DELETE FROM {table}", parcels)

    def _change(self, statement: str, parcels: Sequence[Parcel]) -> None:
        rows = [each.key for each in parcels if isinstance(each, OutboxRow)]
        ranges = [each.identity for each in parcels if isinstance(each, DroppedRange)]
        self.db.executemany(f"{statement.format(table='rows')} WHERE epoch = ? AND seq = ?", rows)
        self.db.executemany(f"{statement.format(table='runs')} WHERE epoch = ? AND first = ? AND last = ?", ranges)

    def forget(self, epoch: int, upto: int) -> None:
        """Delete everything of an epoch up to a number."""
        self.db.execute("DELETE FROM rows WHERE epoch = ? AND seq <= ?", (epoch, upto))
        self.db.execute("DELETE FROM runs WHERE epoch = ? AND last <= ?", (epoch, upto))

    def mark_all_due(self) -> None:
        """Make due again what only the broker has acknowledged."""
        for table in ("rows", "runs"):
            self.db.execute(f"UPDATE {table} SET sent = 0 WHERE sent = 1")

    def oldest_seq(self, epoch: int) -> int | None:
        """Return the smallest number of an epoch that is still here, also of a range; None without one."""
        smallest = self.db.execute(
            "SELECT min(number) FROM (SELECT min(seq) AS number FROM rows WHERE epoch = ? "
            "UNION ALL SELECT min(first) FROM runs WHERE epoch = ?)",
            (epoch, epoch),
        ).fetchone()[0]
        return int(smallest) if smallest is not None else None

    def oldest_key(self) -> Key | None:
        """Return the smallest key of all rows."""
        return self.db.execute("SELECT epoch, seq FROM rows ORDER BY epoch, seq LIMIT 1").fetchone()  # type: ignore[no-any-return]  # sqlite3 knows no types

    def last_epoch(self) -> int:
        """Return the greatest epoch of any row or range; 0 without one."""
        (epoch,) = self.db.execute(
            "SELECT max(coalesce((SELECT max(epoch) FROM rows), 0), coalesce((SELECT max(epoch) FROM runs), 0))"
        ).fetchone()
        return int(epoch)

    def size_bytes(self) -> int:
        """Return the size of the pages in use."""
        pages, free, size = (
            self.db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    def drop_oldest(self, size_bytes: int) -> Counter[str]:
        """Drop samples before events before alarms, the oldest first, until so much is left; return counts by kind."""
        dropped: Counter[str] = Counter()
        while self.size_bytes() > size_bytes:
            lowest = "SELECT epoch, seq, kind FROM rows WHERE rank = (SELECT min(rank) FROM rows)"
            keys = self.db.execute(f"{lowest} ORDER BY epoch, seq LIMIT ?", (_DROPPED_AT_ONCE,)).fetchall()
            if not keys:
                break
            dropped += self._drop(keys)
        return dropped

    def drop_older(self, wall: float) -> Counter[str]:
        """Drop rows dated before `wall`; return counts by kind."""
        return self._drop(
            self.db.execute("SELECT epoch, seq, kind FROM rows WHERE wall < ? ORDER BY epoch, seq", (wall,)).fetchall()
        )

    def drop(self, rows: Iterable[OutboxRow]) -> Counter[str]:
        """Drop these rows; return counts by kind."""
        return self._drop([(row.epoch, row.seq, row.kind) for row in rows])

    def _drop(self, keys: Sequence[tuple[int, int, str]]) -> Counter[str]:
        """Replace rows by dropped ranges."""
        dropped: Counter[str] = Counter()
        for epoch, seq, kind in keys:
            self.db.execute("DELETE FROM rows WHERE epoch = ? AND seq = ?", (epoch, seq))
            self.ranges.add(epoch, seq, seq, {kind: 1})
            dropped[kind] += 1
        return dropped

    def shift_dates(self, upto_wall: float, by_s: float) -> None:
        """Add `by_s` to all dates up to `upto_wall`: the clock was wrong until then."""
        self.db.execute("UPDATE rows SET wall = wall + ? WHERE wall <= ?", (by_s, upto_wall))

    def set_missing_dates(self, before_wall: float, wall: float) -> None:
        """Date as of `wall` what is dated before `before_wall`."""
        self.db.execute("UPDATE rows SET wall = ? WHERE wall < ?", (wall, before_wall))

    def fact(self, name: str) -> int:
        """Return a stored number; 0 without one."""
        row = self.db.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return int(row[0]) if row is not None else 0

    def keep_fact(self, name: str, value: int) -> None:
        """Store a number, which never decreases."""
        keep = "INSERT INTO facts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)"
        self.db.execute(keep, (name, value))

    def copy_to(self, other: OutboxTable) -> None:
        """Copy all rows and ranges."""
        for table, columns in _COLUMNS.items():
            content = self.db.execute(f"SELECT {columns} FROM {table}").fetchall()
            places = ", ".join("?" * (columns.count(",") + 1))
            other.db.executemany(f"INSERT OR REPLACE INTO {table} ({columns}) VALUES ({places})", content)


class DroppedRanges:
    """The ranges of numbers that will not come.

    grown: every range that was added, or has grown, since somebody set this to None lies beyond this key.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.grown: Key | None = None
        self._db = db

    def add(self, epoch: int, first: int, last: int, counts: Mapping[str, int]) -> None:
        """Add a range, merged with the ranges that it touches."""
        neighbours = self._db.execute(
            "SELECT first, last, counts FROM runs WHERE epoch = ? AND last >= ? AND first <= ?",
            (epoch, first - 1, last + 1),
        ).fetchall()
        total = Counter(counts)
        for other_first, other_last, other_counts in neighbours:
            first, last = min(first, other_first), max(last, other_last)
            total += Counter(json.loads(other_counts))
        keys = [(epoch, other_first) for other_first, _, _ in neighbours]
        self._db.executemany("DELETE FROM runs WHERE epoch = ? AND first = ?", keys)
        self._db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, 0)", (epoch, first, last, json.dumps(total)))
        before = epoch, first - 1
        self.grown = before if self.grown is None else min(self.grown, before)

    def due(self, after: Key, limit: int, upto: Key = _END) -> list[DroppedRange]:
        """Return ranges that the broker has not acknowledged, with keys beyond `after`, up to `upto`, in order."""
        ranges = self._db.execute(
            "SELECT epoch, first, last, counts FROM runs WHERE (epoch, first) > (?, ?) AND (epoch, first) <= (?, ?) "
            "AND sent = 0 ORDER BY epoch, first LIMIT ?",
            (*after, *upto, limit),
        )
        return [DroppedRange(epoch, first, last, json.loads(counts)) for epoch, first, last, counts in ranges]

    def forget_epochs(self, current_epoch: int, size_bytes: int) -> int:
        """Limit the size of epochs of which only ranges are left; return how many ranges were deleted.

        If they take more than `size_bytes`, the oldest are deleted until the rest take half of that. `current_epoch` is
        kept. Nobody misses the others: a collector waits only for numbers that follow a hole, and none will.
        """
        alone = "epoch <> ? AND NOT EXISTS (SELECT 1 FROM rows WHERE rows.epoch = runs.epoch)"
        sizes = self._db.execute(
            f"SELECT epoch, sum(length(counts) + ?) FROM runs WHERE {alone} GROUP BY epoch ORDER BY epoch DESC",
            (_RANGE_BYTES, current_epoch),
        )
        total, newest = 0, 0
        for epoch, size in sizes:
            total += size
            if not newest and total > size_bytes // 2:
                newest = epoch
        if total <= size_bytes:
            return 0
        return self._db.execute(f"DELETE FROM runs WHERE epoch <= ? AND {alone}", (newest, current_epoch)).rowcount
