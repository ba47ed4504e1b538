"""One process at a time changes a state directory: the daemon, or a command that tidies while none runs."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from agent.console import say
from agent.errors import AgentError


@contextmanager
def owning(state_dir: Path) -> Iterator[None]:
    """Hold the state directory. The lock goes with the process, however it ends.

    A disk that has become read-only does not keep a daemon from serving what lies on it.
    Raises AgentError: `state.unwritable`, `state.locked`.
    """
    with _lock(state_dir) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise AgentError(
                "state.locked",
                f"another daemon on {state_dir}",
                "one at a time",
                "stop it, or choose another state_dir",
            ) from None
        yield


def _lock(state_dir: Path) -> TextIO:
    file = state_dir / "lock"
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        return file.open("w")
    except OSError as error:
        found = f"{state_dir}: {error.strerror}"
    try:
        lock = file.open()
    except OSError:
        raise AgentError("state.unwritable", found, "a writable folder", "correct state_dir") from None
    say(f"warning: {found}; what serves is served on, and nothing new can be kept")
    return lock
