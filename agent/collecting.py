"""A job's frames as they come, and how long it waits for more of them."""

from __future__ import annotations

import time

from agent.errors import AgentError
from agent.job_states import JobState
from agent.verdict import MIN_TELLING


class Collecting:
    """Until there are `frames`, and telling ones among the held-out; each that counts restarts the clock: a slow camera
    needs its time."""

    def __init__(self, frames: int, timeout_s: float) -> None:
        self._frames = frames
        self._timeout_s = timeout_s
        self._counts = (0, 0)  # frames, and telling ones, as far as they are asked for
        self.start_clock()

    def start_clock(self) -> None:
        """It is waited for more from now on."""
        self._deadline_s = time.monotonic() + self._timeout_s

    def has_enough(self, collected: int, telling: int) -> bool:
        """Raises AgentError (`recalibration.timeout`) once nothing that counts has come for timeout_s."""
        counts = min(collected, self._frames), min(telling, MIN_TELLING)
        if counts == (self._frames, MIN_TELLING):
            return True
        if time.monotonic() > self._deadline_s:
            raise self._nothing_more(*counts)
        if any(now > before for now, before in zip(counts, self._counts, strict=True)):
            self.start_clock()
        self._counts = counts
        return False

    def _nothing_more(self, frames: int, telling: int) -> AgentError:
        if frames < self._frames:
            found, remedy = f"{frames} of {self._frames} frames", "see the camera, ask for fewer frames"
        else:
            found = f"nothing is seen on the frames but on {telling} of those that judge"
            remedy = "wait until something is to be seen"
        found = f"{JobState.COLLECTING.value}: {found}, and no more for {self._timeout_s:.0f} s"
        remedy = f"{remedy}, or raise recalibration.timeout_s"
        return AgentError("recalibration.timeout", found, "frames to go by", remedy)
