"""When something that recurs is due, on the monotonic clock."""

from __future__ import annotations


class Cadence:
    """Every `period_s` seconds from `now_s` on. What was missed is not made up for: it would come in one burst."""

    def __init__(self, period_s: float, now_s: float) -> None:
        self._period_s = period_s
        self._next_s = now_s + period_s

    def due(self, now_s: float) -> bool:
        """True once each period."""
        if now_s < self._next_s:
            return False
        self._next_s += self._period_s
        if self._next_s <= now_s:
            self._next_s = now_s + self._period_s
        return True

    def change(self, period_s: float, now_s: float) -> None:
        """Another period, from now on."""
        if period_s != self._period_s:
            self._period_s, self._next_s = period_s, now_s + period_s
