"""Parse a SRC argument into a `Source`: which kind of camera or recording it is, and what is requested of it.

A `Source` also carries the `Framing`, which decides what of a picture anybody gets to see: one region, without what is
masked. The table `_KINDS_BY_KEY` says which key of `camera:` has an effect on which kind of source; any other
combination is refused.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from agent.common.errors import CameraError
from agent.common.redaction import redact, redact_location

Transport = Literal["tcp", "udp"]
Decoder = Literal["ffmpeg", "gstreamer"]
PixelFormat = Literal["mjpg", "yuyv"]
Flip = Literal["none", "clockwise", "counterclockwise", "rotate-180", "horizontal", "vertical"]

_KIND_BY_SCHEME = {
    "rtsp": "rtsp",
    "rtsps": "rtsp",
    "http": "http",
    "https": "http",
    "v4l2": "v4l2",
    "csi": "csi",
    "gst": "gst",
}
_LIVE_KINDS = tuple(dict.fromkeys(_KIND_BY_SCHEME.values()))
_RECORDINGS = ("video", "images")
_KINDS_BY_KEY = {
    "speed": _RECORDINGS,
    "loop": _RECORDINGS,
    "labels": _RECORDINGS,
    "silence_s": _LIVE_KINDS,
    "frozen_s": _LIVE_KINDS,
    "transport": ("rtsp",),
    "decoder": ("rtsp",),
    "decode_threads": ("rtsp", "http"),
    "pixel_format": ("v4l2",),
    "width": ("v4l2", "csi"),
    "height": ("v4l2", "csi"),
    "fps": ("v4l2", "csi"),
    "flip": ("csi",),
}

MAX_PIXELS = 1 << 26  # 8192 x 8192, which decode to 192 MiB
_MOST_HOST = 256  # characters of a host's name (RFC 1035, section 2.3.4: 255 bytes)
_FROZEN_S = 1.5
_FROZEN_KINDS = ("v4l2", "csi")  # not gst: a pipeline does not say how its frames are coded


@dataclass(frozen=True)
class Framing:
    """The part of a picture that is seen, in shares of the whole picture, so that it holds at every size.

    Args:
        region: left, top, right, bottom; None: the whole picture.
        masks: polygons of corners (x, y), which are painted over.
    """

    region: tuple[float, float, float, float] | None = None
    masks: Sequence[Sequence[tuple[float, float]]] = ()


WHOLE = Framing()


@dataclass(frozen=True)
class CaptureSettings:
    """The settings requested of a camera and its driver; None leaves one to them.

    Args:
        transport: of rtsp.
        decoder: of rtsp.
        decode_threads: threads of a stream's decoder, which holds back one frame for each but the first. By itself
            OpenCV has one for each core.
        pixel_format: how frames come over the wire, of v4l2.
        width: of the mode of v4l2 and csi, in pixels.
        height: as width.
        fps: of the mode of v4l2 and csi.
        flip: done by the hardware, of csi.
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
    """A parsed SRC argument.

    Args:
        kind: video, images, v4l2, csi, rtsp, http or gst.
        location: the address or path. It holds the password, so no `repr` shows it.
        requested: what is requested of the camera and its driver.
        frozen_s: seconds for which a camera may repeat a picture bit by bit before it counts as lost; None: no limit.
        framing: applied to every picture, for every reader.
        loop: of a recording: restart it at its end, without limit.
        max_pixels: of a picture; one of more is refused, by its header where that can be read.
    """

    kind: str
    location: str = field(repr=False)
    requested: CaptureSettings = CaptureSettings()
    frozen_s: float | None = None
    framing: Framing = WHOLE
    loop: bool = False
    max_pixels: int = MAX_PIXELS

    def check_accepts(self, keys: Mapping[str, object]) -> None:
        """Raises CameraError (`camera.option`) for a key of `camera:` that has no effect on such a source.

        keys: those that are not at their defaults.
        """
        for key, value in keys.items():
            kinds = _KINDS_BY_KEY.get(key)  # None: any
            if kinds is not None and self.kind not in kinds:
                found = f"camera.{key}: {value} for a source of kind {self.kind}, {self.shown}"
                raise CameraError("camera.option", found, f"a source of kind {' or '.join(kinds)}", "leave the key out")
        if keys.get("decoder") == "gstreamer" and "decode_threads" in keys:
            found = f"camera.decode_threads: {keys['decode_threads']} beside camera.decoder: gstreamer"
            expected = "one of the two: decode_threads are FFmpeg's threads"
            raise CameraError("camera.option", found, expected, "leave one of them out")

    def check_pixels(self, width: int, height: int) -> None:
        """Raise CameraError (`camera.pixels`) for pictures of more pixels than are allowed."""
        if width * height > self.max_pixels:
            found = f"{self.shown} gives pictures of {width} x {height}"
            remedy = "set a smaller picture size in the camera, or raise camera.max_pixels: a pixel takes three bytes"
            raise CameraError("camera.pixels", found, f"at most {self.max_pixels} pixels", remedy)

    def check_accepts_mjpeg(self) -> None:
        """Raises CameraError (`camera.option`) for settings of a decoder: MJPEG is read picture by picture."""
        if self.requested.decode_threads != CaptureSettings.decode_threads:
            found = f"camera.decode_threads: {self.requested.decode_threads} for {self.shown}, which sends MJPEG"
            raise CameraError("camera.option", found, "a stream that FFmpeg decodes", "leave the key out")

    @property
    def shown(self) -> str:
        """The location as logs and messages may show it: without user names, passwords and queries."""
        return redact(self.location) if self.kind == "gst" else redact_location(self.location)

    @property
    def live(self) -> bool:
        """True for a camera, False for a recording."""
        return self.kind in _LIVE_KINDS

    @property
    def needs_gstreamer(self) -> bool:
        return self.kind in ("csi", "gst") or self.requested.decoder == "gstreamer"

    @property
    def reports_key_frames(self) -> bool:
        """True for a stream of a video codec whose reader says which pictures were coded without others."""
        return self.kind in ("rtsp", "http") and not self.needs_gstreamer

    @property
    def usual_frozen_s(self) -> float | None:
        """Seconds after which a repeated picture means a frozen camera of this kind; None where it means nothing."""
        return _FROZEN_S if self.kind in _FROZEN_KINDS or self.reports_key_frames else None


def is_live(text: str) -> bool:
    """Return True where this SRC argument names a camera, or may be meant as one, and no file."""
    return text.partition(":")[0] in _KIND_BY_SCHEME or "://" in text


def parse_source(text: str) -> Source:
    """Parse `v4l2:/dev/video0`, `csi:0`, `rtsp://...`, `http://...` (MJPEG), `gst:PIPELINE ! appsink`, or the path of a
    video, or of a folder or zip of images.

    Raises CameraError:
        camera.missing  a file or device is not there
        camera.source   the text names no source
    """
    scheme, _, rest = text.partition(":")
    kind = _KIND_BY_SCHEME.get(scheme)
    if kind in ("rtsp", "http"):
        _check_address(text)
        return Source(kind, text)
    if kind == "csi" and not rest.isdigit():
        found = f"source '{redact_location(text)}'"
        raise CameraError("camera.source", found, "csi:N with a sensor number", "e.g. csi:0")
    if kind == "gst" and not re.search(r"!\s*appsink\b", rest):
        found = f"a pipeline without '! appsink': '{redact(rest)}'"
        remedy = "end it with '! videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false'"
        raise CameraError("camera.source", found, "a pipeline whose frames reach tared", remedy)
    if kind in ("csi", "gst"):
        return Source(kind, rest)
    if kind is None and rest.startswith("//"):
        found, expected = f"source '{redact_location(text)}'", f"{', '.join(_KIND_BY_SCHEME)} or a path"
        raise CameraError("camera.source", found, expected, "check the scheme at its beginning")
    name = rest if kind == "v4l2" else text
    path = Path(name)
    if not name.strip() or not os.path.exists(path):  # also False for a name that the system does not take
        found, remedy = f"no {redact_location(name).strip() or 'source'}", "check the path or address of the source"
        raise CameraError("camera.missing", found, "a video, images or a camera at this place", remedy)
    if kind == "v4l2":
        return Source(kind, rest)
    return Source("images" if path.is_dir() or path.suffix.lower() == ".zip" else "video", text)


def _check_address(text: str) -> None:
    """Raises CameraError (`camera.source`) for what is no URL: in one, a password has no `/`, `?` and `#`."""
    with suppress(ValueError):  # brackets that do not match, or a port that is no number
        parts = urlsplit(text)
        if parts.hostname and len(parts.hostname) < _MOST_HOST and (parts.port is None or parts.port):
            return
    found = f"source '{redact_location(text)}'"
    expected = "scheme://host/path, or scheme://user:password@host:port/path"
    raise CameraError("camera.source", found, expected, "in a password write / as %2F, ? as %3F, # as %23, @ as %40")
