"""A camera read by OpenCV whose pictures are damaged now and then, as a USB camera's are by a bad cable."""

from __future__ import annotations

import time
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
from v4l2_driver import V4l2Driver

from agent.camera.reader import read_images
from agent.camera.source import Source
from agent.camera.stream_health import FrameLossCounter, StreamState
from agent.common.errors import CameraError

PERIOD_S = 0.02


class Driver(V4l2Driver):
    """OpenCV's capture on a V4L2 device, which needs a kernel's. fails: which reads do; of a dead one all, at once."""

    period_s = PERIOD_S
    fails: Callable[[int], bool]
    dies_after = 10_000
    hangs: ClassVar[dict[int, int]] = {}  # for so many periods before these, once

    def read(self) -> tuple[bool, np.ndarray | None]:
        if self._number >= self.dies_after:
            return False, None
        hung = self.hangs.pop(self._number + 1, 0)
        time.sleep(PERIOD_S * (1 + hung))
        self._number += 1 + hung
        if type(self).fails(self._number):
            return False, None
        return True, np.zeros((32, 32, 3), np.uint8)


@pytest.fixture
def pictures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Iterator[object], Counter[str]]:
    monkeypatch.setattr(cv2, "VideoCapture", Driver)
    monkeypatch.setattr("agent.camera.stream_health.OPEN_S", 0.0)
    dropped: Counter[str] = Counter()
    source = Source("v4l2", str(tmp_path / "video0"))
    return read_images(source, 0.4, StreamState(FrameLossCounter(dropped))), dropped


def test_damaged_pictures_are_counted_once_and_the_camera_is_not_opened_again(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    frames, dropped = pictures
    monkeypatch.setattr(Driver, "fails", lambda number: number % 10 in (3, 4), raising=False)
    assert len(list(islice(frames, 40))) == 40
    assert dropped == {"decode": 10}


def test_when_none_is_good_any_more_it_is_silent(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    frames, _ = pictures
    monkeypatch.setattr(Driver, "fails", lambda number: number > 5, raising=False)
    with pytest.raises(CameraError, match=r"camera\.silent: no picture from .*video0 for 0\.\d s"):
        list(frames)


def test_one_that_is_gone_is_lost_at_once(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    frames, dropped = pictures
    monkeypatch.setattr(Driver, "fails", lambda _: False, raising=False)
    monkeypatch.setattr(Driver, "dies_after", 5)
    assert len(list(islice(frames, 5))) == 5
    with pytest.raises(CameraError, match=r"camera\.lost"):
        next(frames)
    assert not dropped  # those that it does not make any more are none


def test_what_was_missed_while_its_driver_hung_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, pictures: tuple[Iterator[object], Counter[str]]
) -> None:
    del pictures
    monkeypatch.setattr(Driver, "fails", lambda _: False, raising=False)
    monkeypatch.setattr(Driver, "hangs", {30: 50})
    with Watched("v4l2:/dev/null", silence_s=0.3) as watched:
        eventually(lambda: watched.lost, 10.0)
        eventually(lambda: not watched.lost, 10.0)
        eventually(lambda: watched.thread.beat[0] > 60, 10.0)
        assert not watched.slot.dropped["decode"]
