"""A camera on the network that falls silent, hangs up and comes back: real sockets, a real decoder."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import eventually
from live_camera_bench import Watched, assert_nothing_more, held, silent_for
from mjpeg_server import MjpegServer, grey
from worlds import make_world

from agent.camera.source import is_live, parse_source
from agent.camera.stream_health import SILENCE_S
from agent.common.errors import CameraError
from agent.common.timing import Backoff


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer() as server:
        yield server


def test_a_camera_that_falls_silent_is_lost_within_two_seconds_and_back_within_five(camera: MjpegServer) -> None:
    with Watched(camera.url) as watched:
        silent_at = watched.frame()
        camera.silent = True
        eventually(lambda: watched.lost, 10.0)
        lost_at, error = watched.changes[-1]
        assert isinstance(error, CameraError)
        assert lost_at - silent_at > SILENCE_S - 0.1
        assert SILENCE_S <= silent_for(error) <= 2.0  # by the daemon's own clock: a test's may be late
        time.sleep(0.5)
        back_at = time.monotonic()
        camera.silent = False
        eventually(lambda: not watched.lost, 10.0)
        assert watched.frame() - back_at < 5.0
        assert [error is None for _, error in watched.changes] == [False, True]


def test_one_that_hangs_in_its_driver_is_told_of_by_another_threads_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def hangs(*_: object) -> Iterator[tuple[float, object]]:
        yield 0.0, grey(0)
        released.wait(30.0)
        for _ in range(100):
            time.sleep(0.01)
            yield 1.0, grey(1)

    monkeypatch.setattr("agent.camera.capture.read_images", hangs)
    with Watched("http://user:secret@camera/x?token=secret", silence_s=0.2) as watched:
        watched.frame()

        eventually(lambda: watched.lost)
        error = watched.changes[-1][1]
        assert error is not None
        assert error.code == "camera.silent"
        assert "secret" not in str(error)
        released.set()
        watched.frame()
        eventually(lambda: not watched.lost)


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


@pytest.mark.parametrize(
    ("text", "live"),
    [
        ("rtsps://x", True),
        ("https://x/y", True),
        ("gst:videotestsrc ! appsink", True),
        ("csi:0", True),
        ("v4l2:/dev/video0", True),
        ("clip.mp4", False),
        ("/a/b.zip", False),
    ],
)
def test_cameras_are_told_from_files_by_their_names(text: str, live: bool) -> None:
    assert is_live(text) is live


def test_a_pipeline_without_an_end_is_refused() -> None:
    with pytest.raises(CameraError, match=r"camera\.source: .*appsink"):
        parse_source("gst:rtspsrc location=rtsp://a:secret@b ! fakesink")


@pytest.mark.slow
def test_the_daemon_serves_it_and_tells_of_its_silence(tmp_path: Path) -> None:
    with MjpegServer(fps=20.0) as server:
        world = make_world(tmp_path, lambda _: 0.5, 1.0, camera={"source": server.url, "silence_s": 0.5})

        def trouble() -> None:
            eventually(lambda: server.clients > 0, 60.0)
            time.sleep(1.0)
            server.silent = True
            time.sleep(1.5)
            server.silent = False

        thread = threading.Thread(target=trouble)
        thread.start()
        summary, said = world.run(until="state=back")
        thread.join()
    assert "code=camera.silent" in said
    assert summary["frames"] > 0


@pytest.mark.trial
def test_one_that_repeats_its_picture_is_told_of_as_frozen_and_not_as_a_view(tmp_path: Path) -> None:
    """For longer than the observer would take to say so of the view, had it been given any of the repeated frames."""

    def noise(number: int) -> np.ndarray:
        """As of a sensor: an even picture may stand still."""
        return np.random.default_rng(number).integers(0, 256, (48, 64, 3), dtype=np.uint8)

    with MjpegServer(fps=20.0) as server:
        server.picture = noise
        camera = {"source": server.url, "frozen_s": 1.0}
        world = make_world(tmp_path, lambda _: 0.5, 1.0, camera=camera, observe={"budget": None, "period_s": 0.1})

        def trouble() -> None:
            eventually(lambda: server.clients > 0, 60.0)
            time.sleep(1.0)
            server.picture = lambda _: noise(0)
            time.sleep(12.0)
            server.picture = noise

        thread = threading.Thread(target=trouble)
        thread.start()
        summary, said = world.run(until="state=back")
        thread.join()
    assert "code=camera.frozen" in said
    assert "event=view" not in said
    assert summary["frames"] > 0
