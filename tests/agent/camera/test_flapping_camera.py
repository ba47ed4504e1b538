"""A camera that comes and goes: its losses are reported ever more rarely, and its frames are served."""

from __future__ import annotations

import cv2
import pytest
from brokers import eventually
from live_camera_bench import Watched
from mjpeg_server import MjpegServer, answering, grey
from turned_clock import TurnedClock

from agent.camera.stream_health import CameraPresence
from agent.common.errors import CameraError
from agent.common.timing import Backoff

LOST = CameraError("camera.lost", "x stopped", "frames", "check")


def deliver(watched: CameraPresence, clock: TurnedClock, seconds: float) -> list[bool]:
    """Ten frames a second for so long; return the answer to each."""
    answers = []
    for _ in range(round(10.0 * seconds)):
        answers.append(watched.frame_arrived())
        clock.turn(0.1)
    return answers


def test_each_loss_of_a_camera_that_is_away_now_and_then_is_reported(clock: TurnedClock) -> None:
    reported: list[CameraError | None] = []
    watched = CameraPresence(reported.append, 1.5, clock)
    for day in range(1, 4):
        deliver(watched, clock, 100.0)
        watched.mark_lost(LOST)
        clock.turn(1.0)
        steady = deliver(watched, clock, 3.0)
        assert steady.index(True) in (15, 16)
        assert reported == [LOST, None] * day


def test_losses_of_a_camera_that_flaps_are_reported_ever_more_rarely(clock: TurnedClock) -> None:
    reported: list[CameraError | None] = []
    watched = CameraPresence(reported.append, 1.5, clock)
    for _ in range(100):
        deliver(watched, clock, 5.0)
        watched.mark_lost(LOST)
        clock.turn(1.0)
    assert reported == [LOST, None] * 2 + [LOST]
    deliver(watched, clock, 61.0)
    assert reported[-1] is None


def test_a_camera_that_ends_each_connection_soon_is_lost_once_and_its_frames_are_served(
    monkeypatch: pytest.MonkeyPatch, clock: TurnedClock
) -> None:
    """Attempts stay rare while it flaps: the pauses between them start over only once it has delivered for a while."""
    resets: list[Backoff] = []
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    monkeypatch.setattr(Backoff, "reset", lambda backoff: resets.append(backoff))
    with MjpegServer() as camera:
        camera.hang_up_after = 3
        with Watched(camera.url, silence_s=1.0, clock=clock) as watched:
            while camera.clients < 12:
                watched.frame()
            assert watched.thread.beat[0] > 12
            assert (watched.codes, resets) == (["camera.lost"], [])
            camera.hang_up_after = 0
            attempts = camera.clients
            passed_s = watched.step_until(clock, lambda: not watched.lost)
            assert 1.0 <= passed_s <= 1.5
            assert watched.codes == ["camera.lost", ""]
            eventually(lambda: bool(resets))
            assert camera.clients <= attempts + 1


def test_an_address_of_a_single_picture_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    content = cv2.imencode(".jpg", grey(7))[1].tobytes()
    with answering("image/jpeg", content) as address, Watched(address) as watched:
        eventually(lambda: watched.thread.pulse > 3)
        (error,) = watched.changes
    assert error is not None
    assert error.found.endswith("/content gives a single picture (image/jpeg)")
