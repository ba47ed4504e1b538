"""A camera that sends, but no good picture: it is lost like one that is silent, and keeps nobody waiting."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cv2
import numpy as np
import pytest
from brokers import eventually
from live_camera_bench import Watched
from mjpeg_server import MjpegServer

from agent.camera.capture import CaptureThread
from agent.camera.config import CameraConfig
from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.common.errors import CameraError
from agent.serving.inference import RoundRobinScheduler
from agent.serving.pipeline import Feed

Damage = Callable[[int, bytes], bytes]
PNG = cv2.imencode(".png", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
SENT: list[Damage] = [
    lambda _, content: content[:50] + bytes(50) + b"\xff\xd9",
    lambda _, content: content[:0],
    lambda *_: PNG,
]
CHUNKED = b"Content-Type: multipart/x-mixed-replace; boundary=a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.camera.stream_health.OPEN_S", 0.2)


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer() as server:
        yield server


@contextmanager
def trickling(said: bytes) -> Iterator[str]:
    """The address of a camera that says this, and then for ever a byte at a time."""
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        while not over.is_set():
            try:
                client = listening.accept()[0]
            except OSError:
                return
            with client:
                try:
                    client.sendall(said)
                    while not over.wait(0.02):
                        client.sendall(b"x")
                except OSError:  # it was given up
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=[listening])
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/x"
        over.set()
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize("sent", SENT, ids=["damaged", "empty", "png"])
@pytest.mark.parametrize("good_before", [True, False])
def test_one_that_sends_no_good_picture_is_lost_and_opened_again(
    camera: MjpegServer, sent: Damage, good_before: bool
) -> None:
    camera.damage = lambda number, content: content if good_before and number < 5 else sent(number, content)
    with Watched(camera.url, silence_s=0.3) as watched:
        eventually(lambda: watched.lost, 5.0)
        error = watched.changes[-1][1]
        assert error is not None
        assert error.code == "camera.silent"
        camera.damage = sent
        before, pulse = camera.clients, watched.thread.pulse
        eventually(lambda: camera.clients > before + 1, 10.0)
        assert watched.thread.pulse > pulse


@pytest.mark.parametrize("said", [b"X: ", CHUNKED])
def test_an_answer_that_comes_a_byte_at_a_time_is_cut_off(said: bytes) -> None:
    with trickling(b"HTTP/1.1 200 OK\r\n" + said) as address, Watched(address, silence_s=0.3) as watched:
        eventually(lambda: watched.lost, 5.0)
        eventually(lambda: watched.lost and watched.thread.pulse > 1, 10.0)


def test_it_does_not_hang(camera: MjpegServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watchdog would restart a daemon that serves others well. An attempt and its wait take 1.5 s at most."""
    monkeypatch.setattr("agent.serving.pipeline._HANGS_S", 2.5)
    camera.damage = SENT[0]
    config = CameraConfig(source=camera.url, silence_s=0.3)
    feed = Feed(config, config.to_source(), RoundRobinScheduler([False]).slots[0], "classify", 0, lambda _: None)
    feed.capture.start()
    try:
        until = time.monotonic() + 4.0
        while time.monotonic() < until:
            feed.poll()
            assert not feed.is_hung
            time.sleep(0.05)
    finally:
        feed.capture.stop()
        feed.capture.join(5.0)
    assert not feed.capture.is_alive()


@pytest.mark.parametrize("damage", [lambda _, content: content, SENT[0], SENT[1]])
def test_stopping_waits_for_no_picture(camera: MjpegServer, damage: Damage) -> None:
    camera.damage = damage
    with Watched(camera.url, silence_s=20.0) as watched:
        eventually(lambda: camera.clients > 0)
        camera.silent = damage is not SENT[0]
        watched.thread.stop()
        watched.thread.join(1.0)
        assert not watched.thread.is_alive()


def test_who_reads_it_without_a_daemon_is_told_as_well(camera: MjpegServer) -> None:
    camera.damage = SENT[0]
    with pytest.raises(CameraError, match=r"camera\.silent: no picture from http://127\.0\.0\.1:\d+/video\.mjpg for"):
        next(read_images(parse_source(camera.url), silence_s=0.3))


def test_one_that_was_read_to_its_limit_is_not_silent(camera: MjpegServer) -> None:
    changes: list[CameraError | None] = []
    (slot,) = RoundRobinScheduler([False]).slots
    thread = CaptureThread(parse_source(camera.url), slot, 1.0, 3, changes.append, silence_s=0.2)
    thread.start()
    thread.join(10.0)
    over = time.monotonic() + 0.4
    eventually(lambda: time.monotonic() > over)
    thread.check_silence()
    assert changes == []
