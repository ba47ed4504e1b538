"""Pipelines of GStreamer that OpenCV reads: a Jetson's own camera, and RTSP decoded by what the board has for it."""

from __future__ import annotations

from fractions import Fraction
from urllib.parse import unquote, urlsplit

from agent.source import Asked
from engines.board import is_jetson

_FLIPS = (
    "none",
    "counterclockwise",
    "rotate-180",
    "clockwise",
    "horizontal",
    "",
    "vertical",
)  # nvvidconv's flip-method
_BGR = "videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false"
_OUT_OF_NVMM = "nvvidconv ! video/x-raw,format=BGRx ! "  # where a Jetson's decoders leave frames


def csi_pipeline(sensor: str, asked: Asked) -> str:
    """Argus picks the sensor's mode by the size and rate that it is asked for."""
    mode = [f"{name}={value}" for name, value in (("width", asked.width), ("height", asked.height)) if value]
    if asked.fps:
        rate = Fraction(asked.fps).limit_denominator(1001)
        mode.append(f"framerate={rate.numerator}/{rate.denominator}")
    return (
        f"nvarguscamerasrc sensor-id={sensor} ! {','.join(['video/x-raw(memory:NVMM)', 'format=NV12', *mode])} ! "
        f"nvvidconv flip-method={_FLIPS.index(asked.flip)} ! video/x-raw,format=BGRx ! {_BGR}"
    )


def rtsp_pipeline(address: str, asked: Asked) -> str:
    """decodebin takes the decoder of the highest rank, which on a Jetson is nvv4l2decoder, the hardware's. latency: by
    itself rtspsrc holds frames back for two seconds. A camera's certificate is its own: it is not checked."""
    parts = urlsplit(address)
    properties = {
        "location": parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl(),
        "protocols": asked.transport,
        "latency": "0",
    }
    if parts.username is not None:
        properties |= {"user-id": unquote(parts.username), "user-pw": unquote(parts.password or "")}
    if parts.scheme == "rtsps":
        properties["tls-validation-flags"] = "0"
    source = " ".join(f"{name}={_quoted(value)}" for name, value in properties.items())
    return f"rtspsrc {source} ! decodebin ! {_OUT_OF_NVMM if is_jetson() else ''}{_BGR}"


def _quoted(value: str) -> str:
    """As gst_parse_launch reads it."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
