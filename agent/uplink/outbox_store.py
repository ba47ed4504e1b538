"""Keep what the outbox has to send: on the disk while that works, in memory while the disk refuses.

`OutboxStore` writes `PendingWrites` in one transaction for each commit, hands out what is due, and decides when a row
is confirmed: `confirmed by the broker` deletes it, or, if a collector has to confirm, only marks it as sent; the
collector's ack deletes it. `RetentionLimits` drops what is too old or too much. The outbox's thread is the only user.

Below it, `OutboxTable` holds the numbered messages in SQLite, and the ranges of numbers that will not come. Every
number of an epoch is in one of the two, until its receiver has confirmed it. The table names in the file are `rows`,
`runs` (the ranges) and `facts`.
"""

from __future__ import annotations

import json
import logging
import secrets
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.database import Database
from agent.common.errors import AgentError
from agent.mqtt.config import OutboxConfig

log = logging.getLogger(__package__)

Key = tuple[int, int]  # epoch, seq
START: Key = (0, 0)  # before every number
_END: Key = (2**63 - 1, 2**63 - 1)

# Ranks: when the outbox is full, rows of the lowest rank are dropped first.
SAMPLE = 0
EVENT = 1
ALARM = 2

NO_CLOCK_S = 1_704_067_200.0  # 2024-01-01: a board with an earlier time has not learnt the time yet
RANGE = "range"  # the kind of a dropped range that was itself forgotten
_FORGOTTEN = "forgotten"  # the kind of rows that only a broker has acknowledged, for a collector that came later
_RETRY_S = 60.0  # until a disk that refused is tried again
_ROOM = 0.9  # share of the limit that is left when the limit is reached, so that not every later row drops one
_STEP = 0.05  # share of the limit that is dropped before the size of the resulting ranges is measured
_MOST_RANGES = 0.25  # share of the limit for ranges of epochs without rows; the rest is for rows
_DAY_S = 86400.0
_AGED_EVERY_S = 3600.0
_SETTLES_S = 3600.0  # after the start, and after the clock was set
_CLOCK_JUMP_S = 60.0  # between two commits: somebody has set the clock
_RANGE_BYTES = 30  # size of a range in the file, without its counts
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


@dataclass(frozen=True)
class OutboxRow:
    """A numbered message.

    Args:
        epoch: The start of the daemon that it belongs to.
        seq: Its number in the epoch, from 1.
        kind: `telemetry`, or the event's kind.
        rank: SAMPLE, EVENT or ALARM.
        wall: Unix time in s at which it was put.
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
    def identity(self) -> tuple[int, int, int]:
        """Identifies this exact range; it differs from the range that results when a neighbour is merged into it."""
        return self.epoch, self.first, self.last


Parcel = OutboxRow | DroppedRange  # what the broker is sent, and acknowledges, as one


@dataclass
class PendingWrites:
    """Changes to write, from one commit to the next.

    Args:
        rows: New rows.
        lost: Numbers of rows that were never stored, with their kinds.
        delivered: The broker has acknowledged them.
        refused: No broker accepts them.
        acks: By epoch, the number up to which a collector has everything.
        missing: By epoch, the number after which a collector misses something, though it was sent all there is.
    """

    rows: list[OutboxRow] = field(default_factory=list)
    lost: list[tuple[Key, str]] = field(default_factory=list)
    delivered: list[Parcel] = field(default_factory=list)
    refused: list[OutboxRow] = field(default_factory=list)
    acks: dict[int, int] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)

    def extend(self, later: PendingWrites) -> None:
        """Add what has come since."""
        for name in ("rows", "lost", "delivered", "refused"):
            getattr(self, name).extend(getattr(later, name))
        self.acks.update(later.acks)
        self.missing.update(later.missing)

    def __bool__(self) -> bool:
        return bool(self.rows or self.lost or self.delivered or self.refused or self.acks or self.missing)


@dataclass(eq=False)
class OutboxStore:
    """The rows of the outbox, for one thread at a time. It opens the file, or starts in memory.

    Args:
        on_error: Receives the error of a disk that refuses, and of a damaged file.
        clock: The board's.

    Attributes:
        epoch: Of what is put now. It grows once the disk is back and holds a later one.
        dropped: By kind, how many rows were dropped unsent since the start.
        oldest: Key of the oldest row that waits to be confirmed, as of the latest write.
        oldest_wall: Its date, Unix s.
        size_bytes: What the rows take, as of the latest write.
        returned: Set when the disk works again: what lies there is due again. The outbox resets it.

    Raises AgentError (`state.schema`) for a file of a newer tared.
    """

    path: Path
    config: OutboxConfig
    on_error: Callable[[AgentError], None]
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._database = database(self.path)
        self._limits = RetentionLimits(self.config, self.clock)
        self._reported_code = ""
        self._retry_s = 0.0
        self._at = START  # up to here what is due has been handed out
        self._ranges_at = START  # and up to here also the ranges that have grown since
        self.dropped: Counter[str] = Counter()
        self.oldest: Key | None = None
        self.oldest_wall: float | None = None
        self.size_bytes = 0
        self.epoch = 0
        self._is_blind = True  # the disk could not be read yet: earlier epochs are unknown
        self._collected = False  # a collector has confirmed rows of ours
        self._on_disk = False
        self._table = OutboxTable(in_memory())
        self._return_to_disk()
        self.returned = False
        if self._is_blind:
            self.epoch = _epoch_after(0, self.clock.wall_s())

    @property
    def needs_collector(self) -> bool:
        """True if a collector has to confirm what the broker has acknowledged."""
        return self.config.confirm == "collector" or (self.config.confirm == "auto" and self._collected)

    def due(self, limit: int) -> list[Parcel]:
        """Return the next parcels that the broker has not acknowledged, in order.

        They begin with ranges that have grown among the numbers that were handed out already.
        """
        try:
            with self._database.translating_errors("read"):
                return self._next(limit) if limit else []
        except AgentError as error:
            self._leave_disk(error)
            return []

    def _next(self, limit: int) -> list[Parcel]:
        table = self._table
        self._ranges_at, table.grown = min(self._ranges_at, table.grown or self._at), None
        late: list[Parcel] = [*table.due_ranges(self._ranges_at, limit, self._at)]
        if len(late) == limit:
            self._ranges_at = late[-1].key
            return late
        due = [*late, *table.due(self._at, limit - len(late))]
        self._at = self._ranges_at = max([self._at, *(each.key for each in due)])
        return due

    def commit(self, writes: PendingWrites, last: Key, again: bool = False) -> None:
        """Write, durably if the disk allows it.

        Args:
            last: The greatest number so far.
            again: Hand everything out again from the oldest on, also what only a broker has acknowledged.
        """
        if not self._on_disk and self.clock.monotonic_s() >= self._retry_s:
            self._return_to_disk()
        try:
            self._write(writes, last, again)
        except AgentError as error:
            self._leave_disk(error)
            self._write(writes, last, again)
        if again:
            self._at = self._ranges_at = START

    def close(self) -> None:
        self._table.db.close()

    def _write(self, writes: PendingWrites, last: Key, again: bool) -> None:
        with self._database.transaction_on(self._table.db):
            self._table.add(writes.rows)
            self._limits.correct_dates(self._table)
            for (epoch, seq), kind in writes.lost:
                self._table.add_range(epoch, seq, seq, {kind: 1})
            if self.needs_collector:
                self._table.mark_sent(writes.delivered)
            else:
                self._table.remove(writes.delivered)
            refused = self._table.drop(writes.refused)
            for epoch, upto in writes.acks.items():
                self._collected = self._collected or (epoch == self.epoch and upto > 0)
                self._table.forget(epoch, upto)
            for epoch, upto in writes.missing.items():
                self._declare_forgotten(epoch, upto, last)
            dropped = self._limits.apply(self._table, self.epoch)
            if again and self.needs_collector:
                self._table.mark_all_due()
            self._keep_facts(self._table)
            self.oldest, self.oldest_wall = self._table.oldest()
            self.size_bytes = self._table.size_bytes()
        self.dropped += dropped + refused + Counter(kind for _, kind in writes.lost)

    def _declare_forgotten(self, epoch: int, upto: int, last: Key) -> None:
        """Add a range for what a collector still misses after `upto`, if that is no longer here."""
        if not self._on_disk:  # it may lie there
            return
        oldest = self._table.oldest_seq(epoch)
        if oldest is None and epoch == last[0]:
            oldest = last[1] + 1
        if oldest is not None and upto + 1 < oldest:
            self._table.add_range(epoch, upto + 1, oldest - 1, {_FORGOTTEN: oldest - 1 - upto})

    def _keep_facts(self, table: OutboxTable) -> None:
        table.keep_fact("epoch", self.epoch)
        table.keep_fact("collected", self._collected)

    def _return_to_disk(self) -> None:
        """Move what memory has kept into the file; a disk that refuses is tried again later."""
        try:
            db = self._open()
            try:
                self._move_to(OutboxTable(db))
            except BaseException:
                db.close()
                raise
        except AgentError as error:
            self._report(error)
            return
        self._table.db.close()
        self._table, self._on_disk, self.returned, self._reported_code = OutboxTable(db), True, True, ""

    def _open(self) -> sqlite3.Connection:
        """Open the file; a damaged one is reported, and replaced by an empty one. Raises AgentError."""
        try:
            return self._database.connect(any_thread=True)
        except AgentError as error:
            if error.code != f"{self._database.name}.damaged":
                raise
            self.on_error(error)
            return self._database.connect(any_thread=True)

    def _move_to(self, file: OutboxTable) -> None:
        """Copy memory to the file, and combine what both know of epochs and collectors. Raises AgentError.

        An epoch that began without the file ends if the file holds a later one. Otherwise new rows would be
        numbered before those in the file.
        """
        with self._database.transaction_on(file.db):
            known = max(file.fact("epoch"), file.last_epoch())
            self._table.copy_to(file)
            self._collected = self._collected or file.fact("collected") > 0
            self._keep_facts(file)
        if self._is_blind and self.epoch <= known:
            self.epoch = _epoch_after(known, self.clock.wall_s())
        self._is_blind = False

    def _leave_disk(self, error: AgentError) -> None:
        """Continue in memory."""
        self._table.db.close()
        self._table, self._on_disk = OutboxTable(in_memory()), False
        self._report(error)

    def _report(self, error: AgentError) -> None:
        """Report a disk that refuses, once for each code. Raises the error of a file of a newer tared."""
        if error.code == f"{self._database.name}.schema":
            raise error
        self._retry_s = self.clock.monotonic_s() + _RETRY_S
        if error.code != self._reported_code:
            self._reported_code = error.code
            self.on_error(error)


class RetentionLimits:
    """The limits in bytes and in days, for one thread.

    Nothing is too old in the first hour, nor within an hour of a clock that was set: a clock that is years ahead until
    it hears a time server would drop all rows. The limit in bytes holds at all times.
    """

    def __init__(self, config: OutboxConfig, clock: Clock = SYSTEM_CLOCK) -> None:
        self._config = config
        self._clock = clock
        self._aged_s = self._clock.monotonic_s() + _SETTLES_S
        self._clocks = clock.wall_s(), clock.monotonic_s()

    def apply(self, table: OutboxTable, current_epoch: int) -> Counter[str]:
        """Drop rows that are too old or too many; return counts by kind."""
        dropped: Counter[str] = Counter()
        if self._clock.monotonic_s() >= self._aged_s:
            self._aged_s = self._clock.monotonic_s() + _AGED_EVERY_S
            if self._clock.wall_s() > NO_CLOCK_S:
                # Rows dated before that have an unknown age, which counts from now on.
                table.set_missing_dates(NO_CLOCK_S, self._clock.wall_s())
            dropped += table.drop_older(self._clock.wall_s() - self._config.days * _DAY_S)
        if table.size_bytes() > self._config.bytes:
            dropped += self._make_room(table, current_epoch)
        return dropped

    def correct_dates(self, table: OutboxTable) -> None:
        """Shift the dates of older rows when the clock was set.

        A board without a battery for its clock starts in 1970, and its rows would seem too old once the clock is set.
        """
        wall, monotonic = self._clocks
        self._clocks = self._clock.wall_s(), self._clock.monotonic_s()
        passed_s = self._clocks[1] - monotonic
        jump_s = self._clocks[0] - wall - passed_s
        if abs(jump_s) > _CLOCK_JUMP_S:
            self._aged_s = self._clock.monotonic_s() + _SETTLES_S
        if jump_s > _CLOCK_JUMP_S:
            table.shift_dates(wall + passed_s, jump_s)  # the latest time that the clock can have shown before

    def _make_room(self, table: OutboxTable, current_epoch: int) -> Counter[str]:
        """Drop rows step by step: each may leave a range behind, and neither may displace the other."""
        dropped: Counter[str] = Counter()
        while True:
            if forgotten := table.forget_epochs(current_epoch, round(_MOST_RANGES * self._config.bytes)):
                log.warning(
                    "outbox=forgotten ranges=%d reason='more starts without a broker than it can report'", forgotten
                )
                dropped[RANGE] += forgotten
            size, enough = table.size_bytes(), round(_ROOM * self._config.bytes)
            step = table.drop_oldest(max(enough, size - round(_STEP * self._config.bytes)))
            if not step:
                return dropped
            dropped += step


def _epoch_after(known: int, now: float) -> int:
    """Return the epoch of a start: its Unix time, or `known` + 1 if the clock shows less. known: 0 if none is known.

    On a board without a battery for its clock, all starts that know no earlier epoch would share one, and a collector
    would take the rows of the second for those of the first. Such an epoch is random: among a thousand such starts two
    are equal with a probability of 1 in 3000. It is drawn from below 2024, so that later epochs are greater, whether
    they come from a clock that was set or are counted on from the disk. It is exact in JSON, as all epochs are.
    """
    if not known and now < NO_CLOCK_S:
        return 1 + secrets.randbelow(int(NO_CLOCK_S) - 1)
    return max(known + 1, int(now))


class OutboxTable:
    """The rows of one database, and the dropped ranges between them: the numbers that will not come.

    grown: every range that was added, or has grown, since somebody set this to None lies beyond this key.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        self.db = db
        self.grown: Key | None = None

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
        return sorted([*due, *self.due_ranges(after, limit)], key=lambda each: each.key)[:limit]

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

    def oldest(self) -> tuple[Key, float] | tuple[None, None]:
        """Return the smallest key of all rows, and its date in Unix s."""
        row = self.db.execute("SELECT epoch, seq, wall FROM rows ORDER BY epoch, seq LIMIT 1").fetchone()
        return ((row[0], row[1]), row[2]) if row is not None else (None, None)

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
            self.add_range(epoch, seq, seq, {kind: 1})
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

    def add_range(self, epoch: int, first: int, last: int, counts: Mapping[str, int]) -> None:
        """Add a range, merged with the ranges that it touches."""
        neighbours = self.db.execute(
            "SELECT first, last, counts FROM runs WHERE epoch = ? AND last >= ? AND first <= ?",
            (epoch, first - 1, last + 1),
        ).fetchall()
        total = Counter(counts)
        for other_first, other_last, other_counts in neighbours:
            first, last = min(first, other_first), max(last, other_last)
            total += Counter(json.loads(other_counts))
        keys = [(epoch, other_first) for other_first, _, _ in neighbours]
        self.db.executemany("DELETE FROM runs WHERE epoch = ? AND first = ?", keys)
        self.db.execute("INSERT INTO runs VALUES (?, ?, ?, ?, 0)", (epoch, first, last, json.dumps(total)))
        before = epoch, first - 1
        self.grown = before if self.grown is None else min(self.grown, before)

    def due_ranges(self, after: Key, limit: int, upto: Key = _END) -> list[DroppedRange]:
        """Return ranges that the broker has not acknowledged, with keys beyond `after`, up to `upto`, in order."""
        ranges = self.db.execute(
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
        sizes = self.db.execute(
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
        return self.db.execute(f"DELETE FROM runs WHERE epoch <= ? AND {alone}", (newest, current_epoch)).rowcount


def database(path: Path) -> Database:
    """Return the file that keeps the tables."""
    holds, loss = "the rows that wait for the fleet's collector", "the rows that were not collected yet are lost"
    return Database(path, "state", holds, loss, _MIGRATIONS, _PRAGMAS)


def in_memory() -> sqlite3.Connection:
    """Return empty tables in memory, which replace the file while the disk refuses."""
    db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    db.executescript(_MIGRATIONS[0])
    return db
