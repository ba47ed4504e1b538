"""Serve thousands of connections in one thread: asyncio's event loop, and a few threads that dial.

A connection takes a blocking connect and, with TLS, a handshake. Other threads do that; the loop receives the outcome.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, cast

DIALLERS = 16
_STOP_CHECK_S = 0.1
_MOST_UNDER_WAY = 200  # attempts: a machine that starts more than it can finish in time finishes none
_SWITCH_S = 0.0005

Action = Callable[[], None]


class Loop(asyncio.SelectorEventLoop):
    """asyncio's loop, used by callbacks alone; a context manager. Its clock is the monotonic time.

    An exception in a callback ends `run_until`, which raises it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_exception_handler(self._fail)
        self._failure: BaseException | None = None
        self._diallers = ThreadPoolExecutor(DIALLERS, "dial")
        self._waiting: deque[tuple[Action, Callable[[Exception | None], None]]] = deque()
        self._under_way = 0
        self._switch_s = sys.getswitchinterval()

    def __enter__(self) -> Loop:
        # A dialling thread waits for the interpreter after each exchange with the network, behind a loop that is always
        # busy; so threads switch more often than by default.
        sys.setswitchinterval(_SWITCH_S)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._switch_s)
        self._diallers.shutdown(cancel_futures=True)
        self.close()

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
            attempt, then = self._waiting.popleft()
            self.run_in_executor(self._diallers, attempt).add_done_callback(partial(_report, then))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        """Run until `is_over` returns True; it is called several times a second."""

        def check() -> None:
            if is_over():
                self.stop()
            else:
                self.call_later(_STOP_CHECK_S, check)

        self.call_soon(check)
        self.run_forever()
        if self._failure is not None:
            raise self._failure

    def _fail(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failure = context.get("exception") or RuntimeError(context["message"])
        self.stop()


def _report(then: Callable[[Exception | None], None], attempted: asyncio.Future[None]) -> None:
    then(cast("Exception | None", attempted.exception()))
