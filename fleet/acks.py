"""What boards are to be told of their reports: for each stream its newest word, however many there were."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from agent.messages import Ack
from agent.publishing import Message
from agent.topics import Topics
from fleet.reports import Stream


class Acks:
    """A Source, thread-safe. What a connection did not carry is not repeated: whoever sends again is answered again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[Stream, int] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._due)

    def put(self, complete: Mapping[Stream, int]) -> None:
        """Up to which number each of these streams is complete."""
        with self._lock:
            self._due.update(complete)

    def take(self) -> Message | None:
        with self._lock:
            if not self._due:
                return None
            stream, upto = self._due.popitem()
        payload = Ack(epoch=stream.epoch, upto=upto).to_json()
        return Message(Topics(stream.fleet, stream.device).ack, payload)

    def renew(self) -> None:
        """Nothing is due anew."""

    def delivered(self, message: Message) -> None:
        """Nothing of it is kept."""

    def refused(self, message: Message, for_good: bool) -> None:
        """Nothing of it is kept."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Nothing of it is kept."""
