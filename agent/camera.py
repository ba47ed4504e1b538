"""Where frames come from: files, folders and zips of images, V4L2, CSI and RTSP cameras, all as one stream.

A source yields images with capture times; the capture thread hands them to the inference thread through a
one-slot mailbox. A live camera never waits: a frame nobody took is overwritten and counted. A file waits, so
that every frame is seen, unless the configuration says otherwise.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.backoff import Backoff
from agent.errors import CameraError
from agent.images import ImageFiles

# What OpenCV and FFmpeg have to say of a source becomes a CameraError.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_ERROR)

Image = NDArray[np.uint8]

_IMAGE_PERIOD_S = 0.1  # capture time between the images of a folder or zip, which carry none


@dataclass(frozen=True)
class Frame:
    """One image, BGR uint8 (H, W, 3), with its place in the stream.

    ts: capture time in seconds: media time for files, Unix time for cameras.
    captured_ns: monotonic clock when the image reached us; latency counts from here.
    """

    id: int
    ts: float
    captured_ns: int
    image: Image


@dataclass(frozen=True)
class Source:
    """A parsed SRC argument: `kind` is video, images, v4l2, csi or rtsp."""

    kind: str
    location: str

    @property
    def live(self) -> bool:
        return self.kind in ("v4l2", "csi", "rtsp")


def parse_source(text: str) -> Source:
    """Understand `v4l2:/dev/video0`, `csi:0`, `rtsp://...`, or the path of a video, or of a folder or zip of images.

    Raises CameraError (`camera.missing`) when a file or device is not there.
    """
    scheme, _, rest = text.partition(":")
    if scheme in ("rtsp", "rtsps"):
        return Source("rtsp", text)
    if scheme == "csi":
        if not rest.isdigit():
            raise CameraError("camera.source", f"source '{text}'", "csi:N with a sensor number", "e.g. csi:0")
        return Source("csi", rest)
    path = Path(rest if scheme == "v4l2" else text)
    if not path.exists():
        raise CameraError("camera.missing", f"no {path}", "a video, images or a camera there", "check the source")
    if scheme == "v4l2":
        return Source("v4l2", rest)
    return Source("images" if path.is_dir() or path.suffix.lower() == ".zip" else "video", text)


def read_images(source: Source) -> Iterator[tuple[float, Image]]:
    """Yield (capture time, image) until the source ends.

    Raises CameraError: `camera.open` when nothing can be read, `camera.empty` when a file has no frame,
    `camera.lost` when a camera stops delivering, `images.*` for a bad folder or zip.
    """
    if source.kind == "images":
        files = ImageFiles(Path(source.location), CameraError)
        for index, name in enumerate(files.names):
            yield index * _IMAGE_PERIOD_S, files.read(name)
        return
    capture = _open_capture(source)
    try:
        yield from _read_live(capture, source) if source.live else _read_file(capture, source)
    finally:
        capture.release()


def _open_capture(source: Source) -> Any:
    if source.kind == "csi":
        if not has_gstreamer():
            raise CameraError(
                "camera.gstreamer",
                "an OpenCV without GStreamer, as PyPI ships it",
                "JetPack's own OpenCV for csi cameras",
                "create the venv with --system-site-packages and without opencv-python-headless",
            )
        capture = cv2.VideoCapture(_csi_pipeline(source.location), cv2.CAP_GSTREAMER)
    elif source.kind == "v4l2":
        capture = cv2.VideoCapture(source.location, cv2.CAP_V4L2)
        capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
    else:
        capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    if not capture.isOpened():
        raise CameraError(
            "camera.open",
            f"{source.location} is not readable as {source.kind}",
            "a file or stream that OpenCV can decode",
            "check that it plays elsewhere, and that its codec is supported",
        )
    return capture


def _csi_pipeline(sensor: str) -> str:
    return (
        f"nvarguscamerasrc sensor-id={sensor} ! video/x-raw(memory:NVMM),format=NV12 ! nvvidconv ! "
        "video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false"
    )


def _read_file(capture: Any, source: Source) -> Iterator[tuple[float, Image]]:
    period_s = 1.0 / (capture.get(cv2.CAP_PROP_FPS) or 10.0)
    ts = -period_s
    while True:
        ok, image = capture.read()
        if not ok:
            break
        stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
        ts = stamp if stamp > ts else ts + period_s  # some containers carry no or broken times
        yield ts, image
    if ts < 0.0:
        raise CameraError("camera.empty", f"no frame in {source.location}", "at least one", "check the file")


def _read_live(capture: Any, source: Source) -> Iterator[tuple[float, Image]]:
    while True:
        ok, image = capture.read()
        if not ok:
            raise CameraError("camera.lost", f"{source.location} stopped", "frames", "check the camera and its cable")
        yield time.time(), image


class FrameSlot:
    """The one-slot mailbox between capture and inference.

    With `keep_every`, `put` waits until the slot is empty; else it overwrites and counts the loss as `stale`.
    """

    def __init__(self, keep_every: bool) -> None:
        self._keep_every = keep_every
        self._frame: Frame | None = None
        self._closed = False
        self._changed = threading.Condition()
        self.dropped: Counter[str] = Counter()

    def put(self, frame: Frame) -> None:
        with self._changed:
            if self._keep_every:
                self._changed.wait_for(lambda: self._frame is None or self._closed)
            if self._closed:
                return
            if self._frame is not None:
                self.dropped["stale"] += 1
            self._frame = frame
            self._changed.notify_all()

    def get(self) -> Frame | None:
        """Wait for the next frame; None once the slot is closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._frame is not None or self._closed)
            frame, self._frame = self._frame, None
            self._changed.notify_all()
            return frame

    def close(self) -> None:
        """No more frames: a waiting `put` returns, `get` empties the slot and then returns None."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class CaptureThread(threading.Thread):
    """Reads a source into a FrameSlot until it ends, fails for good, or is stopped.

    speed: how many media seconds of a file pass per second; 0 reads as fast as frames are taken.
    limit: stop after that many frames; 0 reads all.
    A live camera that is lost is reopened with jittered backoff, for ever. A file that cannot be read ends the
    stream: the error is handed to `on_error` and kept in `error`.
    """

    def __init__(
        self, source: Source, slot: FrameSlot, speed: float, limit: int, on_error: Callable[[CameraError], None]
    ) -> None:
        super().__init__(name="capture", daemon=True)
        self._source = source
        self._slot = slot
        self._speed = speed
        self._limit = limit
        self._on_error = on_error
        self._halt = threading.Event()
        self._count = 0
        self.error: CameraError | None = None

    def run(self) -> None:
        backoff = Backoff(first_s=0.2, cap_s=5.0)
        try:
            while not self._halt.is_set():
                try:
                    self._pump(backoff)
                    return
                except CameraError as error:
                    self._on_error(error)
                    if not self._source.live:
                        self.error = error
                        return
                self._slot.dropped["reconnect"] += 1
                self._halt.wait(backoff.next_s())
        finally:
            self._slot.close()

    def stop(self) -> None:
        """Ask for the end; the thread leaves after the read in progress."""
        self._halt.set()
        self._slot.close()

    def _pump(self, backoff: Backoff) -> None:
        started = time.monotonic()
        first_ts: float | None = None
        for ts, image in read_images(self._source):
            backoff.reset()
            first_ts = ts if first_ts is None else first_ts
            if self._speed > 0.0 and not self._source.live:
                self._halt.wait(max(0.0, started + (ts - first_ts) / self._speed - time.monotonic()))
            if self._halt.is_set():
                return
            self._slot.put(Frame(self._count, ts, time.monotonic_ns(), image))
            self._count += 1
            if self._limit and self._count >= self._limit:
                return


def has_gstreamer() -> bool:
    """Whether this OpenCV was built with GStreamer, which csi cameras need."""
    lines = (line.split() for line in cv2.getBuildInformation().splitlines())
    return any(words[:2] == ["GStreamer:", "YES"] for words in lines)


def opencv_version() -> str:
    return str(cv2.__version__)


def source_length(source: Source) -> int | None:
    """How many frames a file claims to have, for progress displays; None for cameras and where nobody knows."""
    if source.live:
        return None
    if source.kind == "images":
        return len(ImageFiles(Path(source.location), CameraError))
    capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    try:
        return max(0, int(capture.get(cv2.CAP_PROP_FRAME_COUNT))) or None
    finally:
        capture.release()
