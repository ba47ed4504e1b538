"""A clock that a test turns by hand: what waits for a time waits until the test has turned the clock to it."""

from __future__ import annotations

import queue
import selectors
import threading
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

from agent.common.clock import Clock

T = TypeVar("T")
_POLL_S = 0.001  # how soon a waiting thread sees that the clock was turned
_LIMIT_S = 60.0  # of real time, for what a test waits for; a test that needs it has failed


class TurnedClock(Clock):
    """Stands still until `turn`. Any number of threads may wait on it.

    A wait that is over before its time, since its event is set or its predicate holds, returns at once, as ever.

    >>> clock = TurnedClock()
    >>> clock.turn(5.0)
    >>> clock.monotonic_s() - TurnedClock().monotonic_s()
    5.0
    """

    def __init__(self, monotonic_s: float = 1_000.0, wall_s: float = 1_750_000_000.0) -> None:
        self._monotonic_s, self._wall_s = monotonic_s, wall_s
        self._ends_s: list[float] = []  # when the waits end that are under way
        self._lock = threading.Condition()

    def monotonic_s(self) -> float:
        return self._monotonic_s

    def monotonic_ns(self) -> int:
        return round(self._monotonic_s * 1e9)

    def wall_s(self) -> float:
        return self._wall_s

    def turn(self, seconds: float) -> None:
        """Let so many seconds pass."""
        with self._lock:
            self._monotonic_s += seconds
            self._wall_s += seconds

    def set_wall(self, wall_s: float) -> None:
        """Set the clock as a person or a time server would: the wall's time jumps, no time passes."""
        with self._lock:
            self._wall_s = wall_s

    def turn_until(self, predicate: Callable[[], bool], step_s: float = 0.1, most_s: float = 3600.0) -> None:
        """Turn step by step until the predicate holds. Fails where it does not after `most_s` of this clock."""
        ends_s = self._monotonic_s + most_s
        while not predicate():
            assert self._monotonic_s < ends_s, f"not within {most_s} s of the turned clock"
            self.turn(step_s)
            time.sleep(_POLL_S)  # for the threads that were woken

    def until_waiting(self) -> None:
        """Return once a thread waits for a time of this clock that has not come."""
        give_up_s = time.monotonic() + _LIMIT_S
        while not self.waiting:
            assert time.monotonic() < give_up_s, "no thread waits on the clock"
            time.sleep(_POLL_S)

    @property
    def waiting(self) -> int:
        """How many threads wait for a time that has not come."""
        with self._lock:
            return sum(each > self._monotonic_s for each in self._ends_s)

    def sleep(self, seconds: float) -> None:
        self.wait(threading.Event(), seconds)

    def wait(self, event: threading.Event, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            return event.wait()
        return self._poll(lambda: event.wait(_POLL_S), timeout_s)

    def wait_for(
        self, condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        if timeout_s is None:
            return condition.wait_for(predicate)
        return self._poll(lambda: condition.wait_for(predicate, _POLL_S), timeout_s)

    def get(self, items: queue.Queue[T], timeout_s: float | None = None) -> T:
        if timeout_s is None:
            return items.get()
        got: list[T] = []

        def one() -> bool:
            try:
                got.append(items.get(timeout=_POLL_S))
            except queue.Empty:
                return False
            return True

        if not self._poll(one, timeout_s):
            raise queue.Empty
        return got[0]

    def select(
        self, selector: selectors.BaseSelector, timeout_s: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout_s is None:
            return selector.select()
        ready: list[tuple[selectors.SelectorKey, int]] = []

        def some() -> bool:
            ready[:] = selector.select(_POLL_S)
            return bool(ready)

        self._poll(some, timeout_s)
        return ready

    def _poll(self, attempt: Callable[[], bool], timeout_s: float) -> bool:
        """Attempt, for a moment of real time each, until it succeeds or the time has come; at least once."""
        ends_s = self._monotonic_s + timeout_s
        with self._lock:
            self._ends_s.append(ends_s)
        try:
            while not attempt():
                if self._monotonic_s >= ends_s:
                    return attempt()
            return True
        finally:
            with self._lock:
                self._ends_s.remove(ends_s)


@pytest.fixture
def clock() -> TurnedClock:
    return TurnedClock()
