"""A message on its way to or from a broker, and what gives messages away to be published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.topics import MAX_TOPIC_BYTES

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


class Source(Protocol):
    """Messages that wait to be published, in their order. Whoever takes one tells what became of it.

    All methods return at once; the MQTT thread calls all but what fills the source.
    """

    def __len__(self) -> int:
        """How many wait for the broker."""

    def renew(self) -> None:
        """A connection begins."""

    def take(self) -> Message | None:
        """The next one, None when nothing is due."""

    def delivered(self, message: Message) -> None:
        """The broker has acknowledged it."""

    def refused(self, message: Message, for_good: bool) -> None:
        """The broker does not take it. for_good: none of its length, at any time."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """The connection ended before the broker acknowledged these, the oldest first."""
