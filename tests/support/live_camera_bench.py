"""Live cameras read by the real capture path, watched by a test."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import psutil
from brokers import eventually
from turned_clock import TurnedClock

from agent.camera.capture import CaptureThread, Frame
from agent.camera.source import parse_source
from agent.camera.stream_health import SILENCE_S
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import CameraError
from agent.serving.inference import RoundRobinScheduler


class Watched:
    """A capture thread on a camera; `changes` has the newest losses, and None for each return."""

    def __init__(
        self, url: str, silence_s: float = SILENCE_S, frozen_s: float | None = 1.5, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.changes: deque[CameraError | None] = deque(maxlen=100)
        self.turns = RoundRobinScheduler([False], clock)
        (self.slot,) = self.turns.slots
        source = replace(parse_source(url), frozen_s=frozen_s)
        self.thread = CaptureThread(source, self.slot, 1.0, 0, self._note, silence_s, clock=clock)

    def _note(self, error: CameraError | None) -> None:
        self.changes.append(error and error.with_traceback(None))  # a traceback would hold all that was read

    def __enter__(self) -> Watched:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.stop()
        self.thread.join(60.0)
        assert not self.thread.is_alive()
        assert self.thread.error is None

    def frame(self) -> Frame:
        """Wait for the next frame."""
        frame = self.turns.next_frame(60.0)
        assert frame is not None
        return frame

    def step_until(self, clock: TurnedClock, holds: Callable[[], bool], step_s: float = 0.1) -> float:
        """Turn the clock a little at each picture or attempt, until this holds; return the seconds that passed."""
        begun_s = clock.monotonic_s()
        while not holds():
            beat = self.thread.beat
            clock.turn(step_s)
            eventually(lambda beat=beat: self.thread.beat != beat or holds())  # type: ignore[misc]  # bound now
        return clock.monotonic_s() - begun_s

    @property
    def codes(self) -> list[str]:
        """The codes of the losses, and an empty one for each return."""
        return [error.code if error is not None else "" for error in self.changes]

    @property
    def lost(self) -> bool:
        """Check for silence, as the supervisor does several times a second; return whether the camera is lost."""
        self.thread.check_silence()
        return bool(self.changes) and self.changes[-1] is not None


def silent_for(error: CameraError | None) -> float:
    """Return the seconds without a picture, from the error's text."""
    found = re.search(r"no picture from \S+ for (\d+\.\d) s$", error.found) if error is not None else None
    assert found is not None, error
    return float(found[1])


def held() -> tuple[int, int, int]:
    """Return the resident bytes, descriptors and threads of this process."""
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def assert_nothing_more(before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    """Allow for noise, and for connections that are about to end."""
    assert after[0] < 1.02 * before[0]
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 4
