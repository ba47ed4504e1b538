"""Define the message, and the sources that a session takes messages from.

A `MessageSource` hands out messages one at a time and is notified of each one's fate. The two simple sources are here:
`Mailbox` keeps state and a bounded queue, `Newest` a single message. What must not be lost goes into the Outbox
(agent/uplink/outbox.py). A `HeldMessage` is a received one that is acknowledged only once its reader confirms it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agent.contract.topics import MAX_TOPIC_BYTES

_MAX_CORRELATION_BYTES = 256  # most data that a sender may want back with each result


@dataclass(frozen=True)
class Message:
    """One publication, outgoing or received.

    Args:
        qos: Quality of service, 0 or 1.
        retain: The broker keeps it for later subscribers.
        expires_s: Seconds after which a broker that still has it drops it. MQTT 5 only.
        reply_to: The topic on which the sender wants the answer. MQTT 5 only.
        correlation: Data that the answer is to carry. MQTT 5 only.
    """

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    expires_s: int | None = None
    reply_to: str | None = None
    correlation: bytes | None = None


@dataclass(frozen=True)
class HeldMessage(Message):
    """A received message that the broker keeps until its reader calls `confirm`, once it cannot be lost any more.

    confirm: may be called in any thread, and more than once; after the connection's end it does nothing.
    """

    confirm: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)


@dataclass(frozen=True)
class Reply:
    """The topic on which the sender of a command also wants its results, and the data for them (MQTT 5)."""

    topic: str
    correlation: bytes | None = None

    @property
    def fits(self) -> bool:
        """True if it is short enough to be stored with a command."""
        return len(self.topic.encode()) <= MAX_TOPIC_BYTES and len(self.correlation or b"") <= _MAX_CORRELATION_BYTES


class MessageSource:
    """Messages that wait to be published, in order. The caller of `pop` reports what became of each message.

    All methods return at once. The MQTT thread calls all but the ones that fill the source. By default a source ignores
    what became of its messages: it keeps no copies. It is empty until a subclass fills it.
    """

    def __len__(self) -> int:
        """Return how many messages wait for the broker; 0 if the client need not wait for them when it closes."""
        return 0

    def connection_started(self) -> None:
        """Prepare for a new connection."""

    def pop(self) -> Message | None:
        """Return the next message; None if nothing is due."""
        return None

    def delivered(self, message: Message) -> None:
        """Note that the broker has acknowledged the message."""

    def refused(self, message: Message, for_good: bool) -> None:
        """Note that the broker does not accept the message. for_good: it never will, because of the length."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Take back messages, the oldest first: the connection ended before the broker acknowledged them."""


class Mailbox(MessageSource):
    """A thread-safe MessageSource for messages that are repeated if they are lost.

    Retained messages are state: a newer one of a topic replaces the older, none is dropped, and all are due again with
    each connection. Other messages queue up; beyond `size` the oldest are dropped, and counted in
    `dropped`.
    """

    def __init__(self, size: int = 1000) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._queue: deque[Message] = deque()
        self._state: dict[str, Message] = {}
        self._due: dict[str, Message] = {}  # state that this connection has not carried yet
        self.dropped = 0

    def __len__(self) -> int:
        """Return how many messages wait."""
        with self._lock:
            return len(self._due) + len(self._queue)

    def put(self, message: Message) -> None:
        with self._lock:
            if message.retain:
                self._state[message.topic] = self._due[message.topic] = message
            else:
                self._queue.append(message)
                self._trim()

    def forget(self, topic: str) -> None:
        """Stop repeating the state of a topic."""
        with self._lock:
            self._state.pop(topic, None)
            self._due.pop(topic, None)

    def pop(self) -> Message | None:
        """Return the next message to publish, state before the queue; None when nothing waits."""
        with self._lock:
            if self._due:
                return self._due.pop(next(iter(self._due)))
            return self._queue.popleft() if self._queue else None

    def put_back(self, messages: Sequence[Message]) -> None:
        """Return undelivered messages, oldest first, to the front of the queue.

        State needs no return: the next connection carries it anyway.
        """
        with self._lock:
            self._queue.extendleft(message for message in reversed(messages) if not message.retain)
            self._trim()

    def connection_started(self) -> None:
        """Make all state due."""
        with self._lock:
            self._due = dict(self._state)

    def _trim(self) -> None:
        while len(self._queue) > self._size:
            self._queue.popleft()
            self.dropped += 1


class Newest(Mailbox):
    """Room for one message of QoS 0: a newer one replaces it."""

    def __init__(self) -> None:
        super().__init__(size=1)

    def connection_started(self) -> None:
        """Drop what has waited for a connection: it is too old."""
        while self.pop() is not None:
            pass
