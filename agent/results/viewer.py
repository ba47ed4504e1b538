"""Speak HTTP with one viewer of the preview: read its request, answer it, and send pictures as far as there is room.

No call blocks. A viewer passes through three states: its request is read, it gets pictures (`request` is set), and it
has got all (`is_leaving`). Pictures are sent as parts of `multipart/x-mixed-replace`, which every browser shows.
"""

from __future__ import annotations

import io
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPMessage, parse_headers
from urllib.parse import parse_qs, quote, urlsplit

from agent.mqtt.endpoint import is_loopback

STREAM, PICTURE = "/stream.mjpeg", "/frame.jpg"

_BOUNDARY = b"\r\n--frame\r\n"
_MOST_BYTES = 16384  # of a request, with whatever follows it
# Nobody keeps pictures, guesses another type, or embeds them into a page that was not served here.
_HEADERS = (
    "Cache-Control: no-store",
    "X-Content-Type-Options: nosniff",
    "Cross-Origin-Resource-Policy: same-origin",
    "Connection: close",
)


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
    """What a viewer asks for: a camera's stream, or one picture of it."""

    camera: str
    streams: bool


class RefusedRequest(Exception):
    """A request that is refused, with the answer to it."""

    def __init__(self, status: HTTPStatus, text: str, *headers: str) -> None:
        super().__init__(text)
        self.response = response(status, f"{text}\n".encode(), "text/plain; charset=utf-8", *headers)


def response(status: HTTPStatus, body: bytes, content_type: str, *headers: str) -> bytes:
    """Return a whole response, after which the connection ends."""
    return _head(status, content_type, f"Content-Length: {len(body)}", *headers) + body


def stream_head() -> bytes:
    """Return the beginning of a stream, up to the first part."""
    return _head(HTTPStatus.OK, "multipart/x-mixed-replace; boundary=frame") + _BOUNDARY


def _head(status: HTTPStatus, content_type: str, *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Type: {content_type}", *headers, *_HEADERS)
    return "".join(f"{line}\r\n" for line in lines).encode() + b"\r\n"


def parse_request(head: bytes, cameras: Sequence[str], checks_host: bool) -> ViewRequest:
    """Parse a request's head; without `camera` in the query it is about the first camera.

    checks_host: refuse a Host that does not name this machine's loopback interface. A page whose own name was made to
    lead here (DNS rebinding) is as good as the preview's own for a browser, and could read the pictures.

    Raises RefusedRequest.
    """
    line, _, rest = head.partition(b"\r\n")
    try:
        method, target, version = line.decode("utf-8", "replace").split(" ")
        headers = parse_headers(io.BytesIO(rest))
        url = urlsplit(target)
        query = parse_qs(url.query, keep_blank_values=True, max_num_fields=8)
    except (ValueError, HTTPException):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "a request that is not HTTP/1.1") from None
    if not version.startswith("HTTP/1."):
        raise RefusedRequest(HTTPStatus.BAD_REQUEST, "expected HTTP/1.1")
    if checks_host and not _names_loopback(headers):
        text = "the Host of the request does not name this machine: use 127.0.0.1 or localhost, with the port"
        raise RefusedRequest(HTTPStatus.FORBIDDEN, text)
    if url.path not in (STREAM, PICTURE):
        raise RefusedRequest(HTTPStatus.NOT_FOUND, _known_pages(cameras))
    if method != "GET":
        raise RefusedRequest(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET", "Allow: GET")
    camera = query.get("camera", cameras)[0]
    if camera not in cameras:
        raise RefusedRequest(HTTPStatus.NOT_FOUND, _known_pages(cameras))
    return ViewRequest(camera, url.path == STREAM)


def _names_loopback(headers: HTTPMessage) -> bool:
    hosts = headers.get_all("Host", [])
    if len(hosts) != 1:
        return False
    try:
        host = urlsplit(f"//{hosts[0].strip()}").hostname
    except ValueError:
        return False
    return host is not None and is_loopback(host)


def _known_pages(cameras: Sequence[str]) -> str:
    names = [quote(camera, safe="", errors="replace") for camera in cameras]
    return "\n".join(["expected one of", *(f"{page}?camera={name}" for name in names for page in (STREAM, PICTURE))])


class Viewer:
    """A connection.

    Attributes:
        request: What it gets; None before its request, and where that was refused.
        sent: The picture that it has got last, or is getting.
        moved_s: When it connected, or last took anything, on the monotonic clock.
        is_leaving: Everything for it has been queued, and its end is waited for.
    """

    def __init__(self, connection: socket.socket, now_s: float, header: str = "") -> None:
        """header: a line of HTTP that every answer gets."""
        connection.setblocking(False)
        with suppress(OSError):  # a Unix socket has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.request: ViewRequest | None = None
        self.sent: Picture | None = None
        self.moved_s = now_s
        self.is_leaving = False
        self._header = f"{header}\r\n".encode() if header else b""
        self._head = bytearray()
        self._received = 0
        self._unsent = memoryview(b"")

    @property
    def is_ready(self) -> bool:
        """True if it has taken everything so far, and may get another picture."""
        return not self._unsent

    def receive(self) -> bytes | None:
        """Return the head of the request when it is complete, else None; what follows the head is thrown away.

        Raises OSError where the viewer has gone, or sends too much.
        """
        with suppress(BlockingIOError):
            content = self.connection.recv(_MOST_BYTES)
            self._received += len(content)
            if not content or self._received > _MOST_BYTES:
                raise ConnectionAbortedError
            if self.request is None and not self.is_leaving:
                self._head += content
                head, end, _ = bytes(self._head).partition(b"\r\n\r\n")
                return head + end if end else None
        return None

    def begin(self, request: ViewRequest, now_s: float) -> None:
        """Accept its request; a stream starts."""
        self.request = request
        if request.streams:
            self._push(self._with_header(stream_head()), now_s)

    def show(self, picture: Picture, now_s: float) -> None:
        """Send a picture of the stream."""
        self.sent = picture
        self._push(picture.part, now_s)

    def finish(self, whole_response: bytes, now_s: float) -> None:
        """Send a response, then let the viewer hang up."""
        self.is_leaving = True
        self._push(self._with_header(whole_response), now_s)

    def send(self, now_s: float) -> None:
        """Send as much as there is room for. Raises OSError where the viewer has gone."""
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.connection.send(self._unsent, socket.MSG_NOSIGNAL) :]
                self.moved_s = now_s
        if self.is_leaving and not self._unsent:
            self.connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.connection.close()

    def _with_header(self, answer: bytes) -> bytes:
        first, end, rest = answer.partition(b"\r\n")
        return first + end + self._header + rest

    def _push(self, content: bytes, now_s: float) -> None:
        self._unsent = memoryview(bytes(self._unsent) + content)
        self.moved_s = now_s
