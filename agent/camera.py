"""Where images come from: files, folders and zips of images, V4L2, CSI, RTSP and MJPEG cameras, all as one stream."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError
from agent.framing import Framing
from agent.images import ImageFiles, decode_image
from agent.losses import Losses
from agent.mjpeg import MjpegStream, open_mjpeg
from agent.opening import open_capture
from agent.source import Source

Image = NDArray[np.uint8]

_MASKED = (114, 114, 114)  # BGR: as much as nothing at all, and what letterboxes are padded with
_ASSUMED_FPS = 10.0  # of a file that does not say
_IMAGE_PERIOD_S = 0.1  # capture time between the images of a folder or zip, which carry none
_CUT_SHORT = 0.02  # of the length that a file claims to have; less is how some count it

log = logging.getLogger(__name__)


@dataclass
class Reading:
    """What is known of a camera's stream beside its frames.

    coded_anew: whether the newest frame was coded without the others, so that it has the sensor's noise of its moment.
    An encoder of video repeats to the bit what hardly changes, but for its key frames.
    """

    losses: Losses
    coded_anew: bool = True


def read_images(
    source: Source, silence_s: float = 2.0, reading: Reading | None = None
) -> Iterator[tuple[float, Image]]:
    """Yield (capture time, image) until the source ends, each as the source's framing has it.

    silence_s: after which a camera on the network has stopped delivering. reading: is kept as the frames come. A file
    that ends before its time is logged with `truncated_s`. Raises CameraError: `camera.open` when nothing can be read,
    `camera.mode` for a mode that the camera does not have, `camera.empty` when a file has no frame, `camera.lost` when
    a camera stops delivering, `images.*` for a bad folder or zip.
    """
    for ts, image in _read(source, silence_s, reading or Reading(Losses(Counter()))):
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


def _read(source: Source, silence_s: float, reading: Reading) -> Iterator[tuple[float, Image]]:
    if source.kind == "images":
        files = ImageFiles(Path(source.location), CameraError)
        for index, name in enumerate(files.names):
            yield index * _IMAGE_PERIOD_S, files.read(name)
        return
    stream = open_mjpeg(source, silence_s) if source.kind == "http" else None
    if stream is not None:
        with stream:
            source.check_undecoded()
            yield from _read_mjpeg(stream, reading.losses)
        return
    capture = open_capture(source, silence_s)
    try:
        yield from _read_live(capture, source, silence_s, reading) if source.live else _read_file(capture, source)
    finally:
        capture.release()


def _read_file(capture: Any, source: Source) -> Iterator[tuple[float, Image]]:
    fps = capture.get(cv2.CAP_PROP_FPS)
    claimed_s = capture.get(cv2.CAP_PROP_FRAME_COUNT) / fps if fps > 0.0 else 0.0
    period_s = 1.0 / (fps or _ASSUMED_FPS)
    ts = -period_s
    frames = 0
    while True:
        ok, image = capture.read()
        if not ok:
            break
        stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
        ts = stamp if stamp > ts else ts + period_s  # some containers carry no or broken times
        frames += 1
        yield ts, image
    if not frames:
        raise CameraError("camera.empty", f"no frame in {source.shown}", "at least one", "check the file")
    if ts + 2.0 * period_s < (1.0 - _CUT_SHORT) * claimed_s:
        log.warning("source='%s' truncated_s=%.2f claimed_s=%.2f frames=%d", source.shown, ts, claimed_s, frames)


def _read_mjpeg(stream: MjpegStream, losses: Losses) -> Iterator[tuple[float, Image]]:
    losses.begin()
    for content in stream:
        image = decode_image(content) if content is not None else None
        if image is None:
            losses.damaged()
        else:
            yield time.time(), image


def _read_live(capture: Any, source: Source, silence_s: float, reading: Reading) -> Iterator[tuple[float, Image]]:
    """A read that took as long as silence is no frame of now: at a timeout FFmpeg gives what its decoder still held,
    one frame for each of its threads. The first one may take its time: cameras start."""
    reading.losses.begin(
        capture.get(cv2.CAP_PROP_FPS) if source.kind in ("v4l2", "csi") else 0.0
    )  # a stream's may be any
    longest_s = math.inf
    handed_s = time.monotonic()
    while True:
        began_s = time.monotonic()
        ok, image = capture.read()
        if not ok or time.monotonic() - began_s >= longest_s:
            raise CameraError("camera.lost", f"{source.shown} stopped", "frames", "check the camera and its cable")
        longest_s = silence_s
        reading.coded_anew = source.kind not in ("rtsp", "http") or capture.get(cv2.CAP_PROP_LRF_HAS_KEY_FRAME) != 0.0
        reading.losses.came(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0, began_s - handed_s)
        handed_s = time.monotonic()
        yield time.time(), image


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
