"""Open a capture of OpenCV: choose its backend, request the settings, and check that the driver granted them."""

from __future__ import annotations

import errno
import logging
import os
import threading
from typing import Any

import cv2

from agent.camera.source import Source
from agent.common.errors import CameraError

log = logging.getLogger(__package__)

# OpenCV and FFmpeg print nothing: what they report of a source becomes a CameraError, without its password.
os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
_set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel  # until OpenCV 4, from 5 on
_set_log_level(1)  # LOG_LEVEL_FATAL, which only the newer ones name

_TIMEOUT_MS = 5000  # for a stream to open: RTSP waits for a key frame
_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_OPENING = threading.Lock()  # guards the environment variable
_FPS_TOLERANCE = 0.05  # 29.97 is 30


def open_capture(source: Source, silence_s: float) -> Any:
    """Open a cv2.VideoCapture.

    A rate that the driver does not grant is only logged: few report the true one.

    Args:
        silence_s: seconds after which a read of a stream gives up.

    Raises CameraError:
        camera.open  nothing can be read
        camera.mode  the driver does not grant the requested size or pixel format
        camera.pixels  its pictures are too large
    """
    if source.kind == "v4l2":
        capture = _open_v4l2(source)
    elif source.live:
        capture = _open_stream(source, silence_s)
    else:
        capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    if not capture.isOpened():
        if source.kind == "v4l2":
            raise _v4l2_error(source)
        found = f"{source.shown} is not readable as {source.kind}"
        remedy = "check that it plays elsewhere, and that its codec is supported"
        raise CameraError("camera.open", found, "a file or stream that OpenCV can decode", remedy)
    try:
        source.check_pixels(*(int(capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT)))
        _check_granted(capture, source)
    except CameraError:
        capture.release()
        raise
    return capture


def opencv_version() -> str:
    return str(cv2.__version__)


def _v4l2_error(source: Source) -> CameraError:
    """Return the error of a V4L2 device that OpenCV cannot open, by what the system says of the device."""
    try:
        os.close(os.open(source.location, os.O_RDWR | os.O_NONBLOCK))
        reason = "the device gives no pictures: it is not a capture device, or another program streams from it"
        remedy = (
            f"find the program that uses it with 'fuser -v {source.location}', "
            "and the kind of device with 'v4l2-ctl --list-devices'"
        )
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = {
            errno.ENOENT: "plug the camera in, and find its path with 'v4l2-ctl --list-devices'",
            errno.EACCES: "add the user to the group: 'sudo usermod -aG video USER', and log in again",
            errno.EBUSY: f"end the program that uses it: 'fuser -v {source.location}' names it",
        }.get(error.errno or 0, "see the kernel's log: 'dmesg'")
    return CameraError("camera.open", f"{source.shown}: {reason}", "a V4L2 camera that no other program uses", remedy)


def _open_v4l2(source: Source) -> Any:
    """Request the pixel format first: a driver has its sizes and rates by format."""
    requested = source.requested
    capture = cv2.VideoCapture(source.location, cv2.CAP_V4L2)
    if requested.pixel_format:
        capture.set(cv2.CAP_PROP_FOURCC, cv2.VideoWriter.fourcc(*requested.pixel_format.upper()))
    if requested.width and requested.height:
        capture.set(cv2.CAP_PROP_FRAME_WIDTH, requested.width)
        capture.set(cv2.CAP_PROP_FRAME_HEIGHT, requested.height)
    if requested.fps:
        capture.set(cv2.CAP_PROP_FPS, requested.fps)
    capture.set(cv2.CAP_PROP_BUFFERSIZE, 1)
    return capture


def _open_stream(source: Source, silence_s: float) -> Any:
    """Open a stream with FFmpeg, whose options OpenCV reads from the environment alone; those of the user win."""
    settings = [
        cv2.CAP_PROP_OPEN_TIMEOUT_MSEC, _TIMEOUT_MS, cv2.CAP_PROP_READ_TIMEOUT_MSEC, round(1000.0 * silence_s),
        cv2.CAP_PROP_N_THREADS, source.requested.decode_threads,
    ]  # fmt: skip
    with _OPENING:
        if _OPTIONS in os.environ:
            return cv2.VideoCapture(source.location, cv2.CAP_FFMPEG, settings)
        os.environ[_OPTIONS] = f"rtsp_transport;{source.requested.transport}"
        try:
            return cv2.VideoCapture(source.location, cv2.CAP_FFMPEG, settings)
        finally:
            del os.environ[_OPTIONS]


def _check_granted(capture: Any, source: Source) -> None:
    """Raises CameraError (`camera.mode`) unless size and pixel format are as requested."""
    requested = source.requested
    if requested.width and requested.height:
        size = tuple(round(capture.get(key)) for key in (cv2.CAP_PROP_FRAME_WIDTH, cv2.CAP_PROP_FRAME_HEIGHT))
        if size != (requested.width, requested.height):
            raise _mode_error(source, f"{size[0]} x {size[1]}", f"{requested.width} x {requested.height}")
    if requested.pixel_format:
        code = int(capture.get(cv2.CAP_PROP_FOURCC)) & 0xFFFFFFFF
        granted = code.to_bytes(4, "little").decode("latin-1").lower()
        if granted != requested.pixel_format:
            raise _mode_error(source, f"pixel format {granted!r}", f"'{requested.pixel_format}'")
    granted_fps = capture.get(cv2.CAP_PROP_FPS) if requested.fps else None
    if requested.fps and granted_fps and abs(granted_fps / requested.fps - 1.0) > _FPS_TOLERANCE:
        log.warning("camera='%s' fps=%g asked_fps=%g reason='not granted'", source.shown, granted_fps, requested.fps)


def _mode_error(source: Source, found: str, expected: str) -> CameraError:
    remedy = f"choose one of its modes: v4l2-ctl -d {source.location} --list-formats-ext; or leave the keys out"
    return CameraError("camera.mode", f"{source.shown} gives {found}", f"{expected}, as configured", remedy)
