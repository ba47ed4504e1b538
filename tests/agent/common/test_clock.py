"""The clock of the machine, and the one that tests turn: both wait alike."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from turned_clock import TurnedClock


def test_a_wait_on_the_turned_clock_lasts_until_it_is_turned() -> None:
    clock = TurnedClock()
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(clock.wait, threading.Event(), 3600.0)
        clock.until_waiting()
        clock.turn(3599.0)
        assert clock.waiting == 1
        clock.turn(1.0)
        assert not ended.result()


def test_a_notified_condition_ends_the_wait_before_the_turned_time() -> None:
    clock, condition, ready = TurnedClock(), threading.Condition(), list[int]()

    def wait() -> bool:
        with condition:
            return clock.wait_for(condition, lambda: bool(ready), 3600.0)

    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(wait)
        clock.until_waiting()
        with condition:
            ready.append(1)
            condition.notify_all()
        assert ended.result()
        assert clock.waiting == 0


def test_a_clock_that_is_set_lets_no_time_pass() -> None:
    clock = TurnedClock()
    begun_s = clock.monotonic_s()
    clock.set_wall(0.0)
    assert (clock.wall_s(), clock.monotonic_s()) == (0.0, begun_s)
