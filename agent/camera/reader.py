"""Where images come from: files, folders and zips of images, V4L2, CSI, RTSP and MJPEG cameras, all as one stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError
from agent.framing import Framing
from agent.images import ImageFiles
from agent.live import read_live
from agent.opening import open_capture
from agent.reading import SILENCE_S, Reading
from agent.source import Source

Image = NDArray[np.uint8]

_MASKED = (114, 114, 114)  # BGR: as much as nothing at all, and what letterboxes are padded with
_ASSUMED_FPS = 10.0  # of a file that does not say
_IMAGE_PERIOD_S = 0.1  # capture time between the images of a folder or zip, which carry none
_FAILED_AT_END = 300  # reads in a row; one costs about 10 us at the end, and ten seconds of a video may be damaged
_CUT_SHORT = 0.02  # of the length that a file claims to have; less is how some count it

log = logging.getLogger(__name__)


def read_images(
    source: Source, silence_s: float = SILENCE_S, reading: Reading | None = None
) -> Iterator[tuple[float, Image]]:
    """Yield (capture time, image) until the source ends, each as the source's framing has it.

    silence_s: after which a camera that gives no picture is silent, whatever else it sends; the first one may take five
    seconds longer. reading: is kept as the frames come; where there is one, a picture of a folder or zip that cannot be
    read is counted there and passed over, unless all are so. A file that ends before its time is logged with
    `truncated_s`.
    Raises CameraError: `camera.open` when nothing can be read, `camera.mode` for a mode that the camera does not have,
    `camera.empty` when a file has no frame, `camera.silent` and `camera.lost` when a camera gives nothing any more,
    `images.*` for a bad folder or zip.
    """
    for ts, image in _read(source, silence_s, reading):
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


def _read(source: Source, silence_s: float, reading: Reading | None) -> Iterator[tuple[float, Image]]:
    if source.kind == "images":
        yield from _read_images(source, reading)
        return
    reading = reading or Reading()
    if source.live:
        yield from read_live(source, silence_s, reading)
        return
    capture = open_capture(source, silence_s)
    try:
        yield from _read_file(capture, source, reading)
    finally:
        capture.release()


def _read_images(source: Source, reading: Reading | None) -> Iterator[tuple[float, Image]]:
    files = ImageFiles(Path(source.location), CameraError)
    unreadable: CameraError | None = None
    frames = 0
    for index, name in enumerate(files.names):
        try:
            image = files.read(name)
        except CameraError as error:
            if reading is None:
                raise
            if unreadable is None:  # the others are counted
                log.warning("source='%s' unreadable='%s'", source.shown, name)
            unreadable = error
            reading.losses.damaged()
            reading.passed += 1
            continue
        frames += 1
        yield index * _IMAGE_PERIOD_S, image
    if not frames and unreadable is not None:
        raise unreadable


def _read_file(capture: Any, source: Source, reading: Reading) -> Iterator[tuple[float, Image]]:
    """A read that fails is a picture that is none, unless none follows: to OpenCV damage and the end look alike."""
    fps = capture.get(cv2.CAP_PROP_FPS)
    claimed_s = capture.get(cv2.CAP_PROP_FRAME_COUNT) / fps if fps > 0.0 else 0.0
    period_s = 1.0 / (fps or _ASSUMED_FPS)
    ts = -period_s
    frames = failed = 0
    reading.losses.begin()
    while failed < _FAILED_AT_END:
        ok, image = capture.read()
        if not ok:
            failed += 1
            continue
        stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
        ts = stamp if stamp > ts else ts + period_s  # some containers carry no or broken times
        reading.losses.came(ts, damaged=failed)
        reading.passed += failed
        failed = 0
        frames += 1
        yield ts, image
    if not frames:
        raise CameraError("camera.empty", f"no frame in {source.shown}", "at least one", "check the file")
    if ts + 2.0 * period_s < (1.0 - _CUT_SHORT) * claimed_s:
        log.warning("source='%s' truncated_s=%.2f claimed_s=%.2f frames=%d", source.shown, ts, claimed_s, frames)


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
