"""How much may be sent at once, and from then on."""

from __future__ import annotations

import time


class Allowance:
    """So many per second, and as many at once after a second without."""

    def __init__(self, per_s: float) -> None:
        self._per_s = per_s
        self._left = per_s
        self._counted_s = time.monotonic()

    @property
    def has_one(self) -> bool:
        """Whether one more is allowed now."""
        now = time.monotonic()
        self._left = min(self._per_s, self._left + (now - self._counted_s) * self._per_s)
        self._counted_s = now
        return self._left >= 1.0

    def spend(self) -> None:
        """That one."""
        self._left -= 1.0
