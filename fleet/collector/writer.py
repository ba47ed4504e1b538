"""Write batches of messages to the store, and delete old rows.

A batch is stored in one transaction: all of it, or nothing. Several collectors may write at once, so a batch first
locks the devices that it changes.
"""

from __future__ import annotations

import logging
import math

from agent.common.clock import SYSTEM_CLOCK, Clock
from fleet.collector.admission import USUAL, Admission, Admitted, NewDevices
from fleet.collector.batch import Batch
from fleet.devices.devices import Devices
from fleet.devices.records import Refused, quarantine, store_results
from fleet.devices.reports import Report, Reports, Stream
from fleet.store.transaction import FleetStore, Transaction, write_with_retries
from fleet.untrusted import Warnings

log = logging.getLogger(__package__)

_DAY_S = 86_400.0
_ROWS = 2000  # that are deleted at once
_PRUNE_EVERY_S = 60.0  # once no row is old
_JUMP_S = 3600.0
_BY_AGE = {"reports": "received", "results": "received", "quarantine": "received"}
_DATED = {**_BY_AGE, "progress": "heard", "devices": "last_seen"}
# Epochs of which nothing came for so long, except each device's newest.
_ENDED = "heard < ? AND epoch < (SELECT d.epoch FROM devices d WHERE d.id = progress.device)"
_ORPHANS = "NOT EXISTS (SELECT 1 FROM progress p WHERE p.device = dropped.device AND p.epoch = dropped.epoch)"


class BatchWriter:
    """Write batches to one store. warnings: for content that is stored, but suspicious."""

    def __init__(
        self, store: FleetStore, warnings: Warnings, limits: NewDevices = USUAL, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store, self._clock = store, clock
        self._warnings = warnings
        self._reports, self._devices = Reports(store), Devices(store)
        self.admission = Admission(self._devices, limits, clock)

    def write(self, batch: Batch) -> tuple[Batch, dict[Stream, int]]:
        """Store a batch, without the new devices that stay out. Raises AgentError.

        Return what was stored, up to which number each stream of it is complete, and the newest stream of each device
        that came online.
        """
        now, names = self._clock.wall_s(), batch.names

        def write(transaction: Transaction) -> tuple[Admitted, dict[Stream, int], list[Refused], Batch]:
            admitted = self.admission.admit(transaction, names)
            taken = batch.without(admitted.refused) if admitted.refused else batch
            return admitted, *self._write(transaction, taken, now), taken

        admitted, complete, suspicious, taken = write_with_retries(self._store, write)
        self.admission.note(admitted)
        for each in suspicious:
            self._warnings.warn(each.code, f"device={each.fleet}/{each.device} found={each.found!r}")
        return taken, complete

    def _write(self, transaction: Transaction, batch: Batch, now: float) -> tuple[dict[Stream, int], list[Refused]]:
        devices, reports = self._devices, self._reports
        states = batch.statuses.keys() | batch.births.keys() | batch.seen
        reporting = {(stream.fleet, stream.device) for stream in {each.stream for each in batch.entries}}
        ids = devices.ids(transaction, states | reporting | {name for name, _, _ in batch.results}, now)
        # Another collector's batch may change the same devices: each locks all of its own at once, in one order, so
        # that no two wait for each other in a circle.
        changing = states | reports.boards_with_new_streams(transaction, batch.entries, ids)
        transaction.lookup("devices", ("id",), ("id",), [(ids[name],) for name in changing], lock=True)
        added = reports.insert(transaction, batch.entries, ids, now)
        complete = dict(added.complete)
        for name, (epoch, upto) in reports.positions(transaction, batch.came_online - reporting).items():
            complete[Stream(*name, epoch)] = upto
        devices.apply_statuses(transaction, batch.statuses, now)
        devices.apply_births(transaction, batch.births, now)
        devices.mark_seen(transaction, batch.seen, now)
        results = [(ids[name], result, document) for name, result, document in batch.results]
        store_results(transaction, results, now)
        suspicious = [*map(_conflict, added.conflicts), *map(_duplicate, added.duplicates)]
        quarantine(transaction, [*batch.refused, *suspicious], now)
        return complete, suspicious


def _conflict(report: Report) -> Refused:
    stream = report.stream
    found = f"epoch {stream.epoch} number {report.seq} a second time, with another document; two boards of one name?"
    return Refused(stream.fleet, stream.device, "event", "fleet.conflict", found, report.document.encode())


def _duplicate(stream: Stream) -> Refused:
    found = f"epoch {stream.epoch} goes on beside a later one; two boards of one name, or another program that uses it?"
    return Refused(stream.fleet, stream.device, "event", "fleet.twin", found, b"")


class ReportRetention:
    """Delete rows that came more than `days` ago, by our clock. The record of who did what is kept for good.

    Devices that nobody has heard for `unseen_days` are forgotten; None: each is kept until an operator forgets it.

    A clock that jumps would make every row old, or none. Nothing is deleted for a day after it has, by a clock that
    nobody sets; nor where the store has heard nothing for a day, as after a start with a wrong clock. Rows dated in
    the future count as of now, once the day is over.
    """

    def __init__(self, days: float = 30.0, unseen_days: float | None = None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._days, self._unseen_days = days, unseen_days
        self._clock = clock
        self._ahead_s: float | None = None  # wall minus monotonic time, when they were last compared
        self._prune_at_s = -math.inf  # monotonic
        self._has_jumped = False

    def prune_if_due(self, store: FleetStore) -> None:
        """Delete some old rows, if it is time to. Raises AgentError as the store does."""
        now, now_s = self._clock.wall_s(), self._clock.monotonic_s()
        if (jump_s := self._jump_s(store, now, now_s)) is not None:
            self._has_jumped, self._prune_at_s = True, now_s + _DAY_S
            log.warning("collector=time_jumped days=%.1f deleting='nothing for a day'", jump_s / _DAY_S)
        if now_s >= self._prune_at_s:
            if self._has_jumped:
                write_with_retries(store, lambda transaction: _correct_dates(transaction, now))
                self._has_jumped = False
            before = now - self._days * _DAY_S
            if self._forget_some(store, now) and write_with_retries(
                store, lambda transaction: _prune(transaction, before)
            ):
                self._prune_at_s = now_s + _PRUNE_EVERY_S

    def _jump_s(self, store: FleetStore, now: float, now_s: float) -> float | None:
        """Return by how much the clock has jumped since the last call; None where it has not.

        At the first call it is compared with the newest row.
        """
        before, self._ahead_s = self._ahead_s, now - now_s
        if before is not None:
            jump_s = self._ahead_s - before
            return jump_s if abs(jump_s) > _JUMP_S else None
        with store.transaction("read") as transaction:
            ((newest,),) = transaction.execute("SELECT max(heard) FROM progress")
        return now - newest if newest and abs(now - newest) > _DAY_S else None

    def _forget_some(self, store: FleetStore, now: float) -> bool:
        """Forget some devices; return True if none is left that is due."""
        if self._unseen_days is None:
            return True
        devices = Devices(store)
        unseen = devices.unseen(now - self._unseen_days * _DAY_S)
        if unseen:
            devices.forget(unseen, who="collector")
        return not unseen


def _correct_dates(transaction: Transaction, now: float) -> None:
    """Date what is dated in the future as of now: it would stay until then."""
    for table, column in _DATED.items():
        transaction.execute(f"UPDATE {table} SET {column} = ? WHERE {column} > ?", (now, now + _DAY_S))


def _prune(transaction: Transaction, before: float) -> bool:
    """Delete some old rows; return True if none is left."""
    deleted = [transaction.prune(table, column, before, _ROWS) for table, column in _BY_AGE.items()]
    if max(deleted) == _ROWS:
        return False
    if transaction.execute_count(f"DELETE FROM progress WHERE {_ENDED}", (before,)):
        transaction.execute(f"DELETE FROM dropped WHERE {_ORPHANS}")
    return True
