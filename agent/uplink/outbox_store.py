"""How much the outbox keeps, and for how long."""

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
from agent.uplink.outbox_tables import START, DroppedRange, Key, OutboxRow, OutboxTable, database, in_memory

log = logging.getLogger(__package__)

NO_CLOCK_S = 1_704_067_200.0  # 2024: a board that says less has not heard what time it is
RANGE = "range"  # the kind of a run that was itself forgotten
_ROOM = 0.9  # of the bound is left when it is reached, so that not every row after that drops one
_STEP = 0.05  # of it are dropped, before it is looked again what the runs take that come of it
_MOST_RUNS = 0.25  # of it may be runs of epochs that have no rows any more; the rest is for rows
_DAY_S = 86400.0
_AGED_EVERY_S = 3600.0
_CLOCK_JUMP_S = 60.0  # between two commits: somebody has set the clock


class RetentionLimits:
    """In bytes and in days; one thread's."""

    def __init__(self, config: OutboxConfig, clock: Callable[[], float] = unix_s) -> None:
        """clock: Unix time as the board has it."""
        self._config = config
        self._clock = clock
        self._aged_s = 0.0
        self._clocks = clock(), time.monotonic()

    def apply(self, rows: OutboxTable, epoch: int) -> Counter[str]:
        """Drop what is too much, or too old; by kind. epoch: the one that goes on."""
        dropped: Counter[str] = Counter()
        if time.monotonic() >= self._aged_s:
            self._aged_s = time.monotonic() + _AGED_EVERY_S
            if self._clock() > NO_CLOCK_S:  # nobody can say how old it is: it counts from now on
                rows.set_missing_dates(NO_CLOCK_S, self._clock())
            dropped += rows.drop_older(self._clock() - self._config.days * _DAY_S)
        if rows.size_bytes() > self._config.bytes:
            dropped += self._make_room(rows, epoch)
        return dropped

    def correct_dates(self, rows: OutboxTable) -> None:
        """A board without a battery for its clock starts in 1970, and all it has would seem too old once the clock is
        set: what is dated before the jump is of as long ago as the board has known since."""
        wall, monotonic = self._clocks
        self._clocks = self._clock(), time.monotonic()
        passed_s = self._clocks[1] - monotonic
        jump_s = self._clocks[0] - wall - passed_s
        if jump_s > _CLOCK_JUMP_S:
            rows.shift_dates(wall + passed_s, jump_s)  # the latest that the clock can have said before

    def _make_room(self, rows: OutboxTable, epoch: int) -> Counter[str]:
        """Each row that goes may leave a run behind: so neither takes the place of the other."""
        dropped: Counter[str] = Counter()
        while True:
            if forgotten := rows.ranges.forget_epochs(epoch, round(_MOST_RUNS * self._config.bytes)):
                log.warning("outbox=forgotten ranges=%d: more starts without a broker than it can tell of", forgotten)
                dropped[RANGE] += forgotten
            size, enough = rows.size_bytes(), round(_ROOM * self._config.bytes)
            gone = rows.drop_oldest(max(enough, size - round(_STEP * self._config.bytes)))
            if not gone:
                return dropped
            dropped += gone


_RETRY_S = 60.0  # until a disk that refused is tried again
_FORGOTTEN = "forgotten"  # the kind of what only a broker has acknowledged, for a collector that came later


@dataclass
class PendingWrites:
    """What there is to write, from one commit to the next.

    lost: numbers of rows that never came this far, with their kinds. delivered: the broker has them. refused: no broker
    takes them. acks: up to which number a collector has all, by epoch. lacking: after which it lacks something, though
    it was sent all there is.
    """

    rows: list[OutboxRow] = field(default_factory=list)
    lost: list[tuple[Key, str]] = field(default_factory=list)
    delivered: list[OutboxRow | DroppedRange] = field(default_factory=list)
    refused: list[OutboxRow] = field(default_factory=list)
    acks: dict[int, int] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.lost or self.delivered or self.refused or self.acks or self.missing)


class OutboxStore:
    """One thread's at a time.

    epoch: of what is put now; a later one once the disk is back, and tells of a later one. dropped: by kind, how many
    had to go unsent, since the start. oldest: of what waits to be confirmed. returned: to the disk; what lies there is
    due again.
    """

    def __init__(
        self,
        path: Path,
        config: OutboxConfig,
        on_error: Callable[[AgentError], None],
        clock: Callable[[], float] = unix_s,
    ) -> None:
        """on_error hears of a disk that refuses, and of a damaged file. Raises AgentError (`outbox.schema`) for one of
        a newer tared."""
        self._config = config
        self._on_error = on_error
        self._database = database(path)
        self._clock = clock
        self._bounds = RetentionLimits(config, clock)
        self._told = ""
        self._retry_s = 0.0
        self._at = START  # up to there what is due has been handed out
        self._behind = START  # and up to there also the runs that have grown since
        self.dropped: Counter[str] = Counter()
        self.oldest: Key | None = None
        self.epoch = 0
        self._is_blind = True  # the disk has not been asked yet which epochs there were
        self._collected = False
        self._on_disk = False
        self._rows = OutboxTable(in_memory())
        self._return_to_disk()
        self.returned = False
        if self._is_blind:
            self.epoch = _epoch_after(0, self._clock())

    @property
    def needs_collector(self) -> bool:
        """Whether PUBACK is not enough."""
        return self._config.confirm == "collector" or (self._config.confirm == "auto" and self._collected)

    def due(self, limit: int) -> list[OutboxRow | DroppedRange]:
        """The next of what the broker has not acknowledged, in the order of their numbers; before them runs that have
        grown among the numbers that were handed out already."""
        try:
            with self._database.translating_errors("read"):
                return self._next(limit) if limit else []
        except AgentError as error:
            self._leave_disk(error)
            return []

    def commit(self, work: PendingWrites, last: Key, again: bool = False) -> None:
        """Write it, durably if the disk allows. last: the greatest number so far. again: what only a broker has
        acknowledged is due once more, from the oldest on."""
        if not self._on_disk and time.monotonic() >= self._retry_s:
            self._return_to_disk()
        try:
            self._write(work, last, again)
        except AgentError as error:
            self._leave_disk(error)
            self._write(work, last, again)
        if again:
            self._at = self._behind = START

    def close(self) -> None:
        self._rows.db.close()

    def _next(self, limit: int) -> list[OutboxRow | DroppedRange]:
        runs = self._rows.ranges
        self._behind, runs.grown = min(self._behind, runs.grown or self._at), None
        late: list[OutboxRow | DroppedRange] = [*runs.due(self._behind, limit, self._at)]
        if len(late) == limit:
            self._behind = late[-1].key
            return late
        due = [*late, *self._rows.due(self._at, limit - len(late))]
        self._at = self._behind = max([self._at, *(each.key for each in due)])
        return due

    def _write(self, work: PendingWrites, last: Key, again: bool) -> None:
        with self._database.transaction_on(self._rows.db):
            self._rows.add(work.rows)
            self._bounds.correct_dates(self._rows)
            for (epoch, seq), kind in work.lost:
                self._rows.ranges.add(epoch, seq, seq, {kind: 1})
            self._deliver(work.delivered)
            refused = self._rows.drop(work.refused)
            for epoch, upto in work.acks.items():
                self._confirm(epoch, upto)
            for epoch, upto in work.missing.items():
                self._give_up(epoch, upto, last)
            dropped = self._bounds.apply(self._rows, self.epoch)
            if again and self.needs_collector:
                self._rows.mark_all_due()
            self._keep_facts(self._rows)
            self.oldest = self._rows.oldest_key()
        self.dropped += dropped + refused + Counter(kind for _, kind in work.lost)

    def _keep_facts(self, rows: OutboxTable) -> None:
        rows.keep_fact("epoch", self.epoch)
        rows.keep_fact("collected", self._collected)

    def _deliver(self, delivered: list[OutboxRow | DroppedRange]) -> None:
        rows = [each for each in delivered if isinstance(each, OutboxRow)]
        runs = [each for each in delivered if isinstance(each, DroppedRange)]
        if self.needs_collector:
            self._rows.mark_sent(rows)
            self._rows.ranges.mark_sent(runs)
        else:
            self._rows.remove(rows)
            self._rows.ranges.remove(runs)

    def _confirm(self, epoch: int, upto: int) -> None:
        """A collector has all up to this number."""
        self._collected = self._collected or (epoch == self.epoch and upto > 0)
        self._rows.forget(epoch, upto)

    def _give_up(self, epoch: int, upto: int, last: Key) -> None:
        """A collector goes on to lack what comes after this number. Where that is no longer here, it is told so."""
        if not self._on_disk:  # it may lie there
            return
        oldest = self._rows.oldest_seq(epoch)
        if oldest is None and epoch == last[0]:
            oldest = last[1] + 1
        if oldest is not None and upto + 1 < oldest:
            self._rows.ranges.add(epoch, upto + 1, oldest - 1, {_FORGOTTEN: oldest - 1 - upto})

    def _return_to_disk(self) -> None:
        """Use the file, with what memory has kept meanwhile; a disk that refuses is tried again later."""
        try:
            db = self._open()
            try:
                self._take_over(OutboxTable(db))
            except BaseException:
                db.close()
                raise
        except AgentError as error:
            self._refused(error)
            return
        self._rows.db.close()
        self._rows, self._on_disk, self.returned, self._told = OutboxTable(db), True, True, ""

    def _take_over(self, file: OutboxTable) -> None:
        """What the file and memory know holds for both from now on. An epoch that was begun without the file ends where
        that tells of a later one: what comes would else be numbered before what lies there. Raises AgentError."""
        with self._database.transaction_on(file.db):
            known = max(file.fact("epoch"), file.last_epoch())
            self._rows.copy_to(file)
            self._collected = self._collected or file.fact("collected") > 0
            self._keep_facts(file)
        if self._is_blind and self.epoch <= known:
            self.epoch = _epoch_after(known, self._clock())
        self._is_blind = False

    def _open(self) -> sqlite3.Connection:
        """Raises AgentError; a damaged file is told of, and begun anew."""
        try:
            return self._database.connect(any_thread=True)
        except AgentError as error:
            if error.code != f"{self._database.name}.damaged":
                raise
            self._on_error(error)
            return self._database.connect(any_thread=True)

    def _leave_disk(self, error: AgentError) -> None:
        """Memory stands in for it."""
        self._rows.db.close()
        self._rows, self._on_disk = OutboxTable(in_memory()), False
        self._refused(error)

    def _refused(self, error: AgentError) -> None:
        if error.code == f"{self._database.name}.schema":
            raise error
        self._retry_s = time.monotonic() + _RETRY_S
        if error.code != self._told:
            self._told = error.code
            self._on_error(error)


def _epoch_after(known: int, now: float) -> int:
    """The epoch of a start: its Unix time, or one more than the greatest that is known where the clock says less. 0:
    none is known.

    On a board without a battery for its clock all starts that know of none would share an epoch, and a collector would
    take the rows of the second for those of the first. There it is drawn at random: of a thousand such starts two meet
    with a chance of 1 in 3000. It is drawn from below 2024, so that what follows is later whichever way it is found,
    by a clock that was set or counted on from the disk; and it is exact in JSON, as they all are.
    """
    if not known and now < NO_CLOCK_S:
        return 1 + secrets.randbelow(int(NO_CLOCK_S) - 1)
    return max(known + 1, int(now))
