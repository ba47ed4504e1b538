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
        self._began_cpu_s = self._ended_cpu_s = 0.0
        self._latencies_s: list[float] = []
        self._found = 0

    def add(self, latency_s: float, found: int) -> bool:
        """A frame has been answered; whether more are wanted."""
        now = time.monotonic()
        self._first_s = self._first_s or now
        if now - self._first_s < self._warm_s:
            return True
        if not self._began_s:
            self._began_s, self._began_cpu_s = now, time.process_time()
            return True
        self._ended_s, self._ended_cpu_s = now, time.process_time()
        self._latencies_s.append(latency_s)
        self._found += found
        return now - self._began_s < self._seconds

    def result(self) -> dict[str, float]:
        """fps, p50_ms, p99_ms, cpu_ms of all threads for each frame, and objects per frame."""
        frames = len(self._latencies_s)
        p50_ms, p99_ms = np.percentile(self._latencies_s, (50.0, 99.0)) * 1e3
        return {
            "fps": frames / (self._ended_s - self._began_s),
            "p50_ms": float(p50_ms),
            "p99_ms": float(p99_ms),
            "cpu_ms": 1e3 * (self._ended_cpu_s - self._began_cpu_s) / frames,
            "found": self._found / frames,
        }
