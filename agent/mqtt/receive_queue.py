"""Queue received messages for one reader in another thread, and acknowledge each when the reader permits it.

`ReceiveQueue` holds the messages for the reader's thread. `PubackPolicy` fills it in the MQTT thread, and decides when
a message is acknowledged. Only the fleet uses it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.mqtt.acknowledgements import OrderedAcks, PendingAck

log = logging.getLogger(__package__)

_OVERHEAD_BYTES = 200  # memory of an Arrival, in addition to topic and payload


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

    def __init__(self, most_bytes: int, clock: Clock = SYSTEM_CLOCK) -> None:
        """most_bytes: the queue has no room from this size on."""
        self._clock = clock
        self.on_progress: Callable[[], None] = lambda: None
        self.arrived = 0
        self.confirmed = 0
        self._most_bytes = most_bytes
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Sequence[Arrival]]] = deque()
        self._bytes = 0
        self._wanted_bytes = 1  # for which the reader waits

    @property
    def waiting_bytes(self) -> int:
        """The bytes that wait to be popped."""
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
            if self._bytes >= self._wanted_bytes:
                self._changed.notify()

    def pop(self, most_bytes: int, wait_s: float, gather_s: float) -> list[Arrival]:
        """Return what waits, in the order of arrival; nothing if nothing has come.

        Args:
            most_bytes: About how much to return; the last batch may exceed it a little.
            wait_s: How long to wait for the first message.
            gather_s: How long to wait for more messages once there is one.
        """
        with self._changed:
            if self._wait_for(1, wait_s):
                self._wait_for(most_bytes, gather_s)
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

    def _wait_for(self, wanted_bytes: int, wait_s: float) -> bool:
        """Wait until so much is here. To be woken for less took a fifth of the CPU time of a flood."""
        self._wanted_bytes = wanted_bytes
        return self._clock.wait_for(self._changed, lambda: self._bytes >= wanted_bytes, wait_s)

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


class PubackPolicy:
    """Queue the publications of one connection, and decide when each is acknowledged.

    A policy belongs to one connection. Messages received on an earlier connection are never acknowledged on this one,
    because packet ids are per connection.
    """

    def __init__(self, queue: ReceiveQueue, holds: bool, acks: OrderedAcks) -> None:
        """Prepare for the first message.

        Args:
            queue: Where the messages go.
            holds: PUBACK waits until the reader has confirmed a message, for as long as that takes. The broker keeps
                the message, limits how many are under way, and sends it again on the next connection of a lasting
                session. Without `holds`, PUBACK waits only for room in the queue.
            acks: Those of the connection, which it sends after each `update`.
        """
        self._queue = queue
        self._holds = holds
        self._acks = acks
        if holds and not queue.has_room:  # else each lost connection would leave as much as is under way
            queue.clear()
        self._arrived_before = queue.arrived
        self._new: list[Arrival] = []
        self._received = 0
        self._withheld: deque[tuple[int, PendingAck]] = deque()  # each with its place among all that was received
        self._dropped, self._logged_drops = 0, 0

    def receive(self, arrival: Arrival, packet_id: int, qos: int) -> None:
        """Take a message; one of QoS 0, which no broker holds back, is dropped while the queue has no room."""
        if not qos and not self._queue.has_room:
            self._dropped += 1
        elif (ack := self._acks.add(packet_id, qos)) is not None:
            self._received += 1
            self._new.append(arrival)
            self._withheld.append((self._received, ack))

    def update(self) -> None:
        """Move what came into the queue, and release what may be acknowledged."""
        if self._new:
            self._queue.put(self._new)
            self._new = []
        if self._dropped > 2 * self._logged_drops:  # a flood is logged each time that it has doubled
            log.warning("mqtt=no_room qos=0 dropped=%d", self._dropped)
            self._logged_drops = self._dropped
        if self._holds:
            upto = self._queue.confirmed - self._arrived_before
        else:
            upto = self._received if self._queue.has_room else 0
        while self._withheld and self._withheld[0][0] <= upto:
            self._withheld.popleft()[1].release()
