"""The pictures of a camera as they come: from OpenCV's captures, and from MJPEG over HTTP, which it reads badly."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.camera.images import ImageFiles, decode_image
from agent.camera.mjpeg import MjpegStream, open_mjpeg
from agent.camera.opencv import open_capture
from agent.camera.source import Framing, Source
from agent.camera.stream_health import SILENCE_S, PictureTimeout, StreamState, silent
from agent.common.errors import CameraError

_AT_ONCE_S = 0.001  # no camera makes a frame in it
_LIVE_FAILED_AT_END = 8  # reads in a row that fail at once; a driver may have some buffers full

Picture = tuple[float, NDArray[np.uint8]]  # Unix time, BGR uint8 (H, W, 3)


def read_live(source: Source, silence_s: float, reading: StreamState) -> Iterator[Picture]:
    """Open the camera and yield its pictures, until `reading.line` has ended.

    Raises CameraError as `read_images`.
    """
    patience = PictureTimeout(source, silence_s)
    stream = open_mjpeg(source, reading.line) if source.kind == "http" else None
    if stream is not None:
        with stream:
            source.check_undecoded()
            yield from _read_mjpeg(stream, silence_s, patience, reading)
        return
    capture = open_capture(source, silence_s)
    try:
        yield from _read_capture(capture, source, silence_s, reading)
    finally:
        capture.release()


def _read_mjpeg(
    stream: MjpegStream, silence_s: float, patience: PictureTimeout, reading: StreamState
) -> Iterator[Picture]:
    """Whatever comes that is no picture uses up the patience: bytes, parts that are empty, damaged pictures."""
    reading.losses.begin()
    for parts in stream:
        for content in parts:
            image = decode_image(content) if content is not None else None
            if image is None:
                reading.losses.damaged()
                continue
            yield time.time(), image
            patience.begin()
            reading.line.wait_at_most(silence_s)
        patience.check()


def _read_capture(capture: Any, source: Source, silence_s: float, reading: StreamState) -> Iterator[Picture]:
    """A read that fails is a damaged picture, where the camera took its time for it; an end fails at once, each time.

    A read that took as long as silence is no frame of now: at a timeout FFmpeg gives what its decoder still held, one
    frame for each of its threads. The first one may take its time: cameras start.
    """
    claimed_fps = capture.get(cv2.CAP_PROP_FPS) if source.kind in ("v4l2", "csi") else 0.0  # a stream's may be any
    reading.losses.begin(claimed_fps, silence_s)
    patience = PictureTimeout(source, silence_s)
    started = False
    failed = at_once = 0
    kept_s = 0.0  # waiting, by who takes the pictures
    while not reading.line.ended:
        began_s = time.monotonic()
        ok, image = capture.read()
        took_s = time.monotonic() - began_s
        if took_s >= silence_s and (started or not ok):
            raise silent(source, took_s)
        if not ok:
            failed += 1
            at_once = at_once + 1 if took_s < _AT_ONCE_S else 0
            if at_once >= _LIVE_FAILED_AT_END:
                raise CameraError("camera.lost", f"{source.shown} stopped", "frames", "check the camera and its cable")
            patience.check()
            continue
        reading.coded_anew = not source.tells_key_frames or capture.get(cv2.CAP_PROP_LRF_HAS_KEY_FRAME) != 0.0
        reading.losses.came(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0, kept_s, failed)
        started, failed, at_once = True, 0, 0
        handed_s = time.monotonic()
        yield time.time(), image
        kept_s = time.monotonic() - handed_s
        patience.begin()


Image = NDArray[np.uint8]

_MASKED = (114, 114, 114)  # BGR: as much as nothing at all, and what letterboxes are padded with
_ASSUMED_FPS = 10.0  # of a file that does not say
_IMAGE_PERIOD_S = 0.1  # capture time between the images of a folder or zip, which carry none
_FAILED_AT_END = 300  # reads in a row; one costs about 10 us at the end, and ten seconds of a video may be damaged
_CUT_SHORT = 0.02  # of the length that a file claims to have; less is how some count it

log = logging.getLogger(__package__)


def read_images(
    source: Source, silence_s: float = SILENCE_S, reading: StreamState | None = None
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
        yield ts, apply_mask_and_crop(image, source.framing)


def apply_mask_and_crop(image: Image, framing: Framing) -> Image:
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


def _read(source: Source, silence_s: float, reading: StreamState | None) -> Iterator[tuple[float, Image]]:
    if source.kind == "images":
        yield from _read_images(source, reading)
        return
    reading = reading or StreamState()
    if source.live:
        yield from read_live(source, silence_s, reading)
        return
    capture = open_capture(source, silence_s)
    try:
        yield from _read_file(capture, source, reading)
    finally:
        capture.release()


def _read_images(source: Source, reading: StreamState | None) -> Iterator[tuple[float, Image]]:
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


def _read_file(capture: Any, source: Source, reading: StreamState) -> Iterator[tuple[float, Image]]:
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
