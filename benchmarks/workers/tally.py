"""What a peer's loop counts: frames per second, latency, and how many objects it found."""

from __future__ import annotations

import time

import numpy as np


class Tally:
    """Counts nothing for `warm_s` after the first frame, and then for `seconds`."""

    def __init__(self, warm_s: float, seconds: float) -> None:
        self._warm_s, self._seconds = warm_s, seconds
        self._first_s = 0.0
        self._began_s = self._ended_s = 0.0
        self._latencies_s: list[float] = []
        self._found = 0

    def add(self, latency_s: float, found: int) -> bool:
        """A frame has been answered; whether more are wanted."""
        now = time.monotonic()
        self._first_s = self._first_s or now
        if now - self._first_s < self._warm_s:
            return True
        if not self._began_s:
            self._began_s = now
            return True
        self._ended_s = now
        self._latencies_s.append(latency_s)
        self._found += found
        return now - self._began_s < self._seconds

    def result(self) -> dict[str, float]:
        """fps, p50_ms, p99_ms, and objects per frame."""
        frames = len(self._latencies_s)
        p50_ms, p99_ms = np.percentile(self._latencies_s, (50.0, 99.0)) * 1e3
        return {
            "fps": frames / (self._ended_s - self._began_s),
            "p50_ms": float(p50_ms),
            "p99_ms": float(p99_ms),
            "found": self._found / frames,
        }
