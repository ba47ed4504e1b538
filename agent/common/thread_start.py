"""Start threads where the system may refuse one more: a refusal is an error like any other."""

from __future__ import annotations

import errno
import threading

from agent.common.errors import AgentError


def start_thread(thread: threading.Thread) -> None:
    """Start a new thread. Raises OSError (EAGAIN) where the system refuses; it may be started later then."""
    try:
        thread.start()
    except RuntimeError as error:  # which Python raises for a thread that was started twice, too
        if thread.ident is not None:
            raise
        raise OSError(errno.EAGAIN, str(error)) from error


def thread_refused(code: str, error: OSError) -> AgentError:
    """Return the error of a part for which `start_thread` got no thread."""
    remedy = "see what else takes threads on this machine, and its limits (ulimit -u, TasksMax)"
    return AgentError(code, error.strerror or str(error), "a thread for it", remedy)
