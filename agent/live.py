"""The pictures of a camera as they come: from OpenCV's captures, and from MJPEG over HTTP, which it reads badly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.errors import CameraError
from agent.images import decode_image
from agent.mjpeg import MjpegStream, open_mjpeg
from agent.opening import open_capture
from agent.reading import Patience, Reading, silent
from agent.source import Source

_AT_ONCE_S = 0.001  # no camera makes a frame in it
_FAILED_AT_END = 8  # reads in a row that fail at once; a driver may have some buffers full

Picture = tuple[float, NDArray[np.uint8]]  # Unix time, BGR uint8 (H, W, 3)


def read_live(source: Source, silence_s: float, reading: Reading) -> Iterator[Picture]:
    """Open the camera and yield its pictures, until `reading.line` has ended.

    Raises CameraError as `read_images`.
    """
    patience = Patience(source, silence_s)
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


def _read_mjpeg(stream: MjpegStream, silence_s: float, patience: Patience, reading: Reading) -> Iterator[Picture]:
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


def _read_capture(capture: Any, source: Source, silence_s: float, reading: Reading) -> Iterator[Picture]:
    """A read that fails is a damaged picture, where the camera took its time for it; an end fails at once, each time.

    A read that took as long as silence is no frame of now: at a timeout FFmpeg gives what its decoder still held, one
    frame for each of its threads. The first one may take its time: cameras start.
    """
    claimed_fps = capture.get(cv2.CAP_PROP_FPS) if source.kind in ("v4l2", "csi") else 0.0  # a stream's may be any
    reading.losses.begin(claimed_fps, silence_s)
    patience = Patience(source, silence_s)
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
            if at_once >= _FAILED_AT_END:
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
