"""A camera on the network that falls silent, hangs up and comes back: real sockets, a real decoder."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from brokers import eventually
from live_camera_bench import Watched, assert_nothing_more, held, silent_for
from mjpeg_server import MjpegServer, grey
from turned_clock import TurnedClock

from agent.camera.stream_health import SILENCE_S
from agent.common.timing import Backoff


def test_a_camera_that_falls_silent_is_lost_within_two_seconds_and_back_once_it_is_steady(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    clock = TurnedClock()
    with MjpegServer() as camera, Watched(camera.url, clock=clock) as watched:
        watched.frame()
        camera.silent = True
        clock.turn_until(lambda: watched.lost)
        assert SILENCE_S <= silent_for(watched.changes[-1]) <= 2.0
        camera.silent = False
        passed_s = watched.step_until(clock, lambda: not watched.lost)
        assert SILENCE_S <= passed_s < 3.0
        assert watched.codes == ["camera.silent", ""]


def test_a_camera_that_hangs_in_its_driver_is_reported_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures, clock = threading.Semaphore(1), TurnedClock()

    def hangs(*_: object) -> Iterator[tuple[float, object]]:
        while pictures.acquire(timeout=60.0):
            yield 0.0, grey(0)

    monkeypatch.setattr("agent.camera.capture.read_images", hangs)
    with Watched("http://user:secret@camera/x?token=secret", silence_s=0.2, clock=clock) as watched:
        watched.frame()
        clock.turn_until(lambda: watched.lost)
        error = watched.changes[-1]
        assert error is not None
        assert error.code == "camera.silent"
        assert "secret" not in str(error)
        for _ in range(3):
            pictures.release()
            watched.frame()
            clock.turn(0.1)
        eventually(lambda: watched.codes == ["camera.silent", ""])
        watched.thread.stop()
        pictures.release()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "reconnects", [pytest.param(1000, marks=pytest.mark.trial), pytest.param(10_000, marks=pytest.mark.soak)]
)
def test_reconnects_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, reconnects: int) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.001)
    with MjpegServer(fps=500.0) as camera, Watched(camera.url) as watched:
        camera.hang_up_after = 1
        eventually(lambda: camera.clients > 1000, 120.0)
        before = held()
        eventually(lambda: camera.clients > 1000 + reconnects, 0.12 * reconnects)
        after = held()
        assert watched.thread.pulse > reconnects
    assert_nothing_more(before, after)
