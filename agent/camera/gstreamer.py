"""Read pictures from pipelines of GStreamer: csi cameras, `gst:` sources, and RTSP that it decodes.

Its own bindings come from the system, as its plugins do; a virtual environment made with --system-site-packages sees
them. They are imported when the first pipeline is opened. The package python3-gst-1.0 hands pictures over without a
copy; PyGObject alone makes one.
"""

from __future__ import annotations

import importlib.util
import re
from fractions import Fraction
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from agent.camera.source import CaptureSettings, Source
from agent.common.errors import CameraError, ConfigError
from agent.common.redaction import redact
from engines.board import is_jetson

WITHOUT_GSTREAMER = (
    "sudo apt install python3-gst-1.0, and make the venv with --system-site-packages; files, v4l2, rtsp "
    "and http work without it"
)

_BGR = "videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false"
_OUT_OF_NVMM = "nvvidconv ! video/x-raw,format=BGRx ! "  # NVMM memory is where a Jetson's decoders leave frames
_FLIPS = ("none", "counterclockwise", "rotate-180", "clockwise", "horizontal", "", "vertical")  # nvvidconv's numbers


class GstPipeline:
    """A pipeline that plays while the context manager is entered. One thread at a time.

    Raises CameraError:
        camera.open  it cannot be made, or does not start
    Raises ConfigError as `check_gstreamer`.
    """

    def __init__(self, source: Source) -> None:
        check_gstreamer(source)
        self._gst = _bindings()
        self._source = source
        self._delivered = False
        try:
            self._pipeline = self._gst.parse_launch(_description(source))
        except Exception as error:  # GLib.Error, which has no other base
            raise self._open_error(getattr(error, "message", str(error))) from None
        _, self._sink = self._pipeline.iterate_all_by_element_factory_name("appsink").next()
        if self._sink.get_property("caps") is None:  # whatever cannot give BGR says so when it starts
            self._sink.set_property("caps", self._gst.Caps.from_string("video/x-raw,format=BGR"))

    def __enter__(self) -> GstPipeline:
        if self._pipeline.set_state(self._gst.State.PLAYING) == self._gst.StateChangeReturn.FAILURE:
            error = self._open_error(self._said() or "the pipeline does not start")
            self.__exit__()
            raise error
        return self

    def __exit__(self, *_: object) -> None:
        self._pipeline.set_state(self._gst.State.NULL)

    def pull(self, wait_s: float) -> tuple[NDArray[np.uint8], float] | None:
        """Return the next picture, BGR uint8 (H, W, 3), and its time in the stream in s, 0 where it has none.

        None where none comes within the time.

        Raises CameraError:
            camera.open  the pipeline failed or ended before the first picture
            camera.mode  the camera does not have the requested mode
            camera.lost  it failed or ended later
            camera.pixels  its pictures are too large
        """
        sample = self._sink.emit("try-pull-sample", round(wait_s * self._gst.SECOND))
        if sample is None:
            said = self._said()
            if said or self._sink.get_property("eos"):
                raise self._end(said)
            return None
        caps, buffer = sample.get_caps().get_structure(0), sample.get_buffer()
        width, height = caps.get_value("width"), caps.get_value("height")
        self._source.check_pixels(width, height)
        if not self._delivered:
            if caps.get_value("format") != "BGR":
                raise self._open_error(f"its pictures are {caps.get_value('format')}")
            _check_mode(self._source, width, height)
            self._delivered = True
        stamp_s = 0.0 if buffer.pts == self._gst.CLOCK_TIME_NONE else buffer.pts / self._gst.SECOND
        return self._image(buffer, width, height), stamp_s

    def _image(self, buffer: Any, width: int, height: int) -> NDArray[np.uint8]:
        """Copy the picture out of the buffer, whose rows may be padded."""
        ok, content = buffer.map(self._gst.MapFlags.READ)
        if not ok:
            raise self._end("a picture that cannot be read")
        try:
            rows = np.frombuffer(content.data, np.uint8).reshape(height, -1)
            image: NDArray[np.uint8] = rows[:, : 3 * width].reshape(height, width, 3).copy()
            return image
        finally:
            buffer.unmap(content)

    def _said(self) -> str:
        """Return the first error that the pipeline has reported since the last call; empty where there is none."""
        message = self._pipeline.get_bus().pop_filtered(self._gst.MessageType.ERROR)
        return message.parse_error()[0].message.rstrip(".") if message is not None else ""

    def _end(self, said: str) -> CameraError:
        if not self._delivered:
            return self._open_error(said or "the pipeline ends without a picture")
        found = f"{self._source.shown} stopped" + (f": {redact(said)}" if said else "")
        return CameraError("camera.lost", found, "a stream without an end", "check the camera and its cable")

    def _open_error(self, said: str) -> CameraError:
        found = f"{self._source.shown} is not readable as {self._source.kind}: {redact(said)}"
        remedy = "try the pipeline with gst-launch-1.0, and fakesink in place of appsink"
        return CameraError("camera.open", found, "a pipeline that gives BGR pictures", remedy)


def check_gstreamer(source: Source) -> None:
    """Raises ConfigError (`camera.gstreamer`) where the bindings that a source needs are missing."""
    if source.needs_gstreamer and gstreamer_version() is None:
        decoder = "" if source.kind != "rtsp" else f" with camera.decoder: {source.requested.decoder}"
        found = f"a source of kind {source.kind}{decoder}, and no Python bindings of GStreamer"
        raise ConfigError("camera.gstreamer", found, "the package python3-gst-1.0", WITHOUT_GSTREAMER)


def gstreamer_version() -> str | None:
    """Return the release of GStreamer that pipelines run on; None where it or its bindings are missing."""
    if importlib.util.find_spec("gi") is None:
        return None
    try:
        return ".".join(str(part) for part in _bindings().version()[:3])
    except (ImportError, ValueError):  # ValueError: no typelib of GStreamer
        return None


@lru_cache
def _bindings() -> Any:
    import gi

    gi.require_version("Gst", "1.0")
    from gi.repository import Gst

    Gst.init(None)
    return Gst


def _check_mode(source: Source, width: int, height: int) -> None:
    """Raises CameraError (`camera.mode`) unless the pictures have the size that was requested of the sensor."""
    requested = source.requested
    if not (requested.width and requested.height):
        return
    is_turned = requested.flip in ("clockwise", "counterclockwise")
    expected = (requested.height, requested.width) if is_turned else (requested.width, requested.height)
    if (width, height) != expected:
        found = f"{source.shown} gives {width} x {height}"
        remedy = "choose a mode of the sensor, as nvarguscamerasrc lists them, or leave the keys out"
        raise CameraError("camera.mode", found, f"{expected[0]} x {expected[1]}, as configured", remedy)


def _description(source: Source) -> str:
    if source.kind == "csi":
        return csi_pipeline(source.location, source.requested)
    if source.kind == "rtsp":
        return rtsp_pipeline(source.location, source.requested)
    return source.location


def csi_pipeline(sensor: str, requested: CaptureSettings) -> str:
    """Return the pipeline of a csi sensor. Argus picks the sensor's mode by the requested size and rate."""
    mode = [f"{name}={value}" for name, value in (("width", requested.width), ("height", requested.height)) if value]
    if requested.fps:
        rate = Fraction(requested.fps).limit_denominator(1001)
        mode.append(f"framerate={rate.numerator}/{rate.denominator}")
    return (
        f"nvarguscamerasrc sensor-id={sensor} ! {','.join(['video/x-raw(memory:NVMM)', 'format=NV12', *mode])} ! "
        f"nvvidconv flip-method={_FLIPS.index(requested.flip)} ! video/x-raw,format=BGRx ! {_BGR}"
    )


def rtsp_pipeline(address: str, requested: CaptureSettings) -> str:
    """Return the pipeline of an RTSP stream.

    decodebin chooses the decoder of the highest rank, which on a Jetson is the hardware's, nvv4l2decoder. The latency
    is set to 0 because rtspsrc by itself holds frames back for two seconds. The certificate of an rtsps camera is not
    checked: cameras sign their own.
    """
    parts = urlsplit(address)
    properties = {
        "location": parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
        "protocols": requested.transport,
        "latency": "0",
    }
    if parts.username is not None:
        properties |= {"user-id": unquote(parts.username), "user-pw": unquote(parts.password or "")}
    if parts.scheme == "rtsps":
        properties["tls-validation-flags"] = "0"
    source = " ".join(f"{name}={_quoted(value)}" for name, value in properties.items())
    return f"rtspsrc {source} ! decodebin ! {_OUT_OF_NVMM if is_jetson() else ''}{_BGR}"


def _quoted(value: str) -> str:
    """Quote a value for gst_parse_launch."""
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'
