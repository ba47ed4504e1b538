"""Two boards of one name: a start that goes on though a later one has begun."""

from __future__ import annotations

from collections.abc import Mapping

from fleet.progress import Key, Step
from fleet.store import Store, Transaction

_MOST = 200_000  # remembered


class Twins:
    """An epoch is a start's (see agent/outbox_store.py): a board has one that goes on, and may have older ones to send
    from the disk. What was written, by the board's own clock, after the newest epoch's newest is of another board: one
    that was cloned, or somebody who uses its name. A clock that was set back looks the same; nothing is refused for it.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._generation = 0
        self._newest: dict[int, int] = {}  # epochs, by device
        self._told: set[Key] = set()

    def among(self, transaction: Transaction, steps: Mapping[Key, Step]) -> list[Key]:
        """Which streams are a twin's, each told once."""
        self._learn(transaction, steps)
        late = {
            key: step for key, step in steps.items() if step.went_on and key[1] < self._newest[key[0]] and step.ts > 0.0
        }
        if not late:
            return []
        newest = {(device, self._newest[device]) for device, _ in late}
        found = transaction.lookup("progress", ("device", "epoch"), ("ts",), newest)
        ends = {key[0]: row[0] for key, row in found.items()}
        twins = [key for key, step in late.items() if 0.0 < ends.get(key[0], 0.0) < step.ts and key not in self._told]
        self._told.update(twins)
        return twins

    def _learn(self, transaction: Transaction, steps: Mapping[Key, Step]) -> None:
        if self._generation != self._store.generation or len(self._newest) > _MOST or len(self._told) > _MOST:
            self._newest.clear()
            self._told.clear()
            self._generation = self._store.generation
        unknown = {(device,) for device, _ in steps if device not in self._newest}
        if unknown:
            found = transaction.lookup("devices", ("id",), ("epoch",), unknown)
            self._newest.update({int(key[0]): int(row[0]) for key, row in found.items()})
        for device, epoch in steps:
            if epoch > self._newest.get(device, 0):
                self._newest[device] = epoch
