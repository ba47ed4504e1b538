"""Pipelines of GStreamer (`gst:`, or of RTSP that it decodes), read by our own capture thread in a process of its own.

A csi camera is such a pipeline, of a plugin that only a Jetson has.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from brokers import eventually, free_port
from gstreamer import WITH_BINDINGS, require_bindings, require_gstreamer
from places import ROOT, SUPPORT
from rtsp_camera import RtspCamera

READER = f"{WITH_BINDINGS}from pipeline_reader import main; main()"
BGR = "videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false"
WIDTH, HEIGHT = 64, 48
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(SUPPORT)))}
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def _bindings() -> None:
    require_bindings()


class Reader:
    """A process of `pipeline_reader`; `lines` has its output so far: frames, losses, returns."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[dict[str, Any]] = []
        self.process = process
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def frames(self) -> list[dict[str, Any]]:
        return [each for each in self.lines if "frame" in each]

    @property
    def losses(self) -> list[str | None]:
        return [each["lost"] for each in self.lines if "lost" in each]

    def wait(self) -> None:
        """Wait for its end, without an error."""
        assert self.process.wait(60.0) == 0
        self._thread.join(10.0)

    def end(self) -> None:
        """End it; its output is read to the end before the pipe is closed."""
        self.process.kill()
        self._thread.join(10.0)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))


@contextmanager
def reading(source: str, frames: int = 0, silence_s: float = 2.0, transport: str = "") -> Iterator[Reader]:
    """frames: after which it ends; 0: never. transport: of RTSP."""
    command = [sys.executable, "-c", READER, source, str(frames), str(silence_s), *filter(None, [transport])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        reader = Reader(process)
        try:
            yield reader
        finally:
            reader.end()


class Sender:
    """Raw pictures over TCP, 20 a second, each with a noise of its own; `silent` keeps the next ones back."""

    def __init__(self) -> None:
        self.silent = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        port = self._listener.getsockname()[1]
        shape = f"width={WIDTH} height={HEIGHT} format=bgr framerate=20/1"
        self.source = f"gst:tcpclientsrc host=127.0.0.1 port={port} ! rawvideoparse {shape} ! {BGR}"
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send, daemon=True)

    def __enter__(self) -> Sender:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        self._listener.close()

    def _send(self) -> None:
        rng = np.random.default_rng(0)
        while not self._closing.is_set():
            with suppress(OSError), self._listener.accept()[0] as connection:  # which ends when it is opened again
                while not self._closing.wait(0.05):
                    if not self.silent:
                        connection.sendall(rng.integers(0, 256, (HEIGHT, WIDTH, 3), np.uint8).tobytes())


def test_a_pipeline_gives_pictures_in_bgr_and_is_opened_again_after_its_end() -> None:
    """A row of BGR is a multiple of four bytes in GStreamer: those of 63 pixels are padded."""
    size = "video/x-raw,width=63,height=47"
    with reading(
        f"gst:videotestsrc num-buffers=10 pattern=red ! {size} ! {BGR.replace(' drop=true', '')}", 25
    ) as reader:
        reader.wait()
    assert [each["frame"] for each in reader.frames] == list(range(25))
    assert {tuple(each["shape"]) for each in reader.frames} == {(47, 63, 3)}
    blue, green, red = reader.frames[0]["bgr"]
    assert red > 240
    assert max(blue, green) < 15
    assert reader.losses[0] == "camera.lost"
    assert set(reader.losses) <= {"camera.lost", None}


def test_a_pipeline_that_stalls_is_silent_and_is_back_with_its_frames() -> None:
    """The read hangs in the pipeline meanwhile; the pipeline is opened again after that."""
    with Sender() as sender, reading(sender.source) as reader:
        eventually(lambda: len(reader.frames) > 20)
        sender.silent = True
        eventually(lambda: reader.losses[-1:] == ["camera.silent"])
        came = len(reader.frames)
        sender.silent = False
        eventually(lambda: len(reader.frames) > came and reader.losses[-1:] == [None])


def test_a_pipeline_that_cannot_be_opened_is_reported_as_such() -> None:
    with reading(f"gst:v4l2src device=/dev/nothing ! {BGR}") as reader:
        eventually(lambda: reader.losses[:1] == ["camera.open"])
        assert reader.frames == []


@pytest.mark.parametrize("transport", ["tcp", pytest.param("udp", marks=pytest.mark.trial)])
def test_rtsp_is_decoded_by_the_systems_decoder_of_its_codec(transport: str) -> None:
    """H.264: the decoder that Debian has for H.265, libde265's, corrupts memory."""
    require_gstreamer("GstRtspServer")
    camera = RtspCamera()
    with camera.running(), reading(camera.url, 20, transport=transport) as reader:
        reader.wait()
    assert {tuple(each["shape"]) for each in reader.frames} == {(240, 320, 3)}
    assert all(40 < level < 215 for each in reader.frames for level in each["bgr"])  # snow


OPENER = f"""{WITH_BINDINGS}
from dataclasses import replace
from agent.camera.reader import read_images
from agent.camera.source import CaptureSettings, parse_source
from agent.common.errors import CameraError

for text in sys.argv[1:]:
    settings = CaptureSettings(decoder="gstreamer") if text.startswith("rtsp") else CaptureSettings()
    try:
        next(read_images(replace(parse_source(text), requested=settings), 2.0))
    except CameraError as error:
        print(error)
"""


def test_each_source_that_cannot_be_opened_has_the_pipelines_own_message() -> None:
    """OpenCV before 4.7 waited for ever in some of a hundred refused connections."""
    refused = f"rtsp://ann:of-the-gate@127.0.0.1:{free_port()}/camera"
    messages = {
        "gst:nosuchsrc ! appsink": 'no element "nosuchsrc"',
        "gst:videotestsrc ! video/x-raw,format=NV12 ! appsink": "a pipeline that gives BGR pictures",
        f"gst:rtspsrc location={refused} ! decodebin ! appsink": "not readable as gst",
        "gst:videotestsrc num-buffers=0 ! appsink": "the pipeline ends without a picture",
        "gst:videotestsrc ! appsink caps=video/x-raw,format=GRAY8": "its pictures are GRAY8",
    }
    command = [sys.executable, "-c", OPENER, *messages, *[refused] * 5]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120.0)
    errors = done.stdout.splitlines()
    assert [error.partition(": ")[0] for error in errors] == (len(messages) + 5) * ["camera.open"], done.stderr
    for error, message in zip(errors, messages.values(), strict=False):
        assert message in error
    assert "of-the-gate" not in done.stdout + done.stderr
