"""Hand functions from other threads to the main thread, which owns the state that they change."""

from __future__ import annotations

import queue
from collections.abc import Callable
from contextlib import suppress

RunInMainThread = Callable[[Callable[[], None]], None]  # runs a function in the supervisor's thread


# Not a SimpleQueue. Up to Python 3.12 its `get` waits for ever if a signal arrives as the timeout runs out: the rest of
# the timeout is then negative, which it takes for no timeout (_queuemodule.c, "Adjust timeout").
class MainThreadQueue(queue.Queue[Callable[[], None]]):
    """Any thread may `put`, but no signal handler: the main thread may hold the queue's lock just then."""

    def run(self, wait_s: float) -> None:
        """Run the functions that are queued; if there are none, wait up to `wait_s` for the first."""
        with suppress(queue.Empty):
            function = self.get(timeout=wait_s)
            while True:
                function()
                function = self.get_nowait()
