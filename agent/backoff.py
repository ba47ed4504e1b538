"""Delays between attempts that keep failing: exponential, capped, with full jitter."""

from __future__ import annotations

import random


class Backoff:
    """Draws each delay uniformly from [0, ceiling]; the ceiling doubles with every draw up to a cap.

    Full jitter keeps a fleet that lost its broker in one instant from returning in one instant
    (M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015).
    """

    def __init__(self, first_s: float = 1.0, cap_s: float = 60.0, rng: random.Random | None = None) -> None:
        self._first_s = first_s
        self._cap_s = cap_s
        self._rng = rng or random.Random()
        self._ceiling_s = first_s

    def next_s(self) -> float:
        """The delay before the next attempt, in seconds."""
        delay_s = self._rng.uniform(0.0, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2.0, self._cap_s)
        return delay_s

    def reset(self) -> None:
        """Start over, after an attempt that lasted."""
        self._ceiling_s = self._first_s
