"""Make text from strangers safe to store, show and log."""

from __future__ import annotations

import logging
import math
from collections import Counter

from agent.common.clock import SYSTEM_CLOCK, Clock

_MOST_LINES = 10  # lines of a kind in a period
_PERIOD_S = 60.0


def printable(text: str, most: int = 256) -> str:
    """Return the first `most` characters, without the unprintable ones.

    The result holds no control sequence for a terminal, and every database accepts it as text.
    """
    return "".join(char for char in text[:most] if char.isprintable())


class Warnings:
    """Log warnings that begin with `{subject}={kind}`, at most ten of a kind in a minute."""

    def __init__(self, log: logging.Logger, subject: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._log = log
        self._subject = subject
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._period_start_s = -math.inf

    def warn(self, kind: str, words: str) -> None:
        """Log this line, unless too many of its kind came already. kind: one of a few constants."""
        self.tick()
        self._counts[kind] += 1
        if self._counts[kind] <= _MOST_LINES:
            self._log.warning("%s=%s %s", self._subject, kind, words)

    def tick(self) -> None:
        """At the end of a period, log how many lines of each kind were left out."""
        now_s = self._clock.monotonic_s()
        if now_s - self._period_start_s < _PERIOD_S:
            return
        for kind, count in self._counts.items():
            if count > _MOST_LINES:
                seconds = now_s - self._period_start_s
                self._log.warning("%s=%s more=%d seconds=%.0f", self._subject, kind, count - _MOST_LINES, seconds)
        self._counts.clear()
        self._period_start_s = now_s
