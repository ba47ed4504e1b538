"""Live cameras read by the real capture path, watched by a test."""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import replace

import psutil

from agent.camera.capture import CaptureThread
from agent.camera.source import parse_source
from agent.camera.stream_health import SILENCE_S
from agent.common.errors import CameraError
from agent.serving.inference import RoundRobinScheduler


class Watched:
    """A capture thread on a camera; `changes` is what was told of it, of late."""

    def __init__(self, url: str, silence_s: float = SILENCE_S, frozen_s: float | None = 1.5) -> None:
        self.changes: deque[tuple[float, CameraError | None]] = deque(maxlen=100)
        self.turns = RoundRobinScheduler([False])
        (self.slot,) = self.turns.slots
        source = replace(parse_source(url), frozen_s=frozen_s)
        self.thread = CaptureThread(source, self.slot, 1.0, 0, self._tell, silence_s)

    def _tell(self, error: CameraError | None) -> None:
        told = error.with_traceback(None) if error is not None else None  # which would hold what was read
        self.changes.append((time.monotonic(), told))

    def __enter__(self) -> Watched:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.stop()
        self.thread.join(10.0)
        assert not self.thread.is_alive()
        assert self.thread.error is None

    def frame(self) -> float:
        """When the next frame came."""
        assert self.turns.next_frame() is not None
        return time.monotonic()

    @property
    def lost(self) -> bool:
        """As the supervisor asks, several times a second."""
        self.thread.check_silence()
        return bool(self.changes) and self.changes[-1][1] is not None


def silent_for(error: CameraError | None) -> float:
    """The seconds without a picture that are told."""
    said = re.search(r"no picture from \S+ for (\d+\.\d) s$", error.found) if error is not None else None
    assert said is not None, error
    return float(said[1])


def held() -> tuple[int, int, int]:
    """What this process has: resident bytes, descriptors, threads."""
    process = psutil.Process()
    return process.memory_info().rss, process.num_fds(), process.num_threads()


def assert_nothing_more(before: tuple[int, int, int], after: tuple[int, int, int]) -> None:
    """Than noise, and connections that are about to end."""
    assert after[0] < 1.02 * before[0]
    assert after[1] <= before[1] + 4
    assert after[2] <= before[2] + 4
