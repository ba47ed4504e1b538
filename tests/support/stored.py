"""Puts reports and results into a fleet's store as a collector would, and reads what lies there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from agent.contract.commands import CommandResult
from fleet.devices import records, reports
from fleet.devices.devices import Devices, Name
from fleet.devices.reports import AddedReports, Gap, Report, Stream
from fleet.store.transaction import FleetStore, Row, Transaction, write_with_retries


class Reports(reports.Reports):
    """Of one store; `add` is a transaction of its own."""

    def __init__(self, store: FleetStore) -> None:
        super().__init__(store)
        self._store, self._devices = store, Devices(store)

    def put(self, transaction: Transaction, entries: Sequence[Report | Gap], now: float) -> AddedReports:
        names = {(each.stream.fleet, each.stream.device) for each in entries}
        return self.insert(transaction, entries, self._devices.ids(transaction, names, now), now)

    def add(self, entries: Sequence[Report | Gap]) -> dict[Stream, int]:
        """Up to which number each of the streams is complete."""
        return dict(write_with_retries(self._store, lambda each: self.put(each, entries, time.time())).complete)

    def position(self, fleet: str, device: str) -> tuple[int, int]:
        with self._store.transaction("read") as transaction:
            return self.positions(transaction, [(fleet, device)])[fleet, device]

    def reports_of(self, fleet: str, device: str) -> Iterator[Report]:
        """In the order of their numbers."""
        query = "SELECT epoch, seq, kind, ts, document FROM reports r"
        for epoch, *rest in self._rows(query, "epoch, seq", fleet, device):
            yield Report(Stream(fleet, device, epoch), *rest)

    def gaps_of(self, fleet: str, device: str) -> list[Gap]:
        """In their order."""
        rows = self._rows("SELECT epoch, first, last, kind, n FROM dropped r", "epoch, first, kind", fleet, device)
        return [Gap(Stream(fleet, device, epoch), *rest) for epoch, *rest in rows]

    def _rows(self, query: str, order: str, fleet: str, device: str) -> list[Row]:
        where = f"WHERE r.device = (SELECT id FROM devices WHERE fleet = ? AND name = ?) ORDER BY {order}"
        with self._store.transaction("read") as transaction:
            return transaction.execute(f"{query} {where}", (fleet, device))


def store_results(store: FleetStore, transaction: Transaction, name: Name, *results: CommandResult) -> None:
    """Of one device, the older first."""
    device = Devices(store).ids(transaction, {name}, 1.0)[name]
    records.store_results(transaction, [(device, each, each.to_json().decode()) for each in results], 1.0)
