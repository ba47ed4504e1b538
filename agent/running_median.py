"""The median of the newest values, kept in order so that the next one costs no sorting."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class RunningMedian:
    """Of `window` values at most; none may be NaN."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._newest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> float:
        """The median with this value; of an even number the upper one."""
        if len(self._newest) == self._window:
            del self._ordered[bisect_left(self._ordered, self._newest.popleft())]
        self._newest.append(value)
        insort(self._ordered, value)
        return self._ordered[len(self._ordered) // 2]
