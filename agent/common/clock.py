"""Read the time and wait for it: `Clock` is the one place where tared meets the machine's clock. `Waker` ends a wait.

Code that decides by the time takes a `Clock`, so a test can turn one by hand (tests/support/turned_clock.py). Code that
only measures how long its own work takes may read `time` itself.
"""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """The clock of this machine.

    >>> clock = Clock()
    >>> begun_s = clock.monotonic_s()
    >>> clock.wait(threading.Event(), timeout_s=0.0)
    False
    >>> clock.monotonic_s() >= begun_s
    True
    """

    def monotonic_s(self) -> float:
        """Return seconds that only ever grow, from an arbitrary beginning."""
        return time.monotonic()

    def monotonic_ns(self) -> int:
        """Return `monotonic_s` in nanoseconds."""
        return time.monotonic_ns()

    def wall_s(self) -> float:
        """Return Unix time. It jumps when somebody sets the clock."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        """Return after so many seconds."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, timeout_s: float | None = None) -> bool:
        """Wait until the event is set; return False if that takes longer than `timeout_s`. None: no limit."""
        return event.wait(timeout_s)

    def wait_for(
        self, condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        """Wait until the predicate holds, and return what it returns then, or after `timeout_s`. None: no limit.

        The caller holds the condition's lock. The predicate is evaluated at each notification.
        """
        return condition.wait_for(predicate, timeout_s)

    def get(self, items: queue.Queue[T], timeout_s: float | None = None) -> T:
        """Take the next item of a queue. Raises queue.Empty if none comes within `timeout_s`. None: no limit."""
        return items.get(timeout=timeout_s)

    def select(
        self, selector: selectors.BaseSelector, timeout_s: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait until a registered file is ready; return those that are, none after `timeout_s`. None: no limit."""
        return selector.select(timeout_s)


SYSTEM_CLOCK = Clock()


class Waker:
    """Ends the waits of one thread, on request of any.

    Attributes:
        socket: What the thread waits for beside its other sockets; readable once somebody has called `wake`.
    """

    def __init__(self) -> None:
        """Raises OSError without a descriptor to spare."""
        self.socket, self._sender = socket.socketpair()
        self.socket.setblocking(False)
        self._sender.setblocking(False)

    def wake(self) -> None:
        """End the present wait, or the next one."""
        with suppress(OSError):  # full: it has been woken often enough; closed: the thread has ended
            self._sender.send(b"\0")

    def clear(self) -> None:
        """Take notice of all calls of `wake` so far."""
        with suppress(BlockingIOError):
            self.socket.recv(4096)

    def sleep(self, clock: Clock, seconds: float | None) -> None:
        """Wait until somebody calls `wake`, or the time is over; None: no limit."""
        with selectors.PollSelector() as selector:  # it takes no descriptor, of which there may be none
            selector.register(self.socket, selectors.EVENT_READ)
            clock.select(selector, seconds)
        self.clear()

    def close(self) -> None:
        self.socket.close()
        self._sender.close()
