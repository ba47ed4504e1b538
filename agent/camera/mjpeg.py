"""Read MJPEG over HTTP: one answer that does not end, with one JPEG after another (multipart/x-mixed-replace).

FFmpeg reads it too, but keeps the first picture's size for ever (until OpenCV 4.12 it then repeats one picture), ends
the stream at a damaged picture, and holds two pictures back where the camera does not send their lengths.
`open_mjpeg` asks the camera, `read_mjpeg` reads its answer, `JpegSplitter` cuts the bytes into pictures. The classes at
the end connect as urllib does, by connections that another thread can cut.
"""

from __future__ import annotations

import http.client
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit, urlunsplit

from agent.camera.source import Source
from agent.camera.stream_health import OPEN_S, StreamConnection
from agent.common.errors import CameraError

_CHUNK_BYTES = 1 << 16
_MOST_BYTES = 64 << 20  # of one picture; anything longer is none
_START, _END, _EDGE = b"\xff\xd8", b"\xff\xd9", re.compile(rb"\xff[\xd8\xd9]")
_SCAN, _ENDS = 0xDA, (0xD8, 0xD9)
_ALONE = frozenset({0x01, *range(0xD0, 0xD8)})  # markers without a length


def open_mjpeg(source: Source, connection: StreamConnection) -> Any:
    """Return the camera's answer; None where it is not MJPEG, but perhaps something that FFmpeg reads.

    The certificate of an https camera is not checked, nor does FFmpeg check it: cameras sign their own. `connection` is
    attached to the socket. Raises CameraError (`camera.open`).
    """
    try:
        answer = _opener(source, connection).open(_without_user(urlsplit(source.location)), timeout=OPEN_S)
    except urllib.error.HTTPError as error:
        error.close()
        remedy = "check the user name and password in its address" if error.code in (401, 403) else "check its address"
        found = f"{source.shown} answers {error.code} {error.reason}"
        raise CameraError("camera.open", found, "a stream of pictures", remedy) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        found = f"{source.shown} does not answer ({type(reason).__name__})"
        raise CameraError("camera.open", found, "a camera", "check its address and the network") from None
    content_type = answer.headers.get_content_type()
    if content_type == "multipart/x-mixed-replace":
        return answer
    connection.detach()
    answer.close()
    if content_type.startswith("image/"):
        found = f"{source.shown} gives a single picture ({content_type})"
        remedy = "give the address of the camera's stream, not that of a snapshot"
        raise CameraError("camera.open", found, "MJPEG: multipart/x-mixed-replace", remedy)
    if connection.was_cut:  # within the headers
        raise CameraError("camera.open", f"{source.shown} does not answer in time", "a camera", "restart the camera")
    return None


def read_mjpeg(source: Source, answer: Any) -> Iterator[list[bytes | None]]:
    """Yield, for each chunk that arrives, the JPEGs that it completes; None for a damaged one.

    Raises CameraError (`camera.lost`) when the camera ends the stream, or the connection is cut.
    """
    splitter = JpegSplitter()
    try:
        while chunk := answer.read1(_CHUNK_BYTES):
            yield list(splitter.feed(chunk))
    except TimeoutError:
        yield []  # the reader knows how long there was nothing
    except (OSError, http.client.HTTPException):
        pass  # whatever the error: the camera is gone
    raise CameraError("camera.lost", f"{source.shown} stopped", "frames", "check the camera and its network")


class JpegSplitter:
    """Cut what a camera sends into JPEGs by their own markers (ITU-T T.81, annex B).

    Boundaries and lengths between the pictures are ignored: cameras get them wrong. A picture is complete with its last
    byte, whatever follows.
    """

    def __init__(self) -> None:
        self._kept = bytearray()
        self._coded = 0  # where the picture's coded data start, 0 until they do
        self._searched = 0  # up to where they have been searched

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """Yield the pictures that these bytes complete; None for one that is damaged or was cut off."""
        self._kept += chunk
        while self._skip_to_start():
            try:
                self._coded = self._coded or _headers_end(self._kept)
            except ValueError:
                yield None
                self._drop(len(_START))
                continue
            edge = _EDGE.search(self._kept, max(self._coded, self._searched - 1)) if self._coded else None
            if edge is not None:
                whole = edge[0] == _END  # coded data hold no start: it is that of the next picture
                end = edge.end() if whole else edge.start()
                yield bytes(self._kept[:end]) if whole else None
                self._drop(end)
            elif len(self._kept) > _MOST_BYTES:
                yield None
                self._drop(len(self._kept))
            else:
                self._searched = len(self._kept)
                return

    def _skip_to_start(self) -> bool:
        start = self._kept.find(_START)
        if start != 0:
            self._drop(start if start > 0 else max(0, len(self._kept) - 1))
        return start >= 0

    def _drop(self, count: int) -> None:
        del self._kept[:count]
        self._coded = self._searched = 0


def _headers_end(data: bytearray) -> int:
    """Return where the coded data of the picture start; 0 while more bytes are needed to know.

    Headers are skipped by their lengths, since a thumbnail in them may be a JPEG itself. Raises ValueError for bytes
    that are no header.
    """
    at = len(_START)
    while at + 4 <= len(data):
        marker = data[at + 1]
        if data[at] != 0xFF or marker in _ENDS:
            raise ValueError(marker)
        if marker == 0xFF:  # fills up
            at += 1
        elif marker in _ALONE:
            at += 2
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
            if marker == _SCAN:
                return at
    return 0


class _Hangup(urllib.request.BaseHandler):
    """Close the connection of an answer that asks for a password, before the next request: urllib does not."""

    handler_order = 400  # those that give the password have 490

    def http_error_401(self, _request: Any, answer: Any, *_: Any) -> None:
        answer.close()


class _Cuttable(http.client.HTTPConnection):
    """A connection that attaches its socket to `held` once it is connected."""

    held: StreamConnection

    def connect(self) -> None:
        super().connect()
        self.held.attach(self.sock)


class _CuttableTls(_Cuttable, http.client.HTTPSConnection):
    pass


class _ConnectionHandler(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Connect as urllib does, by connections that can be cut."""

    def __init__(self, connection: StreamConnection, context: ssl.SSLContext) -> None:
        super().__init__()
        self._held = connection
        self._tls = context

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connect, _Cuttable), request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(self._connect, _CuttableTls), request, context=self._tls)

    def _connect(self, kind: type[_Cuttable], host: str, **settings: Any) -> _Cuttable:
        connection = kind(host, **settings)
        connection.held = self._held
        return connection


def _opener(source: Source, connection: StreamConnection) -> urllib.request.OpenerDirector:
    """Return an opener that logs in with the user of the address, in either way of HTTP (RFC 7617, RFC 7616)."""
    parts = urlsplit(source.location)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    handlers: list[urllib.request.BaseHandler] = [_ConnectionHandler(connection, context)]
    if parts.username is not None:
        users = urllib.request.HTTPPasswordMgrWithDefaultRealm()
        users.add_password(None, _without_user(parts), unquote(parts.username), unquote(parts.password or ""))
        handlers += [_Hangup(), urllib.request.HTTPBasicAuthHandler(users), urllib.request.HTTPDigestAuthHandler(users)]
    return urllib.request.build_opener(*handlers)


def _without_user(parts: SplitResult) -> str:
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
