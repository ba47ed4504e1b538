"""What the broker was handed on one connection and has not acknowledged yet."""

from __future__ import annotations

import logging
import math
import time

from agent.publishing import Message, Source

log = logging.getLogger(__name__)

ACKNOWLEDGE_TIMEOUT_S = 60.0  # between one acknowledgement and the next, while there is something to acknowledge


class InFlight:
    """At most `most` messages of QoS 1, by their packet ids, the oldest first.

    `answer_by` is the monotonic time by which the broker has to acknowledge one more.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.answer_by = math.inf
        self._sent: dict[int, tuple[Message, Source]] = {}
        self._denied: set[str] = set()  # topics

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def has_room(self) -> bool:
        """Whether one more may be on its way."""
        return len(self._sent) < self.most

    def of(self, source: Source) -> list[Message]:
        """What was taken from this source, the oldest first."""
        return [message for message, its_source in self._sent.values() if its_source is source]

    def add(self, packet_id: int, message: Message, source: Source) -> None:
        """It is on its way; `source` hears of its delivery."""
        if not self._sent:
            self.answer_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
        self._sent[packet_id] = message, source

    def acknowledge(self, packet_id: int, refusal: str | None) -> None:
        """The broker has it, or says why not: that is told once for each topic.

        A source that keeps its messages gives a refused one away again after a while.
        """
        if packet_id in self._sent:
            message, source = self._sent.pop(packet_id)
            if refusal is None:
                source.delivered(message)
            else:
                source.refused(message, for_good=False)
            if refusal is not None and message.topic not in self._denied:
                self._denied.add(message.topic)
                log.warning("mqtt=denied topic=%s reason=%r remedy=%r", message.topic, refusal, "the broker's ACL")
        self.answer_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S if self._sent else math.inf
