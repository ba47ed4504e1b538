"""What arrives faster than it can be handed on one by one: whole batches, from a socket to their one reader."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

_OVERHEAD_BYTES = 200  # of an arrival, beside topic and payload


class Arrival(NamedTuple):
    """A message as it came. retained: the broker had kept it, and nobody has said it just now (MQTT 5, section 3.3.1.3:
    with Retain As Published, which nobody here asks for, what is said just now might be marked so, too)."""

    topic: bytes
    payload: bytes
    retained: bool = False


class Intake:
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
        self.on_settled: Callable[[], None] = lambda: None
        self.arrived = 0
        self.settled = 0
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

    def take(self, most_bytes: int, wait_s: float, gather_s: float) -> list[Arrival]:
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

    def settle(self, count: int) -> None:
        """So many more of those that were taken, in their order."""
        self.settled += count
        self.on_settled()

    def clear(self) -> None:
        """What waits has not come: whoever fills it will be sent it again."""
        with self._changed:
            self.arrived -= sum(len(arrivals) for _, arrivals in self._waiting)
            self._waiting.clear()
            self._bytes = 0
