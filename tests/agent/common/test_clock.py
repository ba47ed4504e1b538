"""The clock of the machine, and the one that tests turn: both wait alike."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from turned_clock import TurnedClock

from agent.common.clock import SYSTEM_CLOCK, Clock

BOTH = pytest.mark.parametrize("clock", [SYSTEM_CLOCK, TurnedClock()], ids=["machine", "turned"])


@BOTH
def test_a_wait_ends_early_for_what_is_there(clock: Clock) -> None:
    event, condition, items = threading.Event(), threading.Condition(), queue.Queue[int]()
    event.set()
    items.put(1)
    assert clock.wait(event, 1e6)
    with condition:
        assert clock.wait_for(condition, lambda: True, 1e6)
    assert clock.get(items, 1e6) == 1
    with selectors.DefaultSelector() as selector, socket.socket() as unconnected:
        selector.register(unconnected, selectors.EVENT_WRITE)
        assert clock.select(selector, 1e6)


@BOTH
def test_a_wait_without_time_returns_at_once(clock: Clock) -> None:
    condition = threading.Condition()
    assert not clock.wait(threading.Event(), 0.0)
    with condition:
        assert not clock.wait_for(condition, lambda: False, 0.0)
    with pytest.raises(queue.Empty):
        clock.get(queue.Queue[int](), 0.0)
    with selectors.DefaultSelector() as selector:
        assert not clock.select(selector, 0.0)


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
