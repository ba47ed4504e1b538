"""What arrives faster than it can be handed on one by one: whole batches, from a socket to their one reader."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from agent.common.errors import AgentError
from agent.contract.wire import MAX_PAYLOAD_BYTES

_OVERHEAD_BYTES = 200  # of an arrival, beside topic and payload


class Arrival(NamedTuple):
    """A message as it came. retained: the broker had kept it, and nobody has said it just now (MQTT 5, section 3.3.1.3:
    with Retain As Published, which nobody here asks for, what is said just now might be marked so, too)."""

    topic: bytes
    payload: bytes
    retained: bool = False


class ReceiveQueue:
    """Thread-safe; for one that fills it and one that empties it. most_bytes: from which on there is no room.

    A broker whose messages nobody acknowledges sends a few more and no others, so that what waits here stays bounded,
    and waits there; who fills it leaves out what needs no acknowledgement, of QoS 0, while there is no room. on_room:
    called by the reader once there is room again.

    arrived, settled: how many were put here; how many of them, the first ones, need not come again, for their reader
    has done with them what was to be done: a connection that waits for that is told by on_settled, which the reader
    calls.
    """

    def __init__(self, most_bytes: int) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.on_confirmed: Callable[[], None] = lambda: None
        self.arrived = 0
        self.confirmed = 0
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[Arrival]]] = deque()
        self._bytes = 0

    @property
    def has_room(self) -> bool:
        return self._bytes < self._most_bytes

    def put(self, arrivals: Sequence[Arrival]) -> None:
        size = sum(len(each.topic) + len(each.payload) for each in arrivals) + _OVERHEAD_BYTES * len(arrivals)
        with self._changed:
            self._waiting.append((size, arrivals))
            self._bytes += size
            self.arrived += len(arrivals)
            self._changed.notify()

    def pop(self, most_bytes: int, wait_s: float, gather_s: float) -> list[Arrival]:
        """What there is, so much or a little more; nothing where nothing came for so long. gather_s: how long, once
        something is there, it waits for more."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes > 0, wait_s)
            until = time.monotonic() + gather_s
            while 0 < self._bytes < most_bytes and (left_s := until - time.monotonic()) > 0.0:
                self._changed.wait(left_s)
            had_room, taken, size = self.has_room, list[Arrival](), 0
            while self._waiting and size < most_bytes:
                batch_bytes, arrivals = self._waiting.popleft()
                taken.extend(arrivals)
                size += batch_bytes
            self._bytes -= size
            has_room = self.has_room
        if has_room and not had_room:
            self.on_room()
        return taken

    def confirm(self, count: int) -> None:
        """So many more of those that were taken, in their order."""
        self.confirmed += count
        self.on_confirmed()

    def clear(self) -> None:
        """What waits has not come: whoever fills it will be sent it again."""
        with self._changed:
            self.arrived -= sum(len(arrivals) for _, arrivals in self._waiting)
            self._waiting.clear()
            self._bytes = 0


_READ_BYTES = 256 * 1024
_LONGEST_BYTES = MAX_PAYLOAD_BYTES + 1024  # of a packet that is kept whole: a payload, and a topic before it
_PUBLISH, _PUBACK = 3, b"\x40\x02"
_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class BulkSocket:
    """Around the connected socket of a client, for the thread that serves it.

    sock: a socket, one of TLS, or paho's for websockets. has_properties: of publications, by MQTT 5. has_room: while it
    is false, publications of QoS 0, which no broker holds back, are dropped and counted in `dropped`. taken: how many
    `pop` has returned.
    """

    def __init__(self, sock: Any, has_properties: bool) -> None:
        self.has_room = True
        self.dropped = 0
        self.popped = 0
        self._sock = sock
        self._has_properties = has_properties
        self._unread = b""  # the beginning of a packet
        self._skip_bytes = 0  # the end of one that is too long
        self._others = bytearray()  # for the client
        self._arrived: list[Arrival] = []
        self._acknowledgements = bytearray()  # of those that have arrived
        # Of those that were taken, and how many those were, up to the last of them.
        self._withheld: deque[tuple[int, bytearray]] = deque()
        self._unsent = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def pop(self) -> list[Arrival]:
        """The publications that have come. A payload that is too long has one byte more than it may, and no end."""
        arrived, self._arrived = self._arrived, []
        self.popped += len(arrived)
        if self._acknowledgements:
            self._withheld.append((self.popped, self._acknowledgements))
            self._acknowledgements = bytearray()
        return arrived

    def acknowledge(self, count: int) -> None:
        """The first `count` of all that were taken, in their order (MQTT 5, section 4.6). What was taken at once is
        acknowledged at once. Raises OSError."""
        while self._withheld and self._withheld[0][0] <= count:
            self._unsent += self._withheld.popleft()[1]
        self.flush()

    @property
    def wants_write(self) -> bool:
        return bool(self._unsent)

    def flush(self) -> None:
        """Write what could not be written before. Raises OSError."""
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent)
            except _WAIT:
                return
            del self._unsent[:sent]

    def send(self, data: bytes | bytearray) -> int:
        """All of it, now or later: between two writes of a client there may be our own."""
        self._unsent += data
        self.flush()
        return len(data)

    def recv(self, most: int) -> bytes:
        """What is for the client. Raises BlockingIOError where there is nothing, AgentError (`broker.protocol`)."""
        if not self._others:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                return b""
            self._split(data)
        if not self._others:
            raise BlockingIOError
        taken = bytes(self._others[:most])
        del self._others[:most]
        return taken

    def peek(self, most: int) -> bytes:
        """What the other end has sent so far, which stays to be read. Raises as a socket."""
        begin: bytes = self._sock.recv(most, socket.MSG_PEEK)
        return begin

    def pending(self) -> int:
        """How many bytes can be read that no selector knows of."""
        return len(self._others) or int(getattr(self._sock, "pending", int)())

    def _split(self, data: bytes) -> None:
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        data = self._unread + data if self._unread else data
        start, available = 0, len(data)
        while available - start >= 2:
            if (
                available - start > 2 and data[start + 1] > 0x7F > data[start + 2]
            ):  # from 128 to 16,383 bytes, as most are
                end = start + 3 + (data[start + 1] & 0x7F | data[start + 2] << 7)
                body = start + 3
            else:
                body, length = _remaining(data, start)
                if body == 0:
                    break
                end = body + length
            kind = data[start] >> 4
            if end > available:
                if kind != _PUBLISH or available - start < _LONGEST_BYTES:
                    break
                self._skip_bytes = end - available
                end = available
            if kind == _PUBLISH and data[start] & 0x04 == 0:
                self._publication(data, start, body, end, cut=bool(self._skip_bytes))
            else:
                self._others += data[start:end]
            start = end
        self._unread = data[start:]

    def _publication(self, data: bytes, start: int, body: int, end: int, cut: bool) -> None:
        """cut: it is longer than what is kept of one, perhaps for its properties alone."""
        at = body + 2 + (data[body] << 8 | data[body + 1])
        topic, retained = data[body + 2 : at], bool(data[start] & 0x01)
        if data[start] & 0x06:
            acknowledgement = _PUBACK + data[at : at + 2]
            if data[start] & 0x08 and self._owes(acknowledgement):
                return
            self._acknowledgements += acknowledgement
            at += 2
        elif not self.has_room:
            self.dropped += 1
            return
        if self._has_properties:
            if data[at]:
                at, length = _variable(data, at)
                at += length
            else:
                at += 1
        if at > end and cut:  # its payload lies beyond what is kept, and whoever reads it says that it is too long
            self._arrived.append(Arrival(topic, bytes(MAX_PAYLOAD_BYTES + 1), retained))
            return
        if at > end:
            found = "a publication that ends before its payload begins"
            raise AgentError("broker.protocol", found, "one whole", "update the broker, or use another")
        self._arrived.append(Arrival(topic, data[at : min(end, at + MAX_PAYLOAD_BYTES + 1)], retained))

    def _owes(self, acknowledgement: bytes) -> bool:
        """Whether it is due already. Some brokers send again, on the same connection, what they wait for: acknowledged
        twice, it would be the next one of that packet id that is."""
        due = [self._acknowledgements, *(withheld for _, withheld in self._withheld)]
        return any(_is_in(acknowledgement, each) for each in due)


def _is_in(packet: bytes, packets: bytearray) -> bool:
    """packets: one after the other, each as long as this one."""
    at = packets.find(packet)
    while at % len(packet) and at >= 0:
        at = packets.find(packet, at + 1)
    return at >= 0


def _remaining(data: bytes, start: int) -> tuple[int, int]:
    """Where the packet at `start` goes on after its fixed header, 0 where that is not there yet, and its length."""
    length = data[start + 1]
    if length < 0x80:
        return start + 2, length
    for last in range(start + 2, min(start + 5, len(data))):
        if data[last] < 0x80:
            return _variable(data, start + 1)
    if len(data) - start >= 5:
        raise AgentError("broker.protocol", "a packet of no length", "at most 4 bytes of it", "update the broker")
    return 0, 0


def _variable(data: bytes, at: int) -> tuple[int, int]:
    """A variable byte integer (section 1.5.5): where it ends, and its value."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return at, value


log = logging.getLogger(__package__)


class PubackPolicy:
    """Made as the connection begins: what the one before has put into the intake is acknowledged on no other, where
    packet ids mean something else.

    holds: PUBACK waits until the reader has settled what came, for as long as that takes; the broker keeps it, has only
    so much under way, and sends it again on the next connection of a session that lasts. Else PUBACK waits for room.
    """

    def __init__(self, intake: ReceiveQueue, holds: bool) -> None:
        self._intake = intake
        self._holds = holds
        if holds and not intake.has_room:  # else each connection that is lost would leave as much as is under way
            intake.clear()
        self._before = intake.arrived
        self._told_dropped = 0

    def update(self, bulk: BulkSocket) -> None:
        """Hand over what came, and acknowledge what may be."""
        if arrived := bulk.pop():
            self._intake.put(arrived)
        bulk.has_room = self._intake.has_room
        if bulk.dropped > 2 * self._told_dropped:  # a flood is told each time that it has doubled
            log.warning("mqtt=no_room qos=0 dropped=%d", bulk.dropped)
            self._told_dropped = bulk.dropped
        settled = self._intake.confirmed - self._before if self._holds else bulk.popped if bulk.has_room else 0
        with contextlib.suppress(OSError):  # which paho finds, too
            bulk.acknowledge(settled)
