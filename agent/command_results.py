"""Results of commands on their way to the broker, which says when it has the last of each."""

from __future__ import annotations

import queue
from dataclasses import dataclass

from agent.mailbox import Mailbox
from agent.publishing import Message, Reply
from agent.requests import CommandResult
from agent.topics import HOUSE, Topics, may_reply_to


@dataclass(frozen=True)
class _Final(Message):
    """The message that carries the final result of a command."""

    command_id: str = ""


class CommandResults(Mailbox):
    """`arrived` has the id of each command whose final result the broker has acknowledged.

    house: the prefix under which Home Assistant hears, where no answer goes.
    """

    def __init__(self, topics: Topics, house: str = HOUSE) -> None:
        super().__init__()
        self._topics = topics
        self._house = house
        self.arrived: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, result: CommandResult) -> None:
        topic, payload = self._topics.result(result.id), result.to_json()
        self.put(_Final(topic, payload, command_id=result.id) if result.final else Message(topic, payload))

    def add_reply(self, reply: Reply, result: CommandResult) -> None:
        """On the topic that the command's sender named, unless it could do harm there."""
        if may_reply_to(reply.topic, self._topics.result(result.id), self._house):
            self.put(Message(reply.topic, result.to_json(), correlation=reply.correlation))

    def delivered(self, message: Message) -> None:
        if isinstance(message, _Final):
            self.arrived.put(message.command_id)
