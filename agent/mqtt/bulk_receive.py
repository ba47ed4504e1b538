"""Receive messages in bulk: split publications from the byte stream and queue them in batches for one reader.

paho hands over one message at a time, which is too slow for a collector of thousands of boards. `BulkSocket` wraps the
socket of paho's client: it takes the publications out of the stream and leaves all other packets to paho.
`ReceiveQueue` holds the publications for the reader's thread. `PubackPolicy` connects the two in the MQTT thread, and
decides when a publication is acknowledged. Only the fleet uses it.
"""

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

log = logging.getLogger(__package__)

_OVERHEAD_BYTES = 200  # memory of an Arrival, in addition to topic and payload
_READ_BYTES = 256 * 1024
_LONGEST_BYTES = MAX_PAYLOAD_BYTES + 1024  # of a packet that is kept whole: a payload, and a topic before it
_PUBLISH, _PUBACK = 3, b"\x40\x02"
_WAIT = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Arrival(NamedTuple):
    """A received message. retained: the broker had stored it; nobody has published it just now (MQTT 5, section
    3.3.1.3). With Retain As Published, which we do not request, live messages might be marked so, too."""

    topic: bytes
    payload: bytes
    retained: bool = False


class ReceiveQueue:
    """A thread-safe queue of received messages, for one thread that fills it and one that empties it.

    Backpressure: a broker stops sending once enough messages are unacknowledged, so what waits here stays bounded. The
    filling thread drops messages of QoS 0, which need no acknowledgement, while there is no room.

    `arrived` counts the messages put into the queue. `confirmed` counts those that the reader has finished with; they
    need not be redelivered. `on_progress` is called in the reader's thread once there is room again, and when messages
    were confirmed, so that a waiting connection can acknowledge.
    """

    def __init__(self, most_bytes: int) -> None:
        """most_bytes: the queue has no room from this size on."""
        self.on_progress: Callable[[], None] = lambda: None
        self.arrived = 0
        self.confirmed = 0
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[Arrival]]] = deque()
        self._bytes = 0

    @property
    def waiting_bytes(self) -> int:
        """What waits to be popped."""
        return self._bytes

    @property
    def unconfirmed(self) -> int:
        """Messages that have come, and that the reader has not finished with."""
        return self.arrived - self.confirmed

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
        """Return what waits, in the order of arrival; nothing if nothing has come.

        Args:
            most_bytes: About how much to return; the last batch may exceed it a little.
            wait_s: How long to wait for the first message.
            gather_s: How long to wait for more messages once there is one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._bytes > 0, wait_s)
            until = time.monotonic() + gather_s
            while 0 < self._bytes < most_bytes and (left_s := until - time.monotonic()) > 0.0:
                self._changed.wait(left_s)
            had_room, popped, size = self.has_room, list[Arrival](), 0
            while self._waiting and size < most_bytes:
                batch_bytes, arrivals = self._waiting.popleft()
                popped.extend(arrivals)
                size += batch_bytes
            self._bytes -= size
            has_room = self.has_room
        if has_room and not had_room:
            self.on_progress()
        return popped

    def confirm(self, count: int) -> None:
        """Note that the reader has finished with `count` more of the popped messages, in their order."""
        self.confirmed += count
        self.on_progress()

    def clear(self) -> None:
        """Discard what waits, as if it had not arrived: the broker will send it again."""
        with self._changed:
            self.arrived -= sum(len(arrivals) for _, arrivals in self._waiting)
            self._waiting.clear()
            self._bytes = 0


class BulkSocket:
    """A wrapper of a client's connected socket, for the thread that serves it.

    `recv` gives paho all packets but publications; `pop` returns the publications. While `has_room` is false,
    publications of QoS 0, which no broker holds back, are dropped and counted in `dropped`. `popped` counts what `pop`
    has returned.
    """

    def __init__(self, sock: Any, has_properties: bool) -> None:
        """sock: a TCP socket, a TLS socket, or paho's for websockets. has_properties: MQTT 5 is spoken."""
        self.has_room = True
        self.dropped = 0
        self.popped = 0
        self._sock = sock
        self._has_properties = has_properties
        self._unread = b""  # the start of an incomplete packet
        self._skip_bytes = 0  # still to come of a packet that is too long
        self._others = bytearray()  # packets for paho
        self._arrived: list[Arrival] = []
        self._acknowledgements = bytearray()  # PUBACKs of what has arrived
        # PUBACKs of what was popped, each with the value of `popped` after it.
        self._withheld: deque[tuple[int, bytearray]] = deque()
        self._unsent = bytearray()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def pop(self) -> list[Arrival]:
        """Return the publications that have come. A payload that is too long is cut to one byte more than allowed."""
        arrived, self._arrived = self._arrived, []
        self.popped += len(arrived)
        if self._acknowledgements:
            self._withheld.append((self.popped, self._acknowledgements))
            self._acknowledgements = bytearray()
        return arrived

    def acknowledge(self, count: int) -> None:
        """Acknowledge the first `count` of all popped publications, in their order (MQTT 5, section 4.6).

        What one `pop` returned is acknowledged together. Raises OSError.
        """
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
        """Send all of `data`, now or later: between two writes of the client there may be PUBACKs of ours."""
        self._unsent += data
        self.flush()
        return len(data)

    def recv(self, most: int) -> bytes:
        """Return bytes for paho. Raises BlockingIOError if there are none, AgentError (`broker.protocol`)."""
        if not self._others:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                return b""
            self._split(data)
        if not self._others:
            raise BlockingIOError
        data = bytes(self._others[:most])
        del self._others[:most]
        return data

    def peek(self, most: int) -> bytes:
        """Return what the broker has sent so far without consuming it. Raises as a socket."""
        data: bytes = self._sock.recv(most, socket.MSG_PEEK)
        return data

    def pending(self) -> int:
        """Return how many bytes can be read that no selector sees."""
        return len(self._others) or int(getattr(self._sock, "pending", int)())

    def _split(self, data: bytes) -> None:
        """Sort the packets of the stream into publications and others; keep the incomplete one at the end."""
        if self._skip_bytes:
            skipped = min(self._skip_bytes, len(data))
            self._skip_bytes -= skipped
            data = data[skipped:]
        data = self._unread + data if self._unread else data
        start, available = 0, len(data)
        while available - start >= 2:
            # Most packets have from 128 to 16,383 bytes: a length of two digits.
            if available - start > 2 and data[start + 1] > 0x7F > data[start + 2]:
                end = start + 3 + (data[start + 1] & 0x7F | data[start + 2] << 7)
                body = start + 3
            else:
                body, length = _parse_header(data, start)
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
                self._add_publication(data, start, body, end, cut=bool(self._skip_bytes))
            else:
                self._others += data[start:end]
            start = end
        self._unread = data[start:]

    def _add_publication(self, data: bytes, start: int, body: int, end: int, cut: bool) -> None:
        """Parse a PUBLISH. cut: it is longer than what is kept of one, perhaps because of its properties alone."""
        at = body + 2 + (data[body] << 8 | data[body + 1])
        topic, retained = data[body + 2 : at], bool(data[start] & 0x01)
        if data[start] & 0x06:
            acknowledgement = _PUBACK + data[at : at + 2]
            if data[start] & 0x08 and self._is_withheld(acknowledgement):
                return
            self._acknowledgements += acknowledgement
            at += 2
        elif not self.has_room:
            self.dropped += 1
            return
        if self._has_properties:
            if data[at]:
                at, length = _parse_integer(data, at)
                at += length
            else:
                at += 1
        if at > end and cut:  # the payload lies beyond what is kept; its reader will refuse it as too long
            self._arrived.append(Arrival(topic, bytes(MAX_PAYLOAD_BYTES + 1), retained))
            return
        if at > end:
            found = "a publication that ends before its payload begins"
            raise AgentError("broker.protocol", found, "one whole", "update the broker, or use another")
        self._arrived.append(Arrival(topic, data[at : min(end, at + MAX_PAYLOAD_BYTES + 1)], retained))

    def _is_withheld(self, acknowledgement: bytes) -> bool:
        """Return whether this PUBACK is due already.

        Some brokers send a message again on the same connection while they wait. A second PUBACK would acknowledge the
        next message of the same packet id.
        """
        for packets in (self._acknowledgements, *(withheld for _, withheld in self._withheld)):
            at = packets.find(acknowledgement)
            while at >= 0 and at % len(acknowledgement):  # across the border of two packets
                at = packets.find(acknowledgement, at + 1)
            if at >= 0:
                return True
        return False


def _parse_header(data: bytes, start: int) -> tuple[int, int]:
    """Return where the body of the packet at `start` begins, 0 if that has not arrived yet, and the body's length."""
    length = data[start + 1]
    if length < 0x80:
        return start + 2, length
    for last in range(start + 2, min(start + 5, len(data))):
        if data[last] < 0x80:
            return _parse_integer(data, start + 1)
    if len(data) - start >= 5:
        raise AgentError("broker.protocol", "a packet of no length", "at most 4 bytes of it", "update the broker")
    return 0, 0


def _parse_integer(data: bytes, at: int) -> tuple[int, int]:
    """Parse a variable byte integer (section 1.5.5); return where it ends, and its value."""
    value, shift = 0, 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return at, value


class PubackPolicy:
    """Decide when the publications of one connection are acknowledged.

    A policy belongs to one connection. Messages received on an earlier connection are never acknowledged on this one,
    because packet ids are per connection.
    """

    def __init__(self, queue: ReceiveQueue, holds: bool) -> None:
        """queue: where the messages go.

        holds: PUBACK waits until the reader has confirmed a message, for as long as that takes. The broker keeps the
        message, limits how many are under way, and sends it again on the next connection of a lasting session. Without
        `holds`, PUBACK waits only for room in the queue.
        """
        self._queue = queue
        self._holds = holds
        if holds and not queue.has_room:  # else each lost connection would leave as much as is under way
            queue.clear()
        self._arrived_before = queue.arrived
        self._logged_drops = 0

    def update(self, bulk: BulkSocket) -> None:
        """Move what came into the queue, and acknowledge what may be acknowledged."""
        if arrived := bulk.pop():
            self._queue.put(arrived)
        bulk.has_room = self._queue.has_room
        if bulk.dropped > 2 * self._logged_drops:  # a flood is logged each time that it has doubled
            log.warning("mqtt=no_room qos=0 dropped=%d", bulk.dropped)
            self._logged_drops = bulk.dropped
        count = bulk.popped if bulk.has_room else 0
        if self._holds:
            count = self._queue.confirmed - self._arrived_before
        with contextlib.suppress(OSError):  # paho meets the same error
            bulk.acknowledge(count)
