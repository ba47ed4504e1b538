"""How long reports are kept: what is older goes, a few rows at a time between two batches."""

from __future__ import annotations

import math

from fleet.store import Store, Transaction, written

DAYS = 30.0
_DAY_S = 86_400.0
_ROWS = 2000  # that go at once
_LOOK_S = 60.0  # between two looks, once nothing is old
_BY_AGE = {"reports": "received", "results": "received", "quarantine": "received"}
# Numbers of starts of which nothing came for so long, but for a device's newest.
_ENDED = "heard < ? AND epoch < (SELECT d.epoch FROM devices d WHERE d.id = progress.device)"
_ORPHANS = "NOT EXISTS (SELECT 1 FROM progress p WHERE p.device = dropped.device AND p.epoch = dropped.epoch)"


class Retention:
    """days: that rows are kept after they came, by our clock; the record of who did what is kept for good."""

    def __init__(self, days: float = DAYS) -> None:
        self._days = days
        self._look_at = -math.inf

    def keep(self, store: Store, now: float) -> None:
        """Let some of it go, if it is time to. now: Unix time in s. Raises AgentError as the store does."""
        if now < self._look_at:
            return
        before = now - self._days * _DAY_S
        if written(store, lambda transaction: _prune(transaction, before)):
            self._look_at = now + _LOOK_S


def _prune(transaction: Transaction, before: float) -> bool:
    """Whether that was all."""
    gone = [transaction.prune(table, column, before, _ROWS) for table, column in _BY_AGE.items()]
    if max(gone) == _ROWS:
        return False
    if transaction.changed(f"DELETE FROM progress WHERE {_ENDED}", (before,)):
        transaction.execute(f"DELETE FROM dropped WHERE {_ORPHANS}")
    return True
