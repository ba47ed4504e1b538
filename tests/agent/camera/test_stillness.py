"""A camera that repeats one picture to the bit, which no sensor does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from live_camera_bench import Watched
from mjpeg_server import MjpegServer
from turned_clock import TurnedClock

from agent.camera.stream_health import FreezeDetector
from agent.common.timing import Backoff

RNG = np.random.default_rng(0)
SCENE = RNG.integers(40, 200, (48, 64, 3), np.uint8)


def noisy(_: int = 0) -> np.ndarray:
    """Return the same scene as a sensor sees it."""
    picture: np.ndarray = SCENE + RNG.integers(0, 3, SCENE.shape, np.uint8)
    return picture


def still(pictures: Iterator[np.ndarray], limit_s: float | None = 2.0, fps: float = 10.0) -> list[bool]:
    watched = FreezeDetector(limit_s)
    answers = []
    for number, picture in enumerate(pictures):
        watched.update(picture, number / fps)
        answers.append(watched.frozen)
    return answers


def test_a_picture_that_is_repeated_for_longer_is_frozen_until_the_next_one() -> None:
    answers = still(iter([noisy(), *[SCENE] * 30, noisy(), SCENE]))
    assert answers == [False] * 21 + [True] * 10 + [False, False]


def lone_pixel(level: int) -> np.ndarray:
    """Return the scene with another pixel outside of the rows that are compared each time."""
    picture: np.ndarray = SCENE.copy()
    picture[5, 7, 1] = level
    return picture


@pytest.mark.parametrize(
    ("pictures", "limit_s"),
    [
        pytest.param([noisy() for _ in range(100)], 2.0, id="noise"),
        pytest.param([lone_pixel(number // 15) for number in range(100)], 2.0, id="a single pixel that changes"),
        pytest.param([np.full_like(SCENE, 16)] * 100, 2.0, id="a dark picture, which proves nothing"),
        pytest.param([np.zeros((1, 1, 3), np.uint8)] * 100, 2.0, id="a picture of one pixel"),
        pytest.param([SCENE, SCENE[:24].copy()] * 50, 2.0, id="a size that changes"),
        pytest.param([SCENE] * 100, None, id="a detector that is switched off"),
    ],
)
def test_a_picture_that_changes_or_proves_nothing_is_not_frozen(
    pictures: list[np.ndarray], limit_s: float | None
) -> None:
    assert not any(still(iter(pictures), limit_s))


@pytest.fixture
def camera(monkeypatch: pytest.MonkeyPatch) -> Iterator[MjpegServer]:
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    with MjpegServer(fps=100.0) as server:
        server.picture = noisy
        yield server


def frozen(_: int) -> np.ndarray:
    return SCENE


def test_a_camera_that_freezes_is_lost_opened_again_and_back_with_the_next_picture(camera: MjpegServer) -> None:
    clock = TurnedClock()
    with Watched(camera.url, frozen_s=1.0, clock=clock) as watched:
        watched.frame()
        camera.picture = frozen
        assert 1.0 <= watched.step_until(clock, lambda: watched.lost) < 1.6
        assert "frozen_s" in str(watched.changes[-1])
        watched.step_until(clock, lambda: camera.clients >= 3)  # it was opened again, and again
        assert watched.codes == ["camera.frozen"]
        served, _ = watched.thread.beat
        camera.picture = noisy
        passed_s = watched.step_until(clock, lambda: watched.thread.beat[0] > served)
        assert passed_s < 1.0
        watched.step_until(clock, lambda: not watched.lost)
        assert watched.codes == ["camera.frozen", ""]


def test_a_picture_that_may_stand_still_is_served(camera: MjpegServer) -> None:
    camera.picture, clock = frozen, TurnedClock()
    with Watched(camera.url, frozen_s=None, clock=clock) as watched:
        watched.step_until(clock, lambda: clock.monotonic_s() > TurnedClock().monotonic_s() + 2.0)
        assert watched.codes == []
