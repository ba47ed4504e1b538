"""Stores what boards sent, in one transaction: all of it, or nothing."""

from __future__ import annotations

import math
import time

from fleet.collector.batch import Batch
from fleet.devices.devices import Devices
from fleet.devices.identities import Identities
from fleet.devices.records import Refused, Results, quarantine
from fleet.devices.reports import Report, Reports, Stream
from fleet.store.transaction import FleetStore, Transaction, write_with_retries
from fleet.untrusted import Warnings


class BatchWriter:
    """For one store. warnings: of what is stored, and strange."""

    def __init__(self, store: FleetStore, warnings: Warnings) -> None:
        self._store = store
        self._warnings = warnings
        self._identities = Identities(store)
        self._reports, self._devices, self._results = Reports(store), Devices(store), Results(store)

    def write(self, batch: Batch) -> dict[Stream, int]:
        """Store a batch; how far the boards are that it is of, and those that came online. Raises AgentError."""
        now = time.time()
        complete, strange = write_with_retries(self._store, lambda transaction: self._keep(transaction, batch, now))
        for each in strange:
            self._warnings.warn(each.code, f"device={each.fleet}/{each.device} found={each.found!r}")
        return complete

    def _keep(self, transaction: Transaction, batch: Batch, now: float) -> tuple[dict[Stream, int], list[Refused]]:
        """Also what was strange in it."""
        self._hold(transaction, batch, now)
        added = self._reports.insert(transaction, batch.entries, now)
        complete = dict(added.complete)
        silent = batch.came_online - {(stream.fleet, stream.device) for stream in complete}
        for name, (epoch, upto) in self._reports.positions(transaction, silent).items():
            complete[Stream(*name, epoch)] = upto
        self._devices.apply_statuses(transaction, batch.statuses, now)
        self._devices.apply_births(transaction, batch.births, now)
        self._devices.mark_seen(transaction, batch.seen, now)
        self._results.store(transaction, batch.results, now)
        strange = [*map(_taken, added.conflicts), *map(_twin, added.duplicates)]
        quarantine(transaction, [*batch.refused, *strange], now)
        return complete, strange

    def _hold(self, transaction: Transaction, batch: Batch, now: float) -> None:
        """All devices of which anything is to be changed: another collector's batch may be of the same."""
        states = batch.statuses.keys() | batch.births.keys() | batch.seen
        reporting = {(stream.fleet, stream.device) for stream in {each.stream for each in batch.entries}}
        ids = self._identities.get_or_create(
            transaction, states | reporting | {name for name, _, _ in batch.results}, now
        )
        changing = states | self._reports.boards_with_new_streams(transaction, batch.entries, ids)
        self._devices.lock(transaction, [ids[name] for name in changing])


def _taken(report: Report) -> Refused:
    stream = report.stream
    found = f"epoch {stream.epoch} number {report.seq} a second time, with another document; two boards of one name?"
    return Refused(stream.fleet, stream.device, "event", "fleet.conflict", found, report.document.encode())


def _twin(stream: Stream) -> Refused:
    found = f"epoch {stream.epoch} goes on beside a later one; two boards of one name, or somebody who uses it?"
    return Refused(stream.fleet, stream.device, "event", "fleet.twin", found, b"")


DAYS = 30.0
_DAY_S = 86_400.0
_ROWS = 2000  # that go at once
_LOOK_S = 60.0  # between two looks, once nothing is old
_BY_AGE = {"reports": "received", "results": "received", "quarantine": "received"}
# Numbers of starts of which nothing came for so long, but for a device's newest.
_ENDED = "heard < ? AND epoch < (SELECT d.epoch FROM devices d WHERE d.id = progress.device)"
_ORPHANS = "NOT EXISTS (SELECT 1 FROM progress p WHERE p.device = dropped.device AND p.epoch = dropped.epoch)"


class ReportRetention:
    """days: that rows are kept after they came, by our clock; the record of who did what is kept for good."""

    def __init__(self, days: float = DAYS) -> None:
        self._days = days
        self._look_at = -math.inf

    def prune_if_due(self, store: FleetStore, now: float) -> None:
        """Let some of it go, if it is time to. now: Unix time in s. Raises AgentError as the store does."""
        if now < self._look_at:
            return
        before = now - self._days * _DAY_S
        if write_with_retries(store, lambda transaction: _prune(transaction, before)):
            self._look_at = now + _LOOK_S


def _prune(transaction: Transaction, before: float) -> bool:
    """Whether that was all."""
    gone = [transaction.prune(table, column, before, _ROWS) for table, column in _BY_AGE.items()]
    if max(gone) == _ROWS:
        return False
    if transaction.execute_count(f"DELETE FROM progress WHERE {_ENDED}", (before,)):
        transaction.execute(f"DELETE FROM dropped WHERE {_ORPHANS}")
    return True
