"""Start threads where the system may refuse one more: a refusal is an error like any other."""

from __future__ import annotations

import _thread
import errno
import os
import threading

from agent.common.errors import AgentError

_BEGINS_S = 5.0  # longer than a thread takes to begin on a busy board


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
    remedy = "see what else takes threads or memory on this machine, and its limits (ulimit -u, TasksMax)"
    return AgentError(code, error.strerror or str(error), "a thread for it", remedy)


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
