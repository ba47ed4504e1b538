"""Speak HTTP with one viewer of the preview: parse its request, and send it pictures.

A viewer passes through three states: its request is read, it gets pictures (`request` is set), and it has got all
(`is_leaving`). Pictures are sent as parts of `multipart/x-mixed-replace`, which every browser shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import quote

from agent.common.http.addresses import is_loopback
from agent.common.http.connection import HttpConnection
from agent.common.http.request import RefusedRequest, parse_head, response_head

STREAM, PICTURE = "/stream.mjpeg", "/frame.jpg"

_BOUNDARY = b"\r\n--frame\r\n"
# The beginning of a stream, up to the first part.
_STREAM_HEAD = response_head(HTTPStatus.OK, "multipart/x-mixed-replace; boundary=frame") + _BOUNDARY


@dataclass(frozen=True, eq=False)
class Picture:
    """An annotated frame as a JPEG. ts: capture time, Unix s of a camera, media time of a file."""

    jpeg: bytes
    frame_id: int
    ts: float

    @property
    def part(self) -> bytes:
        """The picture as a part of a stream. The next boundary follows at once: until then a browser shows nothing."""
        head = (
            f"Content-Type: image/jpeg\r\nContent-Length: {len(self.jpeg)}\r\n"
            f"X-Frame: {self.frame_id}\r\nX-Timestamp: {self.ts:.6f}\r\n\r\n"
        )
        return head.encode() + self.jpeg + _BOUNDARY


@dataclass(frozen=True)
class ViewRequest:
    """A viewer's request: a camera's stream, or one picture of it."""

    camera: str
    streams: bool


def parse_request(head: bytes, cameras: Sequence[str], checks_host: bool) -> ViewRequest:
    """Parse a request's head; without `camera` in the query it is about the first camera.

    checks_host: refuse a Host that does not name this machine's loopback interface. A page whose own name was made to
    lead here (DNS rebinding) is as good as the preview's own for a browser, and could read the pictures.

    Raises RefusedRequest.
    """
    request = parse_head(head)
    if checks_host and (request.host is None or not is_loopback(request.host)):
        text = "the Host of the request does not name this machine: use 127.0.0.1 or localhost, with the port"
        raise RefusedRequest(HTTPStatus.FORBIDDEN, text)
    if request.path not in (STREAM, PICTURE):
        raise RefusedRequest(HTTPStatus.NOT_FOUND, _known_pages(cameras))
    if request.method != "GET":
        raise RefusedRequest(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET", "Allow: GET")
    camera = request.query.get("camera", cameras)[0]
    if camera not in cameras:
        raise RefusedRequest(HTTPStatus.NOT_FOUND, _known_pages(cameras))
    return ViewRequest(camera, request.path == STREAM)


def _known_pages(cameras: Sequence[str]) -> str:
    names = [quote(camera, safe="", errors="replace") for camera in cameras]
    return "\n".join(["expected one of", *(f"{page}?camera={name}" for name in names for page in (STREAM, PICTURE))])


class Viewer(HttpConnection):
    """A connection.

    Attributes:
        request: What it gets; None before its request, and where that was refused.
        sent: The picture that it has got last, or is getting.
    """

    request: ViewRequest | None = None
    sent: Picture | None = None

    def begin(self, request: ViewRequest, now_s: float) -> None:
        """Accept its request; a stream starts."""
        self.request = request
        if request.streams:
            self.push(self.with_header(_STREAM_HEAD), now_s)

    def show(self, picture: Picture, now_s: float) -> None:
        """Send a picture of the stream."""
        self.sent = picture
        self.push(picture.part, now_s)
