"""What of a camera's picture anybody gets to see: one region of it, without what is masked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from agent.common.errors import CameraError
from agent.common.redaction import redact, redact_location
from engines.board import is_jetson


@dataclass(frozen=True)
class Framing:
    """region: left, top, right, bottom; masks: corners (x, y) each; all as shares of the whole picture, so that they
    hold at every size of it. None and nothing leave it as it is."""

    region: tuple[float, float, float, float] | None = None
    masks: Sequence[Sequence[tuple[float, float]]] = ()


WHOLE = Framing()

_SCHEMES = {
    "rtsp": "rtsp",
    "rtsps": "rtsp",
    "http": "http",
    "https": "http",
    "v4l2": "v4l2",
    "csi": "csi",
    "gst": "gst",
}

Transport = Literal["tcp", "udp"]
Decoder = Literal["ffmpeg", "gstreamer"]
PixelFormat = Literal["mjpg", "yuyv"]
Flip = Literal["none", "clockwise", "counterclockwise", "rotate-180", "horizontal", "vertical"]

_RECORDINGS = ("video", "images")
_TAKEN_BY = {
    "speed": _RECORDINGS,
    "labels": _RECORDINGS,
    "silence_s": tuple(dict.fromkeys(_SCHEMES.values())),
    "frozen_s": tuple(dict.fromkeys(_SCHEMES.values())),
    "transport": ("rtsp",),
    "decoder": ("rtsp",),
    "decode_threads": ("rtsp", "http"),
    "pixel_format": ("v4l2",),
    "width": ("v4l2", "csi"),
    "height": ("v4l2", "csi"),
    "fps": ("v4l2", "csi"),
    "flip": ("csi",),
}

WITHOUT_GSTREAMER = (
    "sources csi: and gst:, and decoder: gstreamer, need JetPack's own OpenCV: a venv with --system-site-packages, and "
    "no opencv-python-headless in it; files, v4l2, rtsp and http work without"
)

_FROZEN_S = 1.5
_FROZEN_KINDS = ("v4l2", "csi")  # of a pipeline nobody tells us how its frames are coded


@dataclass(frozen=True)
class CaptureSettings:
    """What is asked of a camera and its driver; None: what they do by themselves.

    transport, decoder: of rtsp. decode_threads: of a stream's decoder, which holds back a frame for each but the first;
    OpenCV by itself has one for each core. pixel_format: how frames come over the wire, of v4l2. width, height, fps:
    the mode of v4l2 and csi. flip: by the hardware, of csi.
    """

    transport: Transport = "tcp"
    decoder: Decoder = "ffmpeg"
    decode_threads: int = 1
    pixel_format: PixelFormat | None = None
    width: int | None = None
    height: int | None = None
    fps: float | None = None
    flip: Flip = "none"


@dataclass(frozen=True)
class Source:
    """A parsed SRC argument: `kind` is video, images, v4l2, csi, rtsp, http or gst.

    location: with its password, and so in no `repr`. asked: of the camera. frozen_s: for which the picture of a camera
    may repeat to the bit before it counts as lost; None: for ever. framing: what every reader sees of each picture.
    """

    kind: str
    location: str = field(repr=False)
    requested: CaptureSettings = CaptureSettings()
    frozen_s: float | None = None
    framing: Framing = WHOLE

    def __post_init__(self) -> None:
        """Raises CameraError (`camera.option`) for what nobody can ask of such a source."""
        for each in fields(CaptureSettings):
            if getattr(self.requested, each.name) != each.default:
                self.check_accepts(each.name, getattr(self.requested, each.name))
        if self.requested.decoder == "gstreamer" and self.requested.decode_threads != CaptureSettings.decode_threads:
            found = f"camera.decode_threads: {self.requested.decode_threads} beside camera.decoder: gstreamer"
            raise CameraError("camera.option", found, "one of them: they are FFmpeg's threads", "leave one of them out")

    def check_accepts(self, key: str, value: object) -> None:
        """Raises CameraError (`camera.option`) where this key of `camera:` does nothing for such a source."""
        taken_by = _TAKEN_BY[key]
        if self.kind not in taken_by:
            found = f"camera.{key}: {value} for a source of kind {self.kind}, {self.shown}"
            raise CameraError("camera.option", found, f"one of kind {' or '.join(taken_by)}", "leave the key out")

    def check_accepts_mjpeg(self) -> None:
        """Raises CameraError (`camera.option`) for what is asked of a decoder, where pictures come one by one."""
        if self.requested.decode_threads != CaptureSettings.decode_threads:
            found = f"camera.decode_threads: {self.requested.decode_threads} for {self.shown}, which sends MJPEG"
            raise CameraError("camera.option", found, "a stream that FFmpeg decodes", "leave the key out")

    @property
    def shown(self) -> str:
        """The location as it may appear in logs and messages: without user names, passwords and what a query says."""
        return redact(self.location) if self.kind == "gst" else redact_location(self.location)

    @property
    def live(self) -> bool:
        return self.kind in _SCHEMES.values()

    @property
    def needs_gstreamer(self) -> bool:
        return self.kind in ("csi", "gst") or self.requested.decoder == "gstreamer"

    @property
    def reports_key_frames(self) -> bool:
        """Whether it is a stream of a video codec, and which of its pictures stand alone is known."""
        return self.kind in ("rtsp", "http") and not self.needs_gstreamer

    @property
    def usual_frozen_s(self) -> float | None:
        """After how long a camera of this kind that repeats its picture has frozen; None where nothing says so."""
        return _FROZEN_S if self.kind in _FROZEN_KINDS or self.reports_key_frames else None


def is_live(text: str) -> bool:
    """Whether this SRC argument names a camera, or what may be meant as one, and no file."""
    return text.partition(":")[0] in _SCHEMES or "://" in text


def parse_source(text: str) -> Source:
    """Understand `v4l2:/dev/video0`, `csi:0`, `rtsp://...`, `http://...` (MJPEG), `gst:PIPELINE ! appsink`, or the path
    of a video, or of a folder or zip of images.

    Raises CameraError: `camera.missing` when a file or device is not there, `camera.source` for what names none.
    """
    scheme, _, rest = text.partition(":")
    kind = _SCHEMES.get(scheme)
    if kind in ("rtsp", "http"):
        _check_address(text)
        return Source(kind, text)
    if kind == "csi" and not rest.isdigit():
        raise CameraError(
            "camera.source", f"source '{redact_location(text)}'", "csi:N with a sensor number", "e.g. csi:0"
        )
    if kind == "gst" and not re.search(r"!\s*appsink\b", rest):
        found = f"a pipeline without '! appsink': '{redact(rest)}'"
        remedy = "end it with '! videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false'"
        raise CameraError("camera.source", found, "one whose frames reach us", remedy)
    if kind in ("csi", "gst"):
        return Source(kind, rest)
    if kind is None and rest.startswith("//"):
        found = f"source '{redact_location(text)}'"
        raise CameraError("camera.source", found, f"{', '.join(_SCHEMES)} or a path", "check how it begins")
    name = rest if kind == "v4l2" else text
    path = Path(name)
    if not name.strip() or not path.exists():
        raise CameraError(
            "camera.missing",
            f"no {redact_location(name).strip() or 'source'}",
            "a video, images or a camera there",
            "check the source",
        )
    if kind == "v4l2":
        return Source(kind, rest)
    return Source("images" if path.is_dir() or path.suffix.lower() == ".zip" else "video", text)


def _check_address(text: str) -> None:
    """Raises CameraError (`camera.source`) for what is no URL: in one, a password has no `/`, `?` and `#`."""
    parts = urlsplit(text)
    try:
        if parts.hostname and (parts.port is None or parts.port):
            return
    except ValueError:
        pass
    found, expected = (
        f"source '{redact_location(text)}'",
        "scheme://host/path, or scheme://user:password@host:port/path",
    )
    raise CameraError("camera.source", found, expected, "in a password write / as %2F, ? as %3F, # as %23, @ as %40")


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


def csi_pipeline(sensor: str, asked: CaptureSettings) -> str:
    """Argus picks the sensor's mode by the size and rate that it is asked for."""
    mode = [f"{name}={value}" for name, value in (("width", asked.width), ("height", asked.height)) if value]
    if asked.fps:
        rate = Fraction(asked.fps).limit_denominator(1001)
        mode.append(f"framerate={rate.numerator}/{rate.denominator}")
    return (
        f"nvarguscamerasrc sensor-id={sensor} ! {','.join(['video/x-raw(memory:NVMM)', 'format=NV12', *mode])} ! "
        f"nvvidconv flip-method={_FLIPS.index(asked.flip)} ! video/x-raw,format=BGRx ! {_BGR}"
    )


def rtsp_pipeline(address: str, asked: CaptureSettings) -> str:
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
