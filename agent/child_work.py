"""A job's child process as the daemon keeps it: paused when the board cannot afford it, and given a time to end in."""

from __future__ import annotations

import time

from agent.child import CandidateProcess
from agent.errors import AgentError
from agent.headroom import Headroom


class ChildWork:
    """`child` may work for timeout_s; the time in which it stands still does not count."""

    def __init__(self, child: CandidateProcess, headroom: Headroom, timeout_s: float) -> None:
        self._child = child
        self._headroom = headroom
        self._timeout_s = timeout_s
        self._started_s = time.monotonic()
        self._stands = False

    def tick(self) -> str:
        """Why it stands still now, empty while it works.

        Raises AgentError: `recalibration.timeout`, and `headroom.pause` where it has stood still for too long.
        """
        reason = self._headroom.must_pause()
        if reason and not self._stands:
            self._child.pause()
        elif self._stands and not reason:
            self._child.resume()
        self._stands = bool(reason)
        if time.monotonic() - self._started_s - self._headroom.paused_s > self._timeout_s:
            raise timed_out("the candidate process", self._timeout_s, "see what it was doing")
        return reason

    def end(self) -> None:
        """End the process, whatever it is doing; takes a few seconds at most."""
        self._child.end()


def timed_out(what: str, timeout_s: float, remedy: str) -> AgentError:
    """Why a job is given up that has not come to its end."""
    found = f"{what} took longer than {timeout_s:.0f} s"
    return AgentError("recalibration.timeout", found, "an end in time", f"{remedy}, or raise recalibration.timeout_s")
