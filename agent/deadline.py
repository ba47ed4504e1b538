"""A deadline for calls that cannot be interrupted: one that hangs in a runtime hears no signal.

Nothing but the end of the process ends it. A runtime that hangs without giving Python's lock back stops this watch
too: then the daemon's limit for the whole job is what is left.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOOK_S = 0.05  # between two looks: starting a watch costs nothing then, and times that are measured stay what they are


class Deadline:
    """Calls `on_miss(limit in s)`, in a thread of its own, once the body of `within` has taken longer than its limit.

    on_miss is expected to end the process: whoever is late is not coming back.
    """

    def __init__(self, on_miss: Callable[[float], None]) -> None:
        self._on_miss = on_miss
        self._watched: tuple[float, float] | None = None  # (monotonic time it is due, limit), set as one
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """The body has so many seconds; one body at a time."""
        self._watched = time.monotonic() + limit_s, limit_s
        try:
            yield
        finally:
            self._watched = None

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            watched = self._watched
            if watched is not None and time.monotonic() > watched[0]:
                self._on_miss(watched[1])
                return
