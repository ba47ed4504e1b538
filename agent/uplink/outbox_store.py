"""Keep what the outbox has to send: on the disk while that works, in memory while the disk refuses.

`OutboxStore` writes `PendingWrites` in one transaction for each commit, hands out what is due, and decides when a row
is confirmed: `confirmed by the broker` deletes it, or, if a collector has to confirm, only marks it as sent; the
collector's ack deletes it. `RetentionLimits` drops what is too old or too much. The outbox's thread is the only user.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from agent.common.errors import AgentError
from agent.mqtt.config import OutboxConfig
from agent.system.clock import unix_s
from agent.uplink.outbox_tables import START, Key, OutboxRow, OutboxTable, Parcel, database, in_memory

log = logging.getLogger(__package__)

NO_CLOCK_S = 1_704_067_200.0  # 2024-01-01: a board with an earlier time has not learnt the time yet
RANGE = "range"  # the kind of a dropped range that was itself forgotten
_FORGOTTEN = "forgotten"  # the kind of rows that only a broker has acknowledged, for a collector that came later
_RETRY_S = 60.0  # until a disk that refused is tried again
_ROOM = 0.9  # share of the limit that is left when the limit is reached, so that not every later row drops one
_STEP = 0.05  # share of the limit that is dropped before the size of the resulting ranges is measured
_MOST_RANGES = 0.25  # share of the limit for ranges of epochs without rows; the rest is for rows
_DAY_S = 86400.0
_AGED_EVERY_S = 3600.0
_CLOCK_JUMP_S = 60.0  # between two commits: somebody has set the clock


@dataclass
class PendingWrites:
    """What there is to write, from one commit to the next.

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

    def __bool__(self) -> bool:
        return bool(self.rows or self.lost or self.delivered or self.refused or self.acks or self.missing)


class OutboxStore:
    """The rows of the outbox, for one thread at a time.

    Attributes:
        epoch: Of what is put now. It grows once the disk is back and holds a later one.
        dropped: By kind, how many rows were dropped unsent since the start.
        oldest: Key of the oldest row that waits to be confirmed.
        returned: Set when the disk works again: what lies there is due again. The outbox resets it.
    """

    def __init__(
        self,
        path: Path,
        config: OutboxConfig,
        on_error: Callable[[AgentError], None],
        clock: Callable[[], float] = unix_s,
    ) -> None:
        """Open the file, or start in memory.

        on_error receives the error of a disk that refuses, and of a damaged file. clock: Unix time of the board.
        Raises AgentError (`outbox.schema`) for a file of a newer tared.
        """
        self._config = config
        self._on_error = on_error
        self._database = database(path)
        self._clock = clock
        self._limits = RetentionLimits(config, clock)
        self._reported_code = ""
        self._retry_s = 0.0
        self._at = START  # up to here what is due has been handed out
        self._ranges_at = START  # and up to here also the ranges that have grown since
        self.dropped: Counter[str] = Counter()
        self.oldest: Key | None = None
        self.epoch = 0
        self._is_blind = True  # the disk could not be read yet: earlier epochs are unknown
        self._collected = False  # a collector has confirmed rows of ours
        self._on_disk = False
        self._table = OutboxTable(in_memory())
        self._return_to_disk()
        self.returned = False
        if self._is_blind:
            self.epoch = _epoch_after(0, self._clock())

    @property
    def needs_collector(self) -> bool:
        """True if a collector has to confirm what the broker has acknowledged."""
        return self._config.confirm == "collector" or (self._config.confirm == "auto" and self._collected)

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
        ranges = self._table.ranges
        self._ranges_at, ranges.grown = min(self._ranges_at, ranges.grown or self._at), None
        late: list[Parcel] = [*ranges.due(self._ranges_at, limit, self._at)]
        if len(late) == limit:
            self._ranges_at = late[-1].key
            return late
        due = [*late, *self._table.due(self._at, limit - len(late))]
        self._at = self._ranges_at = max([self._at, *(each.key for each in due)])
        return due

    def commit(self, writes: PendingWrites, last: Key, again: bool = False) -> None:
        """Write, durably if the disk allows it.

        Args:
            writes: What to write.
            last: The greatest number so far.
            again: Hand everything out again from the oldest on, also what only a broker has acknowledged.
        """
        if not self._on_disk and time.monotonic() >= self._retry_s:
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
                self._table.ranges.add(epoch, seq, seq, {kind: 1})
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
            self.oldest = self._table.oldest_key()
        self.dropped += dropped + refused + Counter(kind for _, kind in writes.lost)

    def _declare_forgotten(self, epoch: int, upto: int, last: Key) -> None:
        """Add a range for what a collector still misses after `upto`, if that is no longer here."""
        if not self._on_disk:  # it may lie there
            return
        oldest = self._table.oldest_seq(epoch)
        if oldest is None and epoch == last[0]:
            oldest = last[1] + 1
        if oldest is not None and upto + 1 < oldest:
            self._table.ranges.add(epoch, upto + 1, oldest - 1, {_FORGOTTEN: oldest - 1 - upto})

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
            self._on_error(error)
            return self._database.connect(any_thread=True)

    def _move_to(self, file: OutboxTable) -> None:
        """Copy memory to the file, and combine what both know of epochs and collectors. Raises AgentError.

        An epoch that was begun without the file ends if the file holds a later one. Otherwise new rows would be
        numbered before those in the file.
        """
        with self._database.transaction_on(file.db):
            known = max(file.fact("epoch"), file.last_epoch())
            self._table.copy_to(file)
            self._collected = self._collected or file.fact("collected") > 0
            self._keep_facts(file)
        if self._is_blind and self.epoch <= known:
            self.epoch = _epoch_after(known, self._clock())
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
        self._retry_s = time.monotonic() + _RETRY_S
        if error.code != self._reported_code:
            self._reported_code = error.code
            self._on_error(error)


class RetentionLimits:
    """The limits in bytes and in days, for one thread."""

    def __init__(self, config: OutboxConfig, clock: Callable[[], float] = unix_s) -> None:
        """clock: Unix time of the board."""
        self._config = config
        self._clock = clock
        self._aged_s = 0.0
        self._clocks = clock(), time.monotonic()

    def apply(self, table: OutboxTable, current_epoch: int) -> Counter[str]:
        """Drop rows that are too old or too many; return counts by kind."""
        dropped: Counter[str] = Counter()
        if time.monotonic() >= self._aged_s:
            self._aged_s = time.monotonic() + _AGED_EVERY_S
            if self._clock() > NO_CLOCK_S:  # rows dated before that have an unknown age, which counts from now on
                table.set_missing_dates(NO_CLOCK_S, self._clock())
            dropped += table.drop_older(self._clock() - self._config.days * _DAY_S)
        if table.size_bytes() > self._config.bytes:
            dropped += self._make_room(table, current_epoch)
        return dropped

    def correct_dates(self, table: OutboxTable) -> None:
        """Shift the dates of older rows when the clock was set.

        A board without a battery for its clock starts in 1970, and its rows would seem too old once the clock is set.
        """
        wall, monotonic = self._clocks
        self._clocks = self._clock(), time.monotonic()
        passed_s = self._clocks[1] - monotonic
        jump_s = self._clocks[0] - wall - passed_s
        if jump_s > _CLOCK_JUMP_S:
            table.shift_dates(wall + passed_s, jump_s)  # the latest time that the clock can have shown before

    def _make_room(self, table: OutboxTable, current_epoch: int) -> Counter[str]:
        """Drop rows step by step: each may leave a range behind, and neither may displace the other."""
        dropped: Counter[str] = Counter()
        while True:
            if forgotten := table.ranges.forget_epochs(current_epoch, round(_MOST_RANGES * self._config.bytes)):
                log.warning("outbox=forgotten ranges=%d: more starts without a broker than it can tell of", forgotten)
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
