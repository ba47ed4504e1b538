"""One thread that waits for thousands of connections: a selector, timers, and a few threads that dial.

A connection takes a blocking connect and, with TLS, a handshake; so those are done beside the loop, and what comes of
them is told in it.
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
_ASKED_EVERY_S = 0.1
_MOST_UNDER_WAY = 200  # attempts: a machine that begins more than it can finish in time finishes none
_SWITCH_S = 0.0005
_LONGEST_TIMERS_S = 0.05  # at a time: brokers wait for answers meanwhile

Action = Callable[[], None]
Handle = Callable[[int], None]  # of the events of `selectors` that a socket is ready for


class Timer:
    """What `Loop.at` will do, unless it is cancelled."""

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        """It will not be done."""
        self.action = None


class Loop:
    """A context manager. All but `soon` is for the thread that runs it."""

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
        # Who dials waits for the interpreter after each word with the network, behind a loop that is never done.
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

    def at(self, at_s: float, action: Action) -> Timer:
        """At this monotonic time, or as soon as possible after it."""
        timer = Timer(at_s, action)
        heapq.heappush(self._timers, (at_s, next(self._numbers), timer))
        return timer

    def soon(self, action: Action) -> None:
        """In the loop's thread; any thread may ask for it."""
        self._soon.append(action)
        if len(self._soon) == 1:  # who is not the first has been preceded by whoever woke it
            with contextlib.suppress(BlockingIOError):
                self._waker.send(b"\0")

    def dial(self, attempt: Action, then: Callable[[Exception | None], None]) -> None:
        """Let another thread attempt a connection; `then` hears in the loop what it raised, None for nothing. It waits
        for its turn: `dialled` is to be called once the attempt has come to something, or to nothing."""
        self._waiting.append((attempt, then))
        self._dial_next()

    def dialled(self) -> None:
        """One attempt less is under way."""
        self._under_way -= 1
        self._dial_next()

    def _dial_next(self) -> None:
        while self._waiting and self._under_way < _MOST_UNDER_WAY:
            self._under_way += 1
            self._submit(*self._waiting.popleft())

    def _submit(self, attempt: Action, then: Callable[[Exception | None], None]) -> None:
        def call() -> None:
            error = None
            try:
                attempt()
            except Exception as caught:  # handed on, whatever it is
                error = caught
            self.soon(partial(then, error))
            error = None  # its traceback holds this frame

        self._diallers.submit(call)

    def watch(self, sock: Any, handle: Handle) -> int:
        """Call `handle` when it can be read from; what to name it by, for a socket that is closed has no number."""
        return self._selector.register(sock, selectors.EVENT_READ, handle).fd

    def watch_for(self, fd: int, events: int, handle: Handle) -> None:
        """Of a socket that is watched: for these events from now on."""
        self._selector.modify(fd, events, handle)

    def unwatch(self, fd: int) -> None:
        """It may be closed already."""
        self._selector.unregister(fd)

    def run(self, until: Callable[[], bool]) -> None:
        """Until it is so, asked several times a second."""
        asked_s = -math.inf
        while True:
            if time.monotonic() - asked_s >= _ASKED_EVERY_S:
                if until():
                    return
                asked_s = time.monotonic()
            # Before timers: whoever looks whether an answer is late must have been given what has come already.
            for key, events in self._selector.select(self._patience_s()):
                key.data(events)
            for _ in range(len(self._soon)):  # what these ask for is for the next time
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

    def _patience_s(self) -> float:
        if self._soon:
            return 0.0
        due_s = self._timers[0][0] - time.monotonic() if self._timers else _LONGEST_WAIT_S
        return min(_LONGEST_WAIT_S, max(0.0, due_s))

    def _woken(self, _events: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakee.recv(4096)
