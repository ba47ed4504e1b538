"""What waits in memory to be published: a bounded queue of news, and the newest of every retained topic."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from agent.publishing import Message


class Mailbox:
    """A Source, thread-safe. For what is repeated if it is lost; what must not be lost goes into the Outbox.

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

    def take(self) -> Message | None:
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

    def renew(self) -> None:
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

    def renew(self) -> None:
        """A connection begins: only what comes from now on is worth its while."""
        while self.take() is not None:
            pass
