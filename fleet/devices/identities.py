"""The short numbers by which the store knows devices."""

from __future__ import annotations

from collections.abc import Set

from fleet.store import FleetStore, Transaction

Name = tuple[str, str]  # fleet, device
_MOST = 200_000  # remembered


class Identities:
    """Remembers them, for a row has one and a message has names.

    What was given away in a transaction that came to nothing is forgotten: after that the store connects anew.
    """

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._generation = 0
        self._known: dict[Name, int] = {}

    def of(self, transaction: Transaction, names: Set[Name], now: float) -> dict[Name, int]:
        """The number of each of these devices; who has none yet is given one, first seen `now` (Unix time in s), and
        not heard so far."""
        if self._generation != self._store.generation or len(self._known) > _MOST:
            self._known.clear()
            self._generation = self._store.generation
        ids = {name: self._known[name] for name in names if name in self._known}
        if len(ids) == len(names):
            return ids
        ids.update(_found(transaction, names - ids.keys()))
        if new := names - ids.keys():
            query = (
                "INSERT INTO devices (fleet, name, first_seen, last_seen) VALUES (?, ?, ?, 0.0) "
                "ON CONFLICT (fleet, name) DO NOTHING"
            )
            transaction.execute_many(query, [(*name, now) for name in sorted(new)])
            ids.update(_found(transaction, new))
        self._known.update(ids)
        return ids


def _found(transaction: Transaction, names: Set[Name]) -> dict[Name, int]:
    found = transaction.lookup("devices", ("fleet", "name"), ("id",), names)
    return {(fleet, name): int(row[0]) for (fleet, name), row in found.items()}
