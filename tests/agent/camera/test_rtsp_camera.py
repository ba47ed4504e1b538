"""An RTSP camera that stalls, dies and comes back, by GStreamer's RTSP server."""

from __future__ import annotations

import signal
from dataclasses import replace
from itertools import islice

import psutil
import pytest
from brokers import eventually
from gstreamer import require_gstreamer
from live_camera_bench import Watched, assert_nothing_more, held
from rtsp_camera import RtspCamera
from turned_clock import TurnedClock

from agent.camera.reader import read_images
from agent.camera.source import CaptureSettings, Transport, parse_source
from agent.common.timing import Backoff

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _server() -> None:
    require_gstreamer("GstRtspServer")


def read(url: str, transport: Transport, count: int) -> tuple[int, int]:
    """Read so many frames while the server comes up; return the height and width of the last."""
    source = replace(parse_source(url), requested=CaptureSettings(transport=transport))
    shapes: list[tuple[int, ...]] = []

    def is_read() -> bool:
        try:
            shapes.extend(image.shape for _, image in islice(read_images(source), count))
        except Exception:
            return False
        return True

    eventually(is_read, 60.0)
    return shapes[-1][0], shapes[-1][1]


@pytest.mark.parametrize(("codec", "transport"), [("h264", "tcp"), ("h264", "udp"), ("h265", "tcp")])
def test_both_codecs_and_both_transports_are_read(codec: str, transport: Transport) -> None:
    camera = RtspCamera(codec)
    with camera.running():
        assert read(camera.url, "tcp", 10) == (240, 320)
        frames = read_images(replace(parse_source(camera.url), requested=CaptureSettings(transport=transport)))
        for _ in islice(frames, 5):
            pass
        assert bool(psutil.Process().net_connections("udp")) == (transport == "udp")
        frames.close()  # type: ignore[attr-defined]  # it is a generator, which holds the stream open


def test_a_camera_that_stalls_is_lost_and_one_that_died_is_back_after_its_return() -> None:
    camera = RtspCamera()
    with camera.running() as process, Watched(camera.url, silence_s=0.8) as watched:
        watched.frame()
        eventually(lambda: not watched.lost)
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: watched.lost)
        assert watched.codes[-1] == "camera.silent"
        process.kill()
        process.wait()
        with camera.running():
            eventually(lambda: not watched.lost)
            watched.frame()


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    "reconnects", [pytest.param(300, marks=pytest.mark.trial), pytest.param(5000, marks=pytest.mark.soak)]
)
def test_reconnects_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch, reconnects: int) -> None:
    """Each connection of OpenCV and FFmpeg gives frames of a decoder of its own.

    The camera has many pictures a second, since FFmpeg reads a number of them before it gives the first.
    """
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.001)
    camera = RtspCamera("h264", "400", "80")
    with camera.running(), Watched(camera.url) as watched:
        watched.frame()
        began = watched.thread.pulse
        eventually(lambda: watched.thread.pulse > began + 50, 60.0)
        before, (frames, attempts) = held(), watched.thread.beat
        # Beside other tests some attempts end before their first frame.
        eventually(lambda: watched.thread.pulse > attempts + reconnects, 0.5 * reconnects + 60.0)
        eventually(lambda: watched.thread.beat[0] > frames + reconnects, 0.5 * reconnects + 60.0)
        after = held()
    assert_nothing_more(before, after)


def test_a_camera_whose_key_frames_repeat_is_frozen_and_back_with_the_next_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Backoff, "next_s", lambda _: 0.0)
    camera, clock = RtspCamera(), TurnedClock()
    with camera.running() as process, Watched(camera.url, silence_s=20.0, frozen_s=0.8, clock=clock) as watched:
        watched.frame()
        watched.step_until(clock, lambda: not watched.lost, 2.0)
        process.send_signal(signal.SIGUSR1)
        watched.step_until(clock, lambda: watched.lost)
        assert watched.codes[-1] == "camera.frozen"
        process.send_signal(signal.SIGUSR1)
        watched.step_until(clock, lambda: not watched.lost, 2.0)
