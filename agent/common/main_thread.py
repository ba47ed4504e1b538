"""Hand functions from other threads to the main thread, which owns the state that they change."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress

RunInMainThread = Callable[[Callable[[], None]], None]  # runs a function in the supervisor's thread


class MainThreadQueue:
    """Any thread may `put`, but no signal handler: the main thread may hold the queue's lock just then."""

    def __init__(self) -> None:
        # Not a SimpleQueue. Up to Python 3.12 its `get` waits for ever if a signal arrives as the timeout runs out: the
        # rest of the timeout is then negative, which it takes for no timeout (_queuemodule.c, "Adjust timeout").
        self._functions: queue.Queue[Callable[[], None]] = queue.Queue()

    def put(self, function: Callable[[], None]) -> None:
        """Have a function run soon, after those that were put before."""
        self._functions.put(function)

    def run(self, wait_s: float) -> None:
        """Run the functions that are queued; if there are none, wait up to `wait_s` for the first."""
        with suppress(queue.Empty):
            function = self._functions.get(timeout=wait_s)
            while True:
                function()
                function = self._functions.get_nowait()
