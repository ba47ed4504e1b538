"""What a source is called, and of which kind it is; nothing is opened here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent.errors import CameraError
from agent.framing import WHOLE, Framing

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


@dataclass(frozen=True)
class Source:
    """A parsed SRC argument: `kind` is video, images, v4l2, csi, rtsp, http or gst.

    transport: of rtsp. decode_threads: of a stream's decoder, which holds back a frame for each but the first;
    OpenCV by itself has one for each core. framing: what every reader sees of each picture.
    """

    kind: str
    location: str
    transport: Transport = "tcp"
    decode_threads: int = 1
    framing: Framing = WHOLE

    @property
    def shown(self) -> str:
        """The location as it may appear in logs and messages: without user names, passwords and what a query says."""
        return re.sub(r"(//[^\s?]*)\?\S*", r"\1?...", re.sub(r"//[^/@\s]*@", "//", self.location))

    @property
    def live(self) -> bool:
        return self.kind in _SCHEMES.values()


def is_live(text: str) -> bool:
    """Whether this SRC argument names a camera, and no file."""
    return text.partition(":")[0] in _SCHEMES


def parse_source(text: str) -> Source:
    """Understand `v4l2:/dev/video0`, `csi:0`, `rtsp://...`, `http://...` (MJPEG), `gst:PIPELINE ! appsink`, or the path
    of a video, or of a folder or zip of images.

    Raises CameraError: `camera.missing` when a file or device is not there, `camera.source` for what names none.
    """
    scheme, _, rest = text.partition(":")
    kind = _SCHEMES.get(scheme)
    if kind in ("rtsp", "http"):
        return Source(kind, text)
    if kind == "csi" and not rest.isdigit():
        raise CameraError("camera.source", f"source '{text}'", "csi:N with a sensor number", "e.g. csi:0")
    if kind == "gst" and not re.search(r"!\s*appsink\b", rest):
        found = f"a pipeline without '! appsink': '{Source(kind, rest).shown}'"
        remedy = "end it with '! videoconvert ! video/x-raw,format=BGR ! appsink drop=true max-buffers=1 sync=false'"
        raise CameraError("camera.source", found, "one whose frames reach us", remedy)
    if kind in ("csi", "gst"):
        return Source(kind, rest)
    path = Path(rest if kind == "v4l2" else text)
    if not path.exists():
        raise CameraError("camera.missing", f"no {path}", "a video, images or a camera there", "check the source")
    if kind == "v4l2":
        return Source(kind, rest)
    return Source("images" if path.is_dir() or path.suffix.lower() == ".zip" else "video", text)
