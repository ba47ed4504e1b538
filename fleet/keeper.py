"""Stores what boards sent, in one transaction: all of it, or nothing."""

from __future__ import annotations

import logging
import time

from fleet.batch import Batch
from fleet.devices import Devices
from fleet.records import Refused, Results, quarantine
from fleet.reports import Report, Reports, Stream
from fleet.store import Store

log = logging.getLogger(__name__)


class Keeper:
    """For one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._reports, self._devices, self._results = Reports(store), Devices(store), Results(store)

    def keep(self, batch: Batch) -> dict[Stream, int]:
        """Store a batch; how far the boards are that it is of, and those that came online. Raises AgentError."""
        now = time.time()
        with self._store.begun("write") as transaction:
            added = self._reports.take(transaction, batch.news, now)
            complete = dict(added.complete)
            silent = batch.arrivals - {(stream.fleet, stream.device) for stream in complete}
            for name, (epoch, upto) in self._reports.newest(transaction, silent).items():
                complete[Stream(*name, epoch)] = upto
            self._devices.told_status(transaction, batch.statuses, now)
            self._devices.told_birth(transaction, batch.births, now)
            self._results.take(transaction, batch.results, now)
            strange = [*map(_taken, added.taken), *map(_twin, added.twins)]
            quarantine(transaction, [*batch.refused, *strange], now)
        for each in strange:
            log.warning("collector=%s device=%s/%s found=%r", each.code, each.fleet, each.device, each.found)
        return complete


def _taken(report: Report) -> Refused:
    stream = report.stream
    found = f"epoch {stream.epoch} number {report.seq} a second time, with another document; two boards of one name?"
    return Refused(stream.fleet, stream.device, "event", "fleet.conflict", found, report.document.encode())


def _twin(stream: Stream) -> Refused:
    found = f"epoch {stream.epoch} goes on beside a later one; two boards of one name, or somebody who uses it?"
    return Refused(stream.fleet, stream.device, "event", "fleet.twin", found, b"")
