"""Accept connections on a listening socket, read their requests, and send what they get; bounded, and in one thread.

A connection waits until its request is complete. Then it is answered and leaves, or it is kept, and gets more. Those
that wait or leave are few, and have little time: where one too many comes, the oldest goes. An honest client sends its
request at once, so a flood of idle connections does not keep it out.
"""

from __future__ import annotations

import errno
import selectors
import socket
from collections.abc import Callable
from typing import Generic, TypeVar

from agent.common.clock import SYSTEM_CLOCK, Clock, Waker
from agent.common.errors import AgentError
from agent.common.http.connection import HttpConnection
from agent.common.timing import RetryState

BACKLOG = 128
_SEND_BUFFER_BYTES = 2**18  # for each connection in the kernel: a slow one is to get fewer pictures, not old ones
_MOST_WAITING = 16  # connections that are not kept: their request or their end is still to come
_ADMITTED_AT_ONCE = 16
_CROWDED_S = 0.02  # until more are admitted, where the oldest had to go: a flood of connections costs little
_REQUEST_S, _LEAVE_S, _STALLED_S = 5.0, 2.0, 30.0
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

C = TypeVar("C", bound=HttpConnection)


class Reception(Generic[C]):
    """The connections of one listening socket; for one thread. Nothing blocks but `turn`.

    Attributes:
        kept: Connections whose request was accepted, and that get more than one answer.
    """

    def __init__(
        self,
        listener: socket.socket,
        waker: Waker,
        connect: Callable[[socket.socket, float], C],
        answer: Callable[[C, bytes, float], None],
        accepting: RetryState,
        part: str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare to serve.

        Args:
            listener: Does not block.
            waker: The caller's; it ends a turn, which clears it.
            connect: Makes the connection's object, at a time of `clock`.
            answer: Called with the head of each request, and the time; calls `keep`, or the connection's `finish`.
            accepting: Receives the error `PART.accept` where descriptors or memory are short.
            part: The name of this server in error codes.
            clock: Says when a connection has had its time.

        Raises OSError.
        """
        self.kept: dict[C, None] = {}
        self._waiting: dict[C, None] = {}  # all others, the oldest first
        self._listener, self._waker = listener, waker
        self._connect, self._answer, self._accepting, self._part = connect, answer, accepting, part
        self._clock = clock
        self._admits, self._admits_at_s = True, 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(waker.socket, selectors.EVENT_READ)
        self._selector.register(listener, selectors.EVENT_READ)

    def turn(self, due_s: float | None) -> None:
        """Wait until something happens, and see to it; until `due_s` of the clock at most."""
        for key, _ in self._clock.select(self._selector, self._idle_s(due_s)):
            if key.fileobj is self._waker.socket:
                self._waker.clear()
            elif key.fileobj is self._listener:
                self._admit()
            else:
                self._attend(key.data)
        now_s = self._clock.monotonic_s()
        for connection in [*self._waiting, *self.kept]:
            if self._is_timed(connection) and now_s >= connection.moved_s + _limit_s(connection):
                self.end(connection)
        if self._admits != (now_s >= self._admits_at_s):
            self._admits = not self._admits
            if self._admits:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)

    def keep(self, connection: C) -> None:
        """Keep a connection whose request was accepted: from now on it has time until there is something for it."""
        self.kept[connection] = self._waiting.pop(connection)

    def finish(self, connection: C, whole_response: bytes, now_s: float) -> None:
        """Send the last answer to a connection that was kept."""
        self._waiting[connection] = self.kept.pop(connection)
        connection.finish(whole_response, now_s)
        self.send(connection, now_s)

    def send(self, connection: C, now_s: float) -> None:
        """Send what is queued for a connection as far as there is room; one that has gone is ended."""
        try:
            connection.send(now_s)
        except OSError:
            self.end(connection)
            return
        events = selectors.EVENT_READ if connection.is_ready else selectors.EVENT_READ | selectors.EVENT_WRITE
        if self._selector.get_key(connection.socket).events != events:
            self._selector.modify(connection.socket, events, connection)

    def end(self, connection: C) -> None:
        """End a connection."""
        self._waiting.pop(connection, None)
        self.kept.pop(connection, None)
        self._selector.unregister(connection.socket)
        connection.close()

    def close(self) -> None:
        """End all connections; the listener stays open."""
        for connection in [*self.kept, *self._waiting]:
            connection.close()
        self.kept.clear()
        self._waiting.clear()
        self._selector.close()

    def _idle_s(self, due_s: float | None) -> float | None:
        """Return for how long nothing is to be done unless somebody moves; None: for ever."""
        due = [] if due_s is None else [due_s]
        due += [each.moved_s + _limit_s(each) for each in [*self._waiting, *self.kept] if self._is_timed(each)]
        due += [] if self._admits else [self._admits_at_s]
        return max(0.0, min(due) - self._clock.monotonic_s()) if due else None

    def _admit(self) -> None:
        for _ in range(_ADMITTED_AT_ONCE):
            now_s = self._clock.monotonic_s()
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    found, remedy = f"{error.strerror}", "check what else uses descriptors or memory on this machine"
                    failure = AgentError(f"{self._part}.accept", found, "room for a connection", remedy)
                    self._admits_at_s = now_s + self._accepting.note_failure(failure)
                    return
                continue  # the client has gone again
            self._accepting.note_success()
            if len(self._waiting) >= _MOST_WAITING:
                self._end_oldest()
                self._admits_at_s = now_s + _CROWDED_S
            connection = self._connect(accepted, now_s)
            self._waiting[connection] = None
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            self._attend(connection)  # a request that has come already is answered before others push it out

    def _end_oldest(self) -> None:
        """End the connection that has waited longest, unless its request has come meanwhile: that is answered first."""
        oldest = next(iter(self._waiting))
        self._attend(oldest)
        if oldest in self._waiting:
            self.end(oldest)

    def _attend(self, connection: C) -> None:
        """Read and write as far as it goes without waiting."""
        if connection not in self._waiting and connection not in self.kept:
            return  # ended meanwhile
        now_s = self._clock.monotonic_s()
        try:
            if head := connection.receive():
                self._answer(connection, head, now_s)
        except OSError:
            self.end(connection)
            return
        self.send(connection, now_s)

    def _is_timed(self, connection: C) -> bool:
        """Return True unless the connection has taken everything, and there will be more for it."""
        return connection not in self.kept or not connection.is_ready


def listen(host: str, port: int) -> socket.socket:
    """Return a new listening socket that does not block. Raises OSError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier process may linger
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _limit_s(connection: HttpConnection) -> float:
    """Return how long a connection may stand still: one that requests nothing, does not read, or does not hang up."""
    if not connection.is_ready:
        return _STALLED_S
    return _LEAVE_S if connection.is_leaving else _REQUEST_S
