"""Functions that other threads hand to the main one, which owns what they change."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress

RunInMainThread = Callable[[Callable[[], None]], None]  # runs a function in the supervisor's thread


class MainThreadQueue:
    """Any thread may `put`, but no handler of a signal: the main thread may hold the queue's lock just then."""

    def __init__(self) -> None:
        # No SimpleQueue: up to Python 3.12 its `get` waits for ever where a signal comes as its time runs out, for it
        # takes what is left, by then negative, for no limit at all (_queuemodule.c, "Adjust timeout").
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue()

    def put(self, function: Callable[[], None]) -> None:
        """To be run soon, after what was put before."""
        self._waiting.put(function)

    def run(self, wait_s: float) -> None:
        """Run what there is; where there is nothing, wait so long for the first one."""
        with suppress(queue.Empty):
            function = self._waiting.get(timeout=wait_s)
            while True:
                function()
                function = self._waiting.get_nowait()
