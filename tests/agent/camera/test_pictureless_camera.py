"""A camera that sends, but no good picture: it is lost like one that is silent, and nothing waits for it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import cv2
import numpy as np
import pytest
from brokers import eventually
from live_camera_bench import Watched
from mjpeg_server import MjpegServer
from turned_clock import TurnedClock

from agent.camera.capture import CaptureThread
from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.common.errors import CameraError
from agent.serving.inference import RoundRobinScheduler

Damage = Callable[[int, bytes], bytes]
PNG = cv2.imencode(".png", np.zeros((48, 64, 3), np.uint8))[1].tobytes()
SENT: list[Damage] = [
    lambda _, content: content[:50] + bytes(50) + b"\xff\xd9",
    lambda _, content: content[:0],
    lambda *_: PNG,
]
CHUNKED = b"Content-Type: multipart/x-mixed-replace; boundary=a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture
def camera() -> Iterator[MjpegServer]:
    with MjpegServer() as server:
        yield server


@contextmanager
def trickling(answer: bytes) -> Iterator[str]:
    """Serve a camera that sends this, and then for ever a byte at a time; yield its address."""
    over = threading.Event()

    def serve(listening: socket.socket) -> None:
        while not over.is_set():
            try:
                client = listening.accept()[0]
            except OSError:
                return
            with client:
                try:
                    client.sendall(answer)
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


@pytest.mark.parametrize(
    ("sent", "good_before"),
    [(SENT[0], True), (SENT[0], False), (SENT[1], False), (SENT[2], False)],
    ids=["damaged-later", "damaged", "empty", "png"],
)
def test_a_camera_that_sends_no_good_picture_is_lost_and_opened_again(
    camera: MjpegServer, clock: TurnedClock, sent: Damage, good_before: bool
) -> None:
    camera.damage = lambda number, content: content if good_before and number < 5 else sent(number, content)
    with Watched(camera.url, silence_s=0.3, clock=clock) as watched:
        eventually(lambda: camera.sent > 5)
        clock.turn_until(lambda: watched.lost)
        assert watched.codes == ["camera.silent"]
        camera.damage = sent
        attempts, pulse = camera.clients, watched.thread.pulse
        clock.turn_until(lambda: camera.clients > attempts + 1)
        assert watched.thread.pulse > pulse


@pytest.mark.parametrize("answer", [b"X: ", CHUNKED], ids=["headers", "chunk"])
def test_an_answer_that_comes_a_byte_at_a_time_is_cut_off(clock: TurnedClock, answer: bytes) -> None:
    sent = b"HTTP/1.1 200 OK\r\n" + answer
    with trickling(sent) as address, Watched(address, silence_s=0.3, clock=clock) as watched:
        clock.turn_until(lambda: watched.lost and watched.thread.pulse > 1)


def test_a_reader_without_a_daemon_gets_the_error_too(camera: MjpegServer, clock: TurnedClock) -> None:
    def spoil(number: int, content: bytes) -> bytes:
        clock.turn(1.0)
        return SENT[0](number, content)

    camera.damage = spoil
    with pytest.raises(CameraError, match=r"camera\.silent: no picture from http://127\.0\.0\.1:\d+/video\.mjpg for"):
        next(read_images(parse_source(camera.url), silence_s=0.3, clock=clock))


def test_a_camera_that_was_read_to_its_limit_is_not_silent(camera: MjpegServer, clock: TurnedClock) -> None:
    changes: list[CameraError | None] = []
    (slot,) = RoundRobinScheduler([False]).slots
    thread = CaptureThread(parse_source(camera.url), slot, 1.0, 3, changes.append, silence_s=0.2, clock=clock)
    thread.start()
    thread.join(60.0)
    assert not thread.is_alive()
    clock.turn(60.0)
    thread.check_silence()
    assert changes == []
