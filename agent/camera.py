"""Where images come from: files, folders and zips of images, V4L2, CSI, RTSP and MJPEG cameras, all as one stream."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError
from agent.framing import Framing
from agent.images import ImageFiles
from agent.source import Source

# What OpenCV and FFmpeg have to say of a source becomes a CameraError.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
_set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # until OpenCV 4, from 5 on
_set_log_level(2)  # LOG_LEVEL_ERROR, which only the newer ones name

Image = NDArray[np.uint8]

_TIMEOUT_MS = 5000  # for a stream to open: RTSP waits for a key frame
_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_OPENING = threading.Lock()
_MASKED = (114, 114, 114)  # BGR: as much as nothing at all, and what letterboxes are padded with
_ASSUMED_FPS = 10.0  # of a file that does not say
_IMAGE_PERIOD_S = 0.1  # capture time between the images of a folder or zip, which carry none


def read_images(source: Source, silence_s: float = 2.0) -> Iterator[tuple[float, Image]]:
    """Yield (capture time, image) until the source ends, each as the source's framing has it.

    silence_s: after which a camera on the network has stopped delivering. Raises CameraError: `camera.open` when
    nothing can be read, `camera.empty` when a file has no frame, `camera.lost` when a camera stops delivering,
    `images.*` for a bad folder or zip.
    """
    for ts, image in _read(source, silence_s):
        yield ts, framed(image, source.framing)


def framed(image: Image, framing: Framing) -> Image:
    """The frame, BGR uint8 (H, W, 3), that a picture becomes.

    Masks are filled in the picture itself: nobody else has it, and nobody is to.
    """
    height, width = image.shape[:2]
    for mask in framing.masks:  # one by one: where two overlap, fillPoly would leave a hole
        cv2.fillPoly(image, [np.round(np.array(mask) * (width, height)).astype(np.int32)], _MASKED)
    if framing.region is None:
        return image
    left, top, right, bottom = np.round(np.array(framing.region) * (width, height, width, height)).astype(int).tolist()
    left, top = min(left, width - 1), min(top, height - 1)  # of a sliver that rounds to nothing a pixel is left
    region = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    return np.ascontiguousarray(region)  # as runtimes want it


def _read(source: Source, silence_s: float) -> Iterator[tuple[float, Image]]:
    if source.kind == "images":
        files = ImageFiles(Path(source.location), CameraError)
        for index, name in enumerate(files.names):
            yield index * _IMAGE_PERIOD_S, files.read(name)
        return
    capture = _open_capture(source, silence_s)
    try:
        yield from _read_live(capture, source, silence_s) if source.live else _read_file(capture, source)
    finally:
        capture.release()


def _open_capture(source: Source, silence_s: float) -> Any:
    if source.kind in ("csi", "gst"):
        if not has_gstreamer():
            raise CameraError(
                "camera.gstreamer",
                "an OpenCV without GStreamer, as PyPI ships it",
                "JetPack's own OpenCV for csi cameras and pipelines",
                "create the venv with --system-site-packages and without opencv-python-headless",
            )
        pipeline = _csi_pipeline(source.location) if source.kind == "csi" else source.location
        capture = cv2.VideoCapture(pipeline, cv2.CAP_GSTREAMER)
    elif source.kind == "v4l2":
        capture = cv2.VideoCapture(source.location, cv2.CAP_V4L2)
        capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
    elif source.kind in ("rtsp", "http"):
        silence_ms = round(1000.0 * silence_s)
        settings = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, _TIMEOUT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, silence_ms]
        if hasattr(cv2, "CAP_PROP_N_THREADS"):  # from OpenCV 4.7 on
            settings += [cv2.CAP_PROP_N_THREADS, source.decode_threads]
        capture = _open_stream(source, settings)
    else:
        capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    if not capture.isOpened():
        raise CameraError(
            "camera.open",
            f"{source.shown} is not readable as {source.kind}",
            "a file or stream that OpenCV can decode",
            "check that it plays elsewhere, and that its codec is supported",
        )
    return capture


def _open_stream(source: Source, settings: list[int]) -> Any:
    """OpenCV takes FFmpeg's options from the environment alone, as it opens a stream; its user's own stand."""
    with _OPENING:
        if _OPTIONS in os.environ:
            return cv2.VideoCapture(source.location, cv2.CAP_FFMPEG, settings)
        os.environ[_OPTIONS] = f"rtsp_transport;{source.transport}"
        try:
            return cv2.VideoCapture(source.location, cv2.CAP_FFMPEG, settings)
        finally:
            del os.environ[_OPTIONS]


def _csi_pipeline(sensor: str) -> str:
    return (
        f"nvarguscamerasrc sensor-id={sensor} ! video/x-raw(memory:NVMM),format=NV12 ! nvvidconv ! "
        "video/x-raw,format=BGRx ! videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false"
    )


def _read_file(capture: Any, source: Source) -> Iterator[tuple[float, Image]]:
    period_s = 1.0 / (capture.get(cv2.CAP_PROP_FPS) or _ASSUMED_FPS)
    ts = -period_s
    while True:
        ok, image = capture.read()
        if not ok:
            break
        stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
        ts = stamp if stamp > ts else ts + period_s  # some containers carry no or broken times
        yield ts, image
    if ts < 0.0:
        raise CameraError("camera.empty", f"no frame in {source.shown}", "at least one", "check the file")


def _read_live(capture: Any, source: Source, silence_s: float) -> Iterator[tuple[float, Image]]:
    """A read that took as long as silence is no frame of now: at a timeout FFmpeg gives what its decoder still held,
    one frame for each of its threads. The first one may take its time: cameras start."""
    longest_s = math.inf
    while True:
        began_s = time.monotonic()
        ok, image = capture.read()
        if not ok or time.monotonic() - began_s >= longest_s:
            raise CameraError("camera.lost", f"{source.shown} stopped", "frames", "check the camera and its cable")
        longest_s = silence_s
        yield time.time(), image


def has_gstreamer() -> bool:
    """Whether this OpenCV was built with GStreamer, which csi cameras and pipelines need."""
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
    return max(0, int(_claims(source, cv2.CAP_PROP_FRAME_COUNT))) or None


def source_seconds(source: Source) -> float | None:
    """How long a file claims to play, in s of media time; None for cameras and where nobody knows."""
    frames = source_length(source)
    if frames is None:
        return None
    if source.kind == "images":
        return frames * _IMAGE_PERIOD_S
    return frames / (_claims(source, cv2.CAP_PROP_FPS) or _ASSUMED_FPS)


def _claims(source: Source, what: int) -> float:
    capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    try:
        return float(capture.get(what))
    finally:
        capture.release()
