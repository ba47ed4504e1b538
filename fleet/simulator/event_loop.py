"""Serve thousands of connections in one thread: a selector, timers, and a few threads that dial.

A connection takes a blocking connect and, with TLS, a handshake. Other threads do that; the loop receives the outcome.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import selectors
import socket
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any

DIALLERS = 16
_LONGEST_WAIT_S = 0.1
_STOP_CHECK_S = 0.1
_MOST_UNDER_WAY = 200  # attempts: a machine that starts more than it can finish in time finishes none
_SWITCH_S = 0.0005
_LONGEST_TIMERS_S = 0.05  # for timers at a time: brokers wait for answers meanwhile

Action = Callable[[], None]
Handle = Callable[[int], None]  # takes the events of `selectors` that a socket is ready for


class Timer:
    """An action of `Loop.call_at`, which can be cancelled."""

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        """Drop the action."""
        self.action = None


class Loop:
    """The event loop, a context manager. Only `call_soon` may be called by other threads."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._soon: deque[Action] = deque()
        self._waker, self._wakee = socket.socketpair()
        self._waker.setblocking(False)
        self._wakee.setblocking(False)
        self._selector.register(self._wakee, selectors.EVENT_READ, self._woken)
        self._diallers = ThreadPoolExecutor(DIALLERS, "dial")
        self._waiting: deque[tuple[Action, Callable[[Exception | None], None]]] = deque()
        self._under_way = 0
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> Loop:
        # A dialling thread waits for the interpreter after each exchange with the network, behind a loop that is always
        # busy; so threads switch more often than by default.
        sys.setswitchinterval(_SWITCH_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.setswitchinterval(self._switch_s)
        self._diallers.shutdown(cancel_futures=True)
        self._selector.close()
        self._waker.close()
        self._wakee.close()

    def call_at(self, at_s: float, action: Action) -> Timer:
        """Run an action at this monotonic time, or as soon as possible after it."""
        timer = Timer(at_s, action)
        heapq.heappush(self._timers, (at_s, next(self._numbers), timer))
        return timer

    def call_soon(self, action: Action) -> None:
        """Run an action in the loop's thread; any thread may call this."""
        self._soon.append(action)
        if len(self._soon) == 1:  # else the one that queued the first has woken the loop
            with contextlib.suppress(BlockingIOError):
                self._waker.send(b"\0")

    def dial(self, attempt: Action, then: Callable[[Exception | None], None]) -> None:
        """Let another thread attempt a connection, in its turn.

        Args:
            attempt: Runs in the other thread.
            then: Called in the loop with the exception of `attempt`, or None. Once the attempt has succeeded or failed
                for good, `dial_finished` must be called.
        """
        self._waiting.append((attempt, then))
        self._dial_next()

    def dial_finished(self) -> None:
        """Note that one attempt less is under way."""
        self._under_way -= 1
        self._dial_next()

    def _dial_next(self) -> None:
        while self._waiting and self._under_way < _MOST_UNDER_WAY:
            self._under_way += 1
            self._diallers.submit(self._attempt, *self._waiting.popleft())

    def _attempt(self, attempt: Action, then: Callable[[Exception | None], None]) -> None:
        error = None
        try:
            attempt()
        except Exception as caught:  # `then` gets it, whatever it is
            error = caught
        self.call_soon(partial(then, error))
        error = None  # its traceback holds this frame

    def watch(self, sock: Any, handle: Handle) -> int:
        """Call `handle` when a socket can be read; return its number, which a closed socket has no longer."""
        return self._selector.register(sock, selectors.EVENT_READ, handle).fd

    def watch_events(self, fd: int, events: int, handle: Handle) -> None:
        """Watch a socket that is watched already for these events from now on."""
        self._selector.modify(fd, events, handle)

    def unwatch(self, fd: int) -> None:
        """Stop watching a socket, which may be closed already."""
        self._selector.unregister(fd)

    def run(self, until: Callable[[], bool]) -> None:
        """Run until `until` returns True; it is called several times a second."""
        checked_s = -math.inf
        while True:
            if time.monotonic() - checked_s >= _STOP_CHECK_S:
                if until():
                    return
                checked_s = time.monotonic()
            # Before the timers: an action that checks whether an answer is late must have received what has arrived.
            for key, events in self._selector.select(self._wait_s()):
                key.data(events)
            for _ in range(len(self._soon)):  # actions that these add run in the next round
                self._soon.popleft()()
            self._run_timers()

    def _run_timers(self) -> None:
        now = time.monotonic()
        until_s = now + _LONGEST_TIMERS_S
        while self._timers and self._timers[0][0] <= now < until_s:
            timer = heapq.heappop(self._timers)[2]
            if timer.action is not None:
                timer.action()
                now = time.monotonic()

    def _wait_s(self) -> float:
        if self._soon:
            return 0.0
        due_s = self._timers[0][0] - time.monotonic() if self._timers else _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(0.0, due_s))

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakee.recv(4096)
