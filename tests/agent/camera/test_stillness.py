"""A camera that repeats one picture, by its noise, by its key frames, and what is no camera that does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from brokers import eventually
from live_camera_bench import Watched
from mjpeg_server import MjpegServer

from agent.camera.stream_health import FreezeDetector

RNG = np.random.default_rng(0)
SCENE = RNG.integers(40, 200, (48, 64, 3), np.uint8)


def noisy(_: int = 0) -> np.ndarray:
    """The same scene as a sensor sees it."""
    return SCENE + RNG.integers(0, 3, SCENE.shape, np.uint8)


def still(pictures: Iterator[np.ndarray], limit_s: float | None = 2.0, fps: float = 10.0) -> list[bool]:
    watched = FreezeDetector(limit_s)
    said = []
    for number, picture in enumerate(pictures):
        watched.update(picture, number / fps)
        said.append(watched.frozen)
    return said


def test_a_picture_that_is_repeated_for_longer_is_frozen_until_the_next_one() -> None:
    said = still(iter([noisy(), *[SCENE] * 30, noisy(), SCENE]))
    assert said == [False] * 21 + [True] * 10 + [False, False]


def test_noise_is_enough_to_be_alive() -> None:
    assert not any(still(noisy() for _ in range(100)))


def test_one_pixel_that_changes_is_enough() -> None:
    """Also one that is not in the rows that are compared each time."""

    def pictures() -> Iterator[np.ndarray]:
        for number in range(100):
            picture = SCENE.copy()
            picture[5, 7, 1] = number // 15
            yield picture

    assert not any(still(pictures()))


def test_a_dark_picture_says_nothing() -> None:
    assert not any(still(iter([np.full_like(SCENE, 16)] * 100)))
    assert not any(still(iter([np.zeros((1, 1, 3), np.uint8)] * 100)))


def test_a_size_that_changes_begins_anew() -> None:
    assert not any(still(iter([SCENE, SCENE[:24].copy()] * 50)))


def test_it_can_be_switched_off() -> None:
    assert not any(still(iter([SCENE] * 100), None))


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer(fps=20.0) as server:
        server.picture = noisy
        yield server


def frozen(_: int) -> np.ndarray:
    return SCENE


def reported(watched: Watched) -> list[str]:
    return ["" if error is None else error.code for _, error in watched.changes]


@pytest.mark.slow
def test_a_camera_that_freezes_is_lost_opened_again_and_back_with_the_next_picture(camera: MjpegServer) -> None:
    with Watched(camera.url, frozen_s=1.0) as watched:
        watched.frame()
        camera.picture = frozen
        frozen_at = time.monotonic()
        eventually(lambda: watched.lost, 10.0)
        lost_at, error = watched.changes[-1]
        assert 0.9 < lost_at - frozen_at < 2.0
        assert str(error).startswith("camera.frozen: ")
        assert "frozen_s" in str(error)
        eventually(lambda: camera.clients >= 3, 10.0)  # it was opened again, and again
        assert reported(watched) == ["camera.frozen"]
        taken = watched.turns.next_frame()  # what came before; from then on nothing
        assert taken is not None
        camera.picture = noisy
        back_at = time.monotonic()
        assert watched.frame() - back_at < 1.0
        eventually(lambda: not watched.lost, 5.0)
        assert reported(watched) == ["camera.frozen", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("picture", "frozen_s"), [(frozen, None), (noisy, 0.5)])
def test_one_that_may_stand_still_and_one_that_does_not_are_served(
    camera: MjpegServer, picture: Callable[[int], np.ndarray], frozen_s: float | None
) -> None:
    camera.picture = picture
    with Watched(camera.url, frozen_s=frozen_s) as watched:
        until = watched.frame() + 2.0
        while watched.frame() < until:
            assert not watched.lost
    assert camera.clients == 1
