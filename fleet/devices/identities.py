"""Give each device a short number, by which the store's tables know it."""

from __future__ import annotations

from collections.abc import Set
from typing import TypeVar

from fleet.store.transaction import FleetStore, Transaction

Name = tuple[str, str]  # fleet, device
K = TypeVar("K")
V = TypeVar("V")

_MOST_REMEMBERED = 200_000


class RowCache(dict[K, V]):
    """Remember facts about rows for as long as they hold: within one connection of the store.

    Rows written in a transaction that failed are forgotten too, because the store then connects again.
    """

    def __init__(self, store: FleetStore) -> None:
        super().__init__()
        self._store = store
        self._generation = 0

    def validate(self) -> None:
        """Forget everything after a new connection, or once too much is remembered. Call it before each use."""
        if self._generation != self._store.generation or len(self) > _MOST_REMEMBERED:
            self.clear()
            self._generation = self._store.generation


class Identities:
    """Look up the numbers of devices, and remember them: a row has a number, a message has names."""

    def __init__(self, store: FleetStore) -> None:
        self._known: RowCache[Name, int] = RowCache(store)

    def get_or_create(self, transaction: Transaction, names: Set[Name], now: float) -> dict[Name, int]:
        """Return the number of each device. A new device gets one: first seen `now` (Unix time in s), not heard yet."""
        self._known.validate()
        ids = {name: self._known[name] for name in names if name in self._known}
        if len(ids) == len(names):
            return ids
        ids.update(_lookup(transaction, names - ids.keys()))
        if new := names - ids.keys():
            query = (
                "INSERT INTO devices (fleet, name, first_seen, last_seen) VALUES (?, ?, ?, 0.0) "
                "ON CONFLICT (fleet, name) DO NOTHING"
            )
            transaction.execute_many(query, [(*name, now) for name in sorted(new)])
            ids.update(_lookup(transaction, new))
        self._known.update(ids)
        return ids


def _lookup(transaction: Transaction, names: Set[Name]) -> dict[Name, int]:
    rows = transaction.lookup("devices", ("fleet", "name"), ("id",), names)
    return {(fleet, name): int(row[0]) for (fleet, name), row in rows.items()}
