"""A thing that fails and is tried again: told once when it begins to fail, and once when it is well again."""

from __future__ import annotations

from collections.abc import Callable

from agent.backoff import Backoff
from calibrate.errors import TaredError

_LOST = ("cuda.device", "cuda.launch", "engine.run")  # after a fault nothing works any more on a GPU of this process


class Outage:
    """Counts the failures and successes of one thing. One thread calls it; any may read `code`.

    on_change is called with the error that begins an outage, and with None at its end: after `well_after` successes in
    a row, so that what fails now and then fills no log, and is tried ever less often.
    """

    def __init__(self, on_change: Callable[[TaredError | None], None], backoff: Backoff, well_after: int) -> None:
        self._on_change = on_change
        self._backoff = backoff
        self._well_after = well_after
        self._successes = 0
        self.code = ""  # of the newest error of an outage; empty while there is none

    def failed(self, error: TaredError) -> float:
        """Note a failure; the pause before the next attempt, in seconds."""
        began = not self.code
        self.code, self._successes = error.code, 0
        if began:
            self._on_change(error)
        return self._backoff.next_s()

    def worked(self) -> None:
        """Note a success."""
        if not self.code:
            return
        self._successes += 1
        if self._successes == self._well_after:
            self.code = ""
            self._backoff.reset()
            self._on_change(None)


def is_final(error: TaredError) -> bool:
    """Whether only a new process can mend it: the GPU is lost, or that is what the error was raised from."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TaredError) and cause.code in _LOST:
            return True
        cause = cause.__cause__
    return False
