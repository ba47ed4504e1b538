"""Timing of work that recurs or is tried again, and the part of its record that is kept.

PeriodicTimer, RandomInterval, Backoff and RetryState decide when; `thinned` keeps a record bounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from calibrate.errors import TaredError

T = TypeVar("T")


class PeriodicTimer:
    """Due every `period_s` seconds of the monotonic clock. Missed periods are not made up for in a burst."""

    def __init__(self, period_s: float, now_s: float) -> None:
        self._period_s = period_s
        self._next_s = now_s + period_s

    def due(self, now_s: float) -> bool:
        """Return True once each period."""
        if now_s < self._next_s:
            return False
        self._next_s += self._period_s
        if self._next_s <= now_s:
            self._next_s = now_s + self._period_s
        return True

    def set_period(self, period_s: float, now_s: float) -> None:
        """Set another period, which starts now; the same one changes nothing."""
        if period_s != self._period_s:
            self._period_s, self._next_s = period_s, now_s + period_s


class RandomInterval:
    """Decides when the next frame is due, in capture time; the gaps are random, so no rhythm of the scene is aliased.

    Gaps are uniform on [0.5, 1.5] periods. If the clock jumps backwards (a file that starts over), a frame is due.
    """

    def __init__(self, period_s: float, seed: int = 0) -> None:
        self.period_s = period_s
        self._random = random.Random(seed)
        self._last = float("-inf")
        self._due = float("-inf")

    def due(self, ts: float) -> bool:
        """Return True when a frame of capture time `ts` should be observed; the next gap then starts at it."""
        if self._last <= ts < self._due:
            self._last = ts
            return False
        self._last = ts
        self._due = ts + self.period_s * self._random.uniform(0.5, 1.5)
        return True

    def set_period(self, period_s: float) -> None:
        """Change the period from now on; the next frame is due at once."""
        self.period_s = period_s
        self._due = float("-inf")


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
        """Return the delay before the next attempt, in seconds."""
        delay_s = self._rng.uniform(0.0, self._ceiling_s)
        self._ceiling_s = min(self._ceiling_s * 2.0, self._cap_s)
        return delay_s

    def reset(self) -> None:
        """Start over, after an attempt that lasted."""
        self._ceiling_s = self._first_s


# Codes after which nothing works on the GPU any more in this process.
_GPU_LOST = ("cuda.device", "cuda.launch", "engine.run")


class RetryState:
    """Counts the failures and successes of one thing. One thread calls it; any may read `code`.

    Args:
        on_change: Called with the error that starts an outage, and with None at its end.
        backoff: The pauses before further attempts.
        well_after: Successes in a row that end an outage. With more than one, a thing that fails now and then fills no
            log, and is tried ever less often.
    """

    def __init__(self, on_change: Callable[[TaredError | None], None], backoff: Backoff, well_after: int) -> None:
        self._on_change = on_change
        self._backoff = backoff
        self._well_after = well_after
        self._successes = 0
        self.code = ""  # code of the newest error of an outage; empty while there is none

    def note_failure(self, error: TaredError) -> float:
        """Count a failure; return the pause before the next attempt, in seconds."""
        is_first = not self.code
        self.code, self._successes = error.code, 0
        if is_first:
            self._on_change(error)
        return self._backoff.next_s()

    def note_success(self) -> None:
        """Count a success."""
        if not self.code:
            return
        self._successes += 1
        if self._successes == self._well_after:
            self.code = ""
            self._backoff.reset()
            self._on_change(None)


def is_final(error: TaredError) -> bool:
    """Return True if only a new process can help: the error, or a cause of it, says that the GPU is lost."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TaredError) and cause.code in _GPU_LOST:
            return True
        cause = cause.__cause__
    return False


def thinned(rows: Sequence[T], most: int) -> list[T]:
    """Return rows as they are up to `most` of them; of more, every second one of the older half goes.

    Rows that are added and thinned again and again lie ever further apart towards the past.

    >>> thinned([1, 2, 3, 4, 5, 6], 5)
    [1, 3, 4, 5, 6]
    """
    middle = len(rows) // 2
    return list(rows) if len(rows) <= most else [*rows[:middle:2], *rows[middle:]]
