"""A preview of answers that a test makes up, and viewers that speak HTTP with it over real sockets.

Where a test turns the preview's clock, the requests turn it until their answer comes.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import cv2
import numpy as np
from brokers import eventually
from results_bench import CONFIG
from turned_clock import TurnedClock

from agent.camera.capture import Frame
from agent.camera.config import CameraConfig
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.config import Config
from agent.results.preview import Preview
from agent.vision.answer import Answer
from agent.vision.detections import Detections
from agent.vision.task import ServedFrame
from calibrate.errors import TaredError

NOTHING = Detections(boxes=np.zeros((0, 4), np.float32), classes=np.zeros(0, np.int64), scores=np.zeros(0, np.float32))


class Cameras:
    """The frame path of a preview: answers by camera, made up by a test."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.preview: Preview | None = None
        self._newest: dict[str, ServedFrame] = {}

    def answer(self, camera: str, number: int, image: Any, result: Answer = NOTHING) -> None:
        frame = Frame(number, number / 10.0, number, image, camera)
        served = self._newest[camera] = ServedFrame(frame, "f00d", result, number, 0.001)
        if self.preview is not None:
            self.preview.offer(served)

    def newest(self, camera: str) -> ServedFrame | None:
        return self._newest.get(camera)

    @contextlib.contextmanager
    def running(self, image: Any, fps: float = 100.0) -> Iterator[None]:
        """Each camera gives this image again and again, as a new frame each time."""
        ended = threading.Event()

        def run() -> None:
            number = 0
            while not ended.wait(1.0 / fps):
                number += 1
                for name in self.names:
                    self.answer(name, number, image)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def preview_config(address: str = "127.0.0.1:0", names: tuple[str, ...] = ("street",), **preview: Any) -> Config:
    cameras = [CameraConfig(name=name, source="clip.avi") for name in names]
    content = {"model": CONFIG.model, "cameras": cameras, "preview": {"address": address, **preview}}
    return Config.model_validate(content)


@contextlib.contextmanager
def previewed(
    config: Config, cameras: Cameras, changes: list[TaredError | None] | None = None, clock: Clock = SYSTEM_CLOCK
) -> Iterator[Preview]:
    """The preview, permitted and open. changes: collects its reports."""
    with Preview(config, clock) as preview:
        cameras.preview = preview
        preview.show(cameras.newest, (changes if changes is not None else []).append)
        preview.permit(True)
        eventually(lambda: bool(preview.address))
        yield preview


def connect(address: str) -> socket.socket:
    """A connection to `http://HOST:PORT` or `unix:PATH`."""
    if address.startswith("unix:"):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(10.0)
        connection.connect(address.removeprefix("unix:"))
        return connection
    url = urlsplit(address)
    assert url.hostname is not None
    return socket.create_connection((url.hostname, url.port or 0), timeout=10.0)


@contextlib.contextmanager
def asked(
    address: str, path: str, method: str = "GET", clock: TurnedClock | None = None, **headers: str
) -> Iterator[http.client.HTTPResponse]:
    """The response to a request, its body not read yet. clock: is turned until the response comes."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = connect(address)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        if clock is not None:
            clock.turn_until(lambda: bool(select.select([connection.sock], [], [], 0.0)[0]))
        with connection.getresponse() as response:
            yield response


def get(address: str, path: str, clock: TurnedClock | None = None, **headers: str) -> tuple[int, bytes]:
    """Status and body."""
    with asked(address, path, clock=clock, **headers) as response:
        return response.status, response.read()


Part = tuple[dict[str, str], bytes]


def parts(response: http.client.HTTPResponse) -> Iterator[Part]:
    """Headers and content of each part of a stream. Fails on anything that is not as RFC 2046 has it."""
    kind, _, boundary = response.headers["Content-Type"].partition("; boundary=")
    assert kind == "multipart/x-mixed-replace"
    delimiter = f"--{boundary}\r\n".encode()
    while (line := response.readline()) == b"\r\n":
        pass
    while line:
        assert line == delimiter
        headers = {}
        while (line := response.readline()) != b"\r\n":
            if not line:
                return
            name, _, value = line.decode().strip().partition(": ")
            headers[name] = value
        content = response.read(int(headers["Content-Length"]))
        assert response.readline() == b"\r\n"
        yield headers, content
        line = response.readline()


def next_part(shown: Iterator[Part], clock: TurnedClock, frame: int | None = None) -> Part:
    """The next part of a stream, or the next of this frame; the clock is turned until it comes."""
    with ThreadPoolExecutor(1) as pool:
        while True:
            part = pool.submit(next, shown)
            clock.turn_until(part.done)
            headers, content = part.result()
            if frame in (None, int(headers["X-Frame"])):
                return headers, content


def brightness(jpeg: bytes) -> float:
    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return float(np.asarray(image).mean())


def size(jpeg: bytes) -> tuple[int, int]:
    """Height and width."""
    image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    return image.shape[0], image.shape[1]


def gone(connection: socket.socket) -> bool:
    """True if the other side has ended the connection; waits for that for a while."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def descriptors(process: str = "self") -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def wait_for_viewers(preview: Preview, count: int) -> None:
    eventually(lambda: preview.as_dict()["viewers"] == count)
