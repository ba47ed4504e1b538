"""What the outbox keeps, within its bounds: on the disk, and in memory while the disk refuses."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from agent.errors import AgentError
from agent.mqtt_config import OutboxConfig
from agent.outbox_rows import Key, Row, Rows, Run, database, in_memory

_RETRY_S = 60.0  # until a disk that refused is tried again
_ROOM = 0.9  # of the bound is left when it is reached, so that not every row after that drops one
_DAY_S = 86400.0
_AGED_EVERY_S = 3600.0
_NO_CLOCK_S = 1_704_067_200.0  # 2024: a board that says less has not heard what time it is
_CLOCK_JUMP_S = 60.0  # between two commits: somebody has set the clock
_FORGOTTEN = "forgotten"  # the kind of what only a broker has acknowledged, for a collector that came later


T = TypeVar("T")


@dataclass
class Work:
    """What there is to write, from one commit to the next.

    lost: numbers of rows that never came this far, with their kinds. delivered: the broker has them. refused: no broker
    takes them. acks: up to which number a collector has all, by epoch. lacking: after which it lacks something, though
    it was sent all there is.
    """

    rows: list[Row] = field(default_factory=list)
    lost: list[tuple[Key, str]] = field(default_factory=list)
    delivered: list[Row | Run] = field(default_factory=list)
    refused: list[Row] = field(default_factory=list)
    acks: dict[int, int] = field(default_factory=dict)
    lacking: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.rows or self.lost or self.delivered or self.refused or self.acks or self.lacking)


class OutboxStore:
    """One thread's at a time. `dropped` counts by kind what had to go unsent, since the start."""

    def __init__(self, path: Path, config: OutboxConfig, on_error: Callable[[AgentError], None]) -> None:
        """on_error hears of a disk that refuses, and of a damaged file. Raises AgentError (`outbox.schema`) for one of
        a newer tared."""
        self._config = config
        self._on_error = on_error
        self._database = database(path)
        self._told = ""
        self._retry_s = 0.0
        self._aged_s = 0.0
        self._clocks = time.time(), time.monotonic()
        self.dropped: Counter[str] = Counter()
        self._on_disk = False
        self.returned = False  # to the disk: what lies there is due again
        self._rows = Rows(in_memory())
        self._return_to_disk()
        self.returned = False
        self.epoch = max(self._rows.fact("epoch"), self._rows.last_epoch(), int(time.time()) - 1) + 1
        self._collected = self._rows.fact("collected") > 0
        self.oldest: Key | None = None  # of what waits to be confirmed

    @property
    def asks_collector(self) -> bool:
        """Whether PUBACK is not enough."""
        return self._config.confirm == "collector" or (self._config.confirm == "auto" and self._collected)

    def due(self, after: Key, limit: int) -> list[Row]:
        """What the broker has not acknowledged, with numbers beyond `after`, in their order."""
        return self._read(lambda: self._rows.due(after, limit))

    def due_runs(self) -> list[Run]:
        """All that the broker has not acknowledged."""
        return self._read(self._rows.due_runs)

    def commit(self, work: Work, last: Key, again: bool = False) -> None:
        """Write it, durably if the disk allows. last: the greatest number so far. again: what only a broker has
        acknowledged is due once more."""
        if not self._on_disk and time.monotonic() >= self._retry_s:
            self._return_to_disk()
        try:
            self._write(work, last, again)
        except AgentError as error:
            self._leave_disk(error)
            self._write(work, last, again)

    def close(self) -> None:
        self._rows.db.close()

    def _read(self, read: Callable[[], list[T]]) -> list[T]:
        try:
            with self._database.translated("read"):
                return read()
        except AgentError as error:
            self._leave_disk(error)
            return []

    def _write(self, work: Work, last: Key, again: bool) -> None:
        with self._database.begun(self._rows.db):
            self._set_dates()
            self._rows.keep_fact("epoch", self.epoch)
            self._rows.add(work.rows)
            for (epoch, seq), kind in work.lost:
                self._rows.add_run(epoch, seq, seq, {kind: 1})
            self._deliver(work.delivered)
            refused = self._rows.drop(work.refused)
            for epoch, upto in work.acks.items():
                self._confirm(epoch, upto)
            for epoch, upto in work.lacking.items():
                self._give_up(epoch, upto, last)
            dropped = self._bound()
            if again and self.asks_collector:
                self._rows.unsend()
            self.oldest = self._rows.oldest_key()
        self.dropped += dropped + refused + Counter(kind for _, kind in work.lost)

    def _deliver(self, delivered: list[Row | Run]) -> None:
        rows = [each for each in delivered if isinstance(each, Row)]
        runs = [each for each in delivered if isinstance(each, Run)]
        if self.asks_collector:
            self._rows.sent(rows, runs)
        else:
            self._rows.gone(rows, runs)

    def _confirm(self, epoch: int, upto: int) -> None:
        """A collector has all up to this number."""
        if not self._collected and epoch == self.epoch and upto > 0:
            self._collected = True
            self._rows.keep_fact("collected", 1)
        self._rows.forget(epoch, upto)

    def _give_up(self, epoch: int, upto: int, last: Key) -> None:
        """A collector goes on to lack what comes after this number. Where that is no longer here, it is told so."""
        if not self._on_disk:  # it may lie there
            return
        oldest = self._rows.oldest(epoch)
        if oldest is None and epoch == last[0]:
            oldest = last[1] + 1
        if oldest is not None and upto + 1 < oldest:
            self._rows.add_run(epoch, upto + 1, oldest - 1, {_FORGOTTEN: oldest - 1 - upto})

    def _bound(self) -> Counter[str]:
        """Drop what is too much, or too old; by kind."""
        dropped: Counter[str] = Counter()
        if time.monotonic() >= self._aged_s:
            self._aged_s = time.monotonic() + _AGED_EVERY_S
            if time.time() > _NO_CLOCK_S:  # nobody can say how old it is: it counts from now on
                self._rows.date(_NO_CLOCK_S, time.time())
            dropped += self._rows.drop_older(time.time() - self._config.days * _DAY_S)
        if self._rows.size_bytes() > self._config.bytes:
            dropped += self._rows.drop_oldest(round(_ROOM * self._config.bytes))
        return dropped

    def _set_dates(self) -> None:
        """A board without a battery for its clock starts in 1970, and all it has would seem too old once the clock is
        set: what is dated before the jump is of as long ago as the board has known since."""
        wall, monotonic = self._clocks
        self._clocks = time.time(), time.monotonic()
        jump_s = (self._clocks[0] - wall) - (self._clocks[1] - monotonic)
        if jump_s > _CLOCK_JUMP_S:
            self._rows.redate(wall, jump_s)

    def _return_to_disk(self) -> None:
        """Use the file, with what memory has kept meanwhile; a disk that refuses is tried again later."""
        try:
            db = self._open()
            try:
                with self._database.begun(db):
                    self._rows.copy_to(Rows(db))
            except BaseException:
                db.close()
                raise
        except AgentError as error:
            self._refused(error)
            return
        self._rows.db.close()
        self._rows, self._on_disk, self.returned, self._told = Rows(db), True, True, ""

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
        self._rows, self._on_disk = Rows(in_memory()), False
        self._refused(error)

    def _refused(self, error: AgentError) -> None:
        if error.code == f"{self._database.name}.schema":
            raise error
        self._retry_s = time.monotonic() + _RETRY_S
        if error.code != self._told:
            self._told = error.code
            self._on_error(error)
