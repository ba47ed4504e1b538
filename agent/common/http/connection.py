"""Speak HTTP over one connection: read the head of a request, and send an answer as far as there is room."""

from __future__ import annotations

import socket
from contextlib import suppress

_MOST_BYTES = 16384  # of a request, with whatever follows it


class HttpConnection:
    """A connection; no call blocks.

    Attributes:
        moved_s: When it was made, or last took anything, on the monotonic clock.
        is_leaving: Everything for it has been queued, and its end is waited for.
    """

    def __init__(self, connection: socket.socket, now_s: float, header: str = "") -> None:
        """header: a line of HTTP that every answer gets."""
        connection.setblocking(False)
        with suppress(OSError):  # a Unix socket has no such option
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.moved_s = now_s
        self.is_leaving = False
        self._header = f"{header}\r\n".encode() if header else b""
        self._head = bytearray()
        self._is_read = False
        self._received = 0
        self._unsent = memoryview(b"")

    @property
    def is_ready(self) -> bool:
        """True if it has taken everything so far."""
        return not self._unsent

    def receive(self) -> bytes | None:
        """Return the head of the request when it is complete, else None; what follows the head is thrown away.

        Raises OSError where the other side has gone, or sends too much.
        """
        with suppress(BlockingIOError):
            content = self.socket.recv(_MOST_BYTES)
            self._received += len(content)
            if not content or self._received > _MOST_BYTES:
                raise ConnectionAbortedError
            if not self._is_read:
                self._head += content
                head, end, _ = bytes(self._head).partition(b"\r\n\r\n")
                self._is_read = bool(end)
                return head + end if end else None
        return None

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
