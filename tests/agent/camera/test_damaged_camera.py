"""A camera read by OpenCV whose pictures are damaged now and then, as a USB camera's are by a bad cable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import ClassVar

import cv2
import numpy as np
import pytest
from brokers import eventually
from live_camera_bench import Watched
from turned_clock import TurnedClock

from agent.camera.reader import read_images
from agent.camera.source import Source
from agent.camera.stream_health import FrameLossCounter, StreamState
from agent.common.errors import CameraError
from agent.common.timing import Backoff

PERIOD_S = 0.02


class Driver:
    """A fake of OpenCV's capture on a V4L2 device: each read takes a period of the turned clock.

    `fails` names the reads that fail; from `dies_after` on all fail at once. `hangs`: for so many periods before these
    reads, once.
    """

    clock: ClassVar[TurnedClock]
    fails: ClassVar[Callable[[int], bool]]
    dies_after = 10_000
    hangs: ClassVar[dict[int, int]] = {}

    def __init__(self, *_: object) -> None:
        self._number = 0  # of the newest frame

    def isOpened(self) -> bool:
        return True

    def release(self) -> None: ...

    def set(self, *_: object) -> bool:
        return True

    def get(self, what: int) -> float:
        known = {cv2.CAP_PROP_FPS: 1.0 / PERIOD_S, cv2.CAP_PROP_POS_MSEC: 1000.0 * PERIOD_S * self._number}
        return known.get(what, 0.0)

    def read(self) -> tuple[bool, np.ndarray | None]:
        if self._number >= self.dies_after:
            return False, None
        periods = 1 + self.hangs.pop(self._number + 1, 0)
        self.clock.turn(PERIOD_S * periods)
        self._number += periods
        return (False, None) if type(self).fails(self._number) else (True, np.zeros((32, 32, 3), np.uint8))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TurnedClock:
    clock = TurnedClock()
    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    monkeypatch.setattr(Driver, "clock", clock, raising=False)
    monkeypatch.setattr(Driver, "fails", lambda _: False, raising=False)
    return clock


@pytest.fixture
def pictures(clock: TurnedClock, tmp_path: Path) -> tuple[Iterator[object], Counter[str]]:
    dropped: Counter[str] = Counter()
    source = Source("v4l2", str(tmp_path / "video0"))
    return read_images(source, 0.4, StreamState(FrameLossCounter(dropped)), clock), dropped


def test_damaged_pictures_are_counted_once_and_the_camera_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    frames, dropped = pictures
    monkeypatch.setattr(Driver, "fails", lambda number: number % 10 in (3, 4))
    assert len(list(islice(frames, 40))) == 40
    assert dropped == {"decode": 10}


def test_a_camera_without_a_good_picture_is_silent(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    frames, _ = pictures
    monkeypatch.setattr(Driver, "fails", lambda number: number > 5)
    with pytest.raises(CameraError, match=r"camera\.silent: no picture from .*video0 for 0\.4 s"):
        list(frames)


def test_a_camera_that_is_gone_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    frames, dropped = pictures
    monkeypatch.setattr(Driver, "dies_after", 5)
    assert len(list(islice(frames, 5))) == 5
    with pytest.raises(CameraError, match=r"camera\.lost"):
        next(frames)
    assert not dropped  # those that it does not make any more are none


def test_pictures_missed_while_the_driver_hung_are_no_damage(
    monkeypatch: pytest.MonkeyPatch, clock: TurnedClock
) -> None:
    monkeypatch.setattr(Driver, "hangs", {30: 50})
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    with Watched("v4l2:/dev/null", silence_s=0.3, clock=clock) as watched:
        eventually(lambda: watched.codes == ["camera.silent", ""])
        frames, _ = watched.thread.beat
        eventually(lambda: watched.thread.beat[0] > frames + 30)
        assert not watched.slot.dropped["decode"]
