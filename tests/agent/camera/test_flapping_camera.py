"""A camera that comes and goes: told of as often as it is news, and served whenever it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import cv2
import pytest
from brokers import eventually
from live_camera_bench import Watched
from mjpeg_server import MjpegServer, grey

from agent.camera import stream_health as presence
from agent.camera.stream_health import CameraPresence
from agent.common.errors import CameraError

LOST = CameraError("camera.lost", "x stopped", "frames", "check")


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(presence, "time", clock)
    return clock


def run(watched: CameraPresence, clock: Clock, seconds: float) -> list[bool]:
    """Ten frames a second for so long."""
    said = []
    for _ in range(round(10.0 * seconds)):
        said.append(watched.frame_arrived())
        clock.now_s += 0.1
    return said


def test_one_that_is_away_now_and_then_is_told_both_times(clock: Clock) -> None:
    reported: list[CameraError | None] = []
    watched = CameraPresence(reported.append, 1.5)
    for day in range(1, 4):
        run(watched, clock, 100.0)
        watched.mark_lost(LOST)
        clock.now_s += 1.0
        steady = run(watched, clock, 3.0)
        assert steady.index(True) in (15, 16)
        assert reported == [LOST, None] * day


def test_one_that_flaps_is_told_ever_more_rarely(clock: Clock) -> None:
    reported: list[CameraError | None] = []
    watched = CameraPresence(reported.append, 1.5)
    for _ in range(1000):
        run(watched, clock, 5.0)
        watched.mark_lost(LOST)
        clock.now_s += 1.0
    assert reported == [LOST, None] * 2 + [LOST]
    run(watched, clock, 61.0)
    assert reported[-1] is None


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer() as server:
        yield server


def test_one_that_ends_each_connection_soon_is_lost_once_and_its_frames_are_served(camera: MjpegServer) -> None:
    camera.hang_up_after = 3
    with Watched(camera.url, silence_s=1.0) as watched:
        frames = 0
        while camera.clients < 12:
            watched.frame()
            frames += 1
        assert frames > 12
        assert [error is None for _, error in watched.changes] == [False]
        camera.hang_up_after = 0
        steady_at = watched.frame()
        eventually(lambda: not watched.lost, 10.0)
        assert watched.changes[-1][0] - steady_at > 0.5
        assert len(watched.changes) == 2


@pytest.mark.trial
def test_attempts_stay_rare_while_it_flaps(camera: MjpegServer) -> None:
    """As of one that is not there at all: half a second apart, in the mean."""
    camera.hang_up_after = 1
    with Watched(camera.url, silence_s=1.0):
        until = time.monotonic() + 6.0
        eventually(lambda: time.monotonic() > until)
        assert camera.clients < 25


def test_an_address_of_a_single_picture_is_named_as_one() -> None:
    content = cv2.imencode(".jpg", grey(7))[1].tobytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "image/jpeg")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=lambda: server.serve_forever(0.05))
        thread.start()
        with Watched(f"http://127.0.0.1:{server.server_port}/snapshot.jpg") as watched:
            eventually(lambda: watched.thread.pulse > 3, 10.0)
            assert len(watched.changes) == 1
            error = watched.changes[0][1]
        server.shutdown()
        thread.join()
    assert error is not None
    assert error.found.endswith("/snapshot.jpg gives a single picture (image/jpeg)")
