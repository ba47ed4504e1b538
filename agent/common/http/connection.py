"""Speak HTTP over one connection: read the head of a request, and send an answer as far as there is room."""

from __future__ import annotations

import re
import socket
from contextlib import suppress

_MOST_BYTES = 16384  # size of a request's head, with whatever follows it
_BODY_BYTES = re.compile(rb"^content-length:[ \t]*(\d{1,9})[ \t]*\r$", re.I | re.M)


class HttpConnection:
    """A connection; no call blocks.

    Attributes:
        moved_s: When it was made, or last took anything, on the monotonic clock.
        is_leaving: Everything for it has been queued, and its end is waited for.
    """

    def __init__(self, connection: socket.socket, now_s: float, header: str = "", most_body: int = 0) -> None:
        """header: a line of HTTP that every answer gets. most_body: bytes of a body that is read with the head."""
        connection.setblocking(False)
        with suppress(OSError):  # a Unix socket has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.moved_s = now_s
        self.is_leaving = False
        self._header = f"{header}\r\n".encode() if header else b""
        self._request = bytearray()
        self._most_body = most_body
        self._is_read = False
        self._received = 0
        self._unsent = memoryview(b"")

    @property
    def is_ready(self) -> bool:
        """True if it has taken everything so far."""
        return not self._unsent

    def receive(self) -> bytes | None:
        """Return the head of the request when it is complete, else None; with its body where bodies are read.

        Whatever else follows is thrown away. Raises OSError where the other side has gone, or sends too much.
        """
        with suppress(BlockingIOError):
            content = self.socket.recv(_MOST_BYTES)
            self._received += len(content)
            if not content or self._received > _MOST_BYTES + self._most_body:
                raise ConnectionAbortedError
            if not self._is_read:
                self._request += content
                head, end, body = bytes(self._request).partition(b"\r\n\r\n")
                expected = self._body_bytes(head + end)
                self._is_read = bool(end) and len(body) >= expected
                return head + end + body[:expected] if self._is_read else None
        return None

    def _body_bytes(self, head: bytes) -> int:
        """Return how many bytes of a body are read. Raises OSError for more than are allowed."""
        found = _BODY_BYTES.search(head) if self._most_body else None
        expected = int(found[1]) if found is not None else 0
        if expected > self._most_body:
            raise ConnectionAbortedError
        return expected

    def finish(self, whole_response: bytes, now_s: float) -> None:
        """Send a response, then let the other side hang up."""
        self.is_leaving = True
        self.push(self.with_header(whole_response), now_s)

    def push(self, content: bytes, now_s: float) -> None:
        """Queue more to send."""
        self._unsent = memoryview(bytes(self._unsent) + content)
        self.moved_s = now_s

    def send(self, now_s: float) -> None:
        """Send as much as there is room for. Raises OSError where the other side has gone."""
        with suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent, socket.MSG_NOSIGNAL) :]
                self.moved_s = now_s
        if self.is_leaving and not self._unsent:
            self.socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self.socket.close()

    def with_header(self, answer: bytes) -> bytes:
        """Return an answer with the header of this server."""
        first, end, rest = answer.partition(b"\r\n")
        return first + end + self._header + rest
