"""Opening a capture of OpenCV: by which of its parts, with which settings, and whether the driver granted them."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

import cv2

from agent.camera.source import WITHOUT_GSTREAMER, Source, csi_pipeline, rtsp_pipeline
from agent.common.errors import CameraError, ConfigError

# What OpenCV and FFmpeg have to say of a source becomes a CameraError, without its password.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
_set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # until OpenCV 4, from 5 on
_set_log_level(1)  # LOG_LEVEL_FATAL, which only the newer ones name

_TIMEOUT_MS = 5000  # for a stream to open: RTSP waits for a key frame
_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_OPENING = threading.Lock()
_FPS_TOLERANCE = 0.05  # 29.97 is 30

log = logging.getLogger(__package__)


def open_capture(source: Source, silence_s: float) -> Any:
    """A cv2.VideoCapture that is open. silence_s: after which a read of a stream gives up.

    Raises CameraError: `camera.open` when nothing can be read, `camera.mode` when the driver does not give the size or
    pixel format that was asked for; ConfigError as `check_readable`. A rate that the driver does not give is logged:
    few tell the truth of it.
    """
    check_readable(source)
    if source.needs_gstreamer:
        capture = _open_pipeline(source)
    elif source.kind == "v4l2":
        capture = _open_v4l2(source)
    elif source.live:
        capture = _open_stream(source, silence_s)
    else:
        capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    if not capture.isOpened():
        raise CameraError(
            "camera.open",
            f"{source.shown} is not readable as {source.kind}",
            "a file or stream that OpenCV can decode",
            "check that it plays elsewhere, and that its codec is supported",
        )
    try:
        _check_granted(capture, source)
    except CameraError:
        capture.release()
        raise
    return capture


def check_readable(source: Source) -> None:
    """Raises ConfigError (`camera.gstreamer`) for what this OpenCV can never open, however often it is tried."""
    if source.needs_gstreamer and not has_gstreamer():
        asked = "" if source.kind != "rtsp" else f" with camera.decoder: {source.asked.decoder}"
        found = f"a source of kind {source.kind}{asked}, and an OpenCV without GStreamer, as every one from PyPI is"
        raise ConfigError("camera.gstreamer", found, "an OpenCV with it", WITHOUT_GSTREAMER)


def has_gstreamer() -> bool:
    """Whether this OpenCV was built with GStreamer, which csi cameras and pipelines need."""
    lines = (line.split() for line in cv2.getBuildInformation().splitlines())
    return any(words[:2] == ["GStreamer:", "YES"] for words in lines)


def opencv_version() -> str:
    return str(cv2.__version__)


def _open_pipeline(source: Source) -> Any:
    pipeline = source.location
    if source.kind == "csi":
        pipeline = csi_pipeline(source.location, source.asked)
    elif source.kind == "rtsp":
        pipeline = rtsp_pipeline(source.location, source.asked)
    return cv2.VideoCapture(pipeline, cv2.CAP_GSTREAMER)


def _open_v4l2(source: Source) -> Any:
    """The pixel format first: a driver has its sizes and rates by format."""
    asked = source.asked
    capture = cv2.VideoCapture(source.location, cv2.CAP_V4L2)
    if asked.pixel_format:
        capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*asked.pixel_format.upper()))
    if asked.width and asked.height:
        capture.set(cv2.CAP_PROP_FRAME_WIDTH, asked.width)
        capture.set(cv2.CAP_PROP_FRAME_HEIGHT, asked.height)
    if asked.fps:
        capture.set(cv2.CAP_PROP_FPS, asked.fps)
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
    return capture


def _open_stream(source: Source, silence_s: float) -> Any:
    """OpenCV takes FFmpeg's options from the environment alone, as it opens a stream; its user's own stand."""
    silence_ms = round(1000.0 * silence_s)
    settings = [cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, _TIMEOUT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, silence_ms]
    if hasattr(cv2, "CAP_PROP_N_THREADS"):  # from OpenCV 4.7 on
        settings += [cv2.CAP_PROP_N_THREADS, source.asked.decode_threads]
    with _OPENING:
        if _OPTIONS in os.environ:
            return cv2.VideoCapture(source.location, cv2.CAP_FFMPEG, settings)
        os.environ[_OPTIONS] = f"rtsp_transport;{source.asked.transport}"
        try:
            return cv2.VideoCapture(source.location, cv2.CAP_FFMPEG, settings)
        finally:
            del os.environ[_OPTIONS]


def _check_granted(capture: Any, source: Source) -> None:
    asked = source.asked
    if asked.width and asked.height:
        width, height = (round(capture.get(which)) for which in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        turned = asked.flip in ("clockwise", "counterclockwise")
        expected = (asked.height, asked.width) if turned else (asked.width, asked.height)
        if (width, height) != expected:
            _refuse(source, f"{width} x {height}", f"{expected[0]} x {expected[1]}")
    if asked.pixel_format:
        code = int(capture.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF
        granted = code.to_bytes(4, "little").decode("latin-1").lower()
        if granted != asked.pixel_format:
            _refuse(source, f"pixel format {granted!r}", f"'{asked.pixel_format}'")
    granted_fps = capture.get(cv2.CAP_PROP_FPS) if asked.fps else None
    if asked.fps and granted_fps and abs(granted_fps / asked.fps - 1.0) > _FPS_TOLERANCE:
        log.warning("camera='%s' fps=%g asked_fps=%g reason='not granted'", source.shown, granted_fps, asked.fps)


def _refuse(source: Source, found: str, expected: str) -> None:
    remedy = f"see its modes: v4l2-ctl -d {source.location} --list-formats-ext; or leave the keys out"
    if source.kind == "csi":
        remedy = "see the sensor's modes in what nvarguscamerasrc prints, or leave the keys out"
    raise CameraError("camera.mode", f"{source.shown} gives {found}", f"{expected}, as configured", remedy)
