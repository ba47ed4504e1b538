"""Acknowledge received messages in the order of arrival, each once its reader is done with it.

MQTT 5, section 4.6: a client sends PUBACKs in the order in which the PUBLISH packets came. So a message that is held
delays the acknowledgement of all that came after it.
"""

from __future__ import annotations

from collections.abc import Callable


class PendingAck:
    """One received message. `release` permits its acknowledgement; any thread may call it."""

    def __init__(self, qos: int) -> None:
        self.qos = qos
        self.released = False

    def release(self) -> None:
        self.released = True


class OrderedAcks:
    """The messages of one connection that are not acknowledged yet; the MQTT thread uses it.

    A broker sends what this connection did not acknowledge again on the next one of the session, if the session lasts.
    """

    def __init__(self, acknowledge: Callable[[int, int], object]) -> None:
        """acknowledge: called with the packet id and the QoS of a message."""
        self._acknowledge = acknowledge
        self._pending: dict[int, PendingAck] = {}  # by packet id, the oldest first

    def add(self, packet_id: int, qos: int) -> PendingAck | None:
        """Note that a message has come; None if it is one that is pending already.

        Some brokers send a message again on the same connection while they wait. A second PUBACK would acknowledge the
        next message of the same packet id.
        """
        if packet_id in self._pending and qos:
            return None
        pending = PendingAck(qos)
        if qos:
            self._pending[packet_id] = pending
        return pending

    def send(self) -> None:
        """Acknowledge what is released, up to the first message that is not."""
        while self._pending:
            packet_id, pending = next(iter(self._pending.items()))
            if not pending.released:
                return
            del self._pending[packet_id]
            self._acknowledge(packet_id, pending.qos)
