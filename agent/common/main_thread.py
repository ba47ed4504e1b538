"""Start threads, and hand functions from them to the main thread, which owns the state that they change.

The system may refuse one more thread: that is an error like any other.
"""

from __future__ import annotations

import _thread
import errno
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress

from agent.common.errors import AgentError

_BEGINS_S = 5.0  # longer than a thread takes to begin on a busy board

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


def start_thread(thread: threading.Thread) -> None:
    """Start a new thread; it may be started later where the system refuses.

    Raises OSError: EAGAIN for want of a thread, ENOMEM for want of memory to run one.
    """
    _try_one()
    try:
        thread.start()
    except RuntimeError as error:  # which Python raises for a thread that was started twice, too
        if thread.ident is not None:
            raise
        raise OSError(errno.EAGAIN, str(error)) from error


def thread_refused(code: str, error: OSError) -> AgentError:
    """Return the error of a part for which `start_thread` got no thread."""
    remedy = "check what else uses threads or memory on this machine, and its limits (ulimit -u, TasksMax)"
    return AgentError(code, error.strerror or str(error), "one more thread", remedy)


def _try_one() -> None:
    """Let a thread begin and end. Raises OSError as `start_thread`.

    A thread without memory for its first call ends at once, and `Thread.start` would wait for its beginning for ever.
    """
    begun = threading.Lock()
    begun.acquire()

    def begin() -> None:  # a function of Python's: it takes the memory that any needs
        begun.release()

    try:
        _thread.start_new_thread(begin, ())
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    if not begun.acquire(timeout=_BEGINS_S):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
