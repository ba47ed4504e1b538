"""Whether a camera is there, as it is told: lost at once, back once it has delivered for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from agent.errors import CameraError

_LONGEST_S = 60.0
_AGAIN_S = 60.0  # lost again so soon after it was told to be back, a camera is flapping


class Presence:
    """Tells of changes only, and ever fewer of a camera that flaps: it would fill every log and queue.

    steady_s: for which it has to deliver before it is back; doubled, up to a minute, each time it was lost again within
    a minute of that. Its frames are served meanwhile. on_change: is called with the error, or with None.
    """

    def __init__(self, on_change: Callable[[CameraError | None], None], steady_s: float) -> None:
        self._on_change = on_change
        self._usual_s = self._steady_s = steady_s
        self._delivers_since_s: float | None = None
        self._back_s: float | None = None  # when it was told
        self._lock = threading.Lock()
        self.lost = False

    @property
    def is_missing(self) -> bool:
        """Whether it is lost, and no frame has come since."""
        return self.lost and self._delivers_since_s is None

    def lose(self, error: CameraError) -> None:
        """It delivers nothing, or nothing new; any thread may say so."""
        with self._lock:
            now_s = time.monotonic()
            self._delivers_since_s = None
            if self.lost:
                return
            flaps = self._back_s is not None and now_s - self._back_s < _AGAIN_S
            self._steady_s = min(2.0 * self._steady_s, _LONGEST_S) if flaps else self._usual_s
            self.lost = True
            self._on_change(error)

    def deliver(self) -> bool:
        """A frame came. Whether they have come for long enough."""
        with self._lock:
            now_s = time.monotonic()
            if self._delivers_since_s is None:
                self._delivers_since_s = now_s
            steady = now_s - self._delivers_since_s >= (self._steady_s if self.lost else self._usual_s)
            if steady and self.lost:
                self.lost, self._back_s = False, now_s
                self._on_change(None)
            return steady
