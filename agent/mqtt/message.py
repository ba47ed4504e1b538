"""A message on its way to or from a broker, and what gives messages away to be published."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.contract.topics import MAX_TOPIC_BYTES

_MAX_CORRELATION_BYTES = 256  # of what a sender wants back with each result


@dataclass(frozen=True)
class Message:
    """One publication, outgoing or received.

    What MQTT 3.1.1 cannot say stays unsaid there: expires_s, seconds after which a broker that still has it drops it;
    reply_to and correlation, the topic that its sender wants the answer on, and what the answer is to carry.
    """

    topic: str
    payload: bytes
    qos: int = 1
    retain: bool = False
    expires_s: int | None = None
    reply_to: str | None = None
    correlation: bytes | None = None


@dataclass(frozen=True)
class Reply:
    """Where the sender of a command wants its results too, and what they are to carry (MQTT 5)."""

    topic: str
    correlation: bytes | None = None

    @property
    def fits(self) -> bool:
        """Whether it is short enough to be kept beside a command."""
        return len(self.topic.encode()) <= MAX_TOPIC_BYTES and len(self.correlation or b"") <= _MAX_CORRELATION_BYTES


class MessageSource(Protocol):
    """Messages that wait to be published, in their order. Whoever takes one tells what became of it.

    All methods return at once; the MQTT thread calls all but what fills the source.
    """

    def __len__(self) -> int:
        """How many wait for the broker."""

    def connection_started(self) -> None:
        """A connection begins."""

    def pop(self) -> Message | None:
        """The next one, None when nothing is due."""

    def delivered(self, message: Message) -> None:
        """The broker has acknowledged it."""

    def refused(self, message: Message, for_good: bool) -> None:
        """The broker does not take it. for_good: none of its length, at any time."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """The connection ended before the broker acknowledged these, the oldest first."""


class Mailbox:
    """A MessageSource, thread-safe. For what is repeated if it is lost; what must not be lost goes into the Outbox.

    Retained messages are state, not news: the newest of a topic replaces the one before, none is dropped, and
    all are due again with each connection. News beyond `size` push out the oldest, which is counted.
    """

    def __init__(self, size: int = 1000) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._news: deque[Message] = deque()
        self._state: dict[str, Message] = {}
        self._due: dict[str, Message] = {}  # of the state, what this connection has not carried yet
        self._dropped = 0

    def __len__(self) -> int:
        """How many messages wait."""
        with self._lock:
            return len(self._due) + len(self._news)

    @property
    def dropped(self) -> int:
        """How many messages were pushed out so far."""
        return self._dropped

    def put(self, message: Message) -> None:
        with self._lock:
            if message.retain:
                self._state[message.topic] = self._due[message.topic] = message
            else:
                self._news.append(message)
                self._trim()

    def forget(self, topic: str) -> None:
        """This state is none any more."""
        with self._lock:
            self._state.pop(topic, None)
            self._due.pop(topic, None)

    def pop(self) -> Message | None:
        """The next message to publish, state before news; None when nothing waits."""
        with self._lock:
            if self._due:
                return self._due.pop(next(iter(self._due)))
            return self._news.popleft() if self._news else None

    def delivered(self, message: Message) -> None:
        """Nothing of it is kept."""

    def refused(self, message: Message, for_good: bool) -> None:
        """Nothing of it is kept."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Return what was taken and did not arrive, oldest first; it goes before all that waits.

        State needs no return: the next connection carries it anyway.
        """
        with self._lock:
            self._news.extendleft(message for message in reversed(messages) if not message.retain)
            self._trim()

    def connection_started(self) -> None:
        """A connection begins: all state is due."""
        with self._lock:
            self._due = dict(self._state)

    def _trim(self) -> None:
        while len(self._news) > self._size:
            self._news.popleft()
            self._dropped += 1


class Newest(Mailbox):
    """Room for one message of QoS 0: a newer one takes its place, and what has waited for a broker is too old."""

    def __init__(self) -> None:
        super().__init__(size=1)

    def connection_started(self) -> None:
        """A connection begins: only what comes from now on is worth its while."""
        while self.pop() is not None:
            pass
