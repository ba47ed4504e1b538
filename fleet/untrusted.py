"""Text that strangers chose, for where it is stored and shown."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable


def printable(text: str, most: int = 256) -> str:
    """Its first `most` characters, without those that are none to print: no terminal takes it for an order, and every
    database for text."""
    return "".join(char for char in text[:most] if char.isprintable())


_MOST = 10  # of a kind
_PERIOD_S = 60.0  # in which so many are told


class Warnings:
    """Lines that begin with `{subject}={kind}`. clock: monotonic, in s."""

    def __init__(self, log: logging.Logger, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._subject = subject
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._began_s = -math.inf

    def warn(self, kind: str, words: str) -> None:
        """kind: one of few."""
        self.tick()
        self._counts[kind] += 1
        if self._counts[kind] <= _MOST:
            self._log.warning("%s=%s %s", self._subject, kind, words)

    def tick(self) -> None:
        """Tell, once it is time to, how many were left out."""
        now_s = self._clock()
        if now_s - self._began_s < _PERIOD_S:
            return
        for kind, count in self._counts.items():
            if count > _MOST:
                seconds = now_s - self._began_s
                self._log.warning("%s=%s more=%d seconds=%.0f", self._subject, kind, count - _MOST, seconds)
        self._counts.clear()
        self._began_s = now_s
