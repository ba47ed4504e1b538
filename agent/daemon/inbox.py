"""Receive what is said to the board over MQTT: commands, the document `desired`, chunks of files, labels, acks."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent.commands.authority import Authority
from agent.commands.deliveries import FileReceiver
from agent.commands.dispatcher import Authorisation, CommandDispatcher, Handler
from agent.commands.labels import LabelsInbox
from agent.commands.log import CommandLog
from agent.commands.settings import Settings, admit_desired, check_expiry, parse_desired
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.contract.messages import Ack
from agent.contract.wire import MessageError
from agent.mqtt.message import Message, Reply
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.uplink.reporter import Reporter

log = logging.getLogger(__package__)

_MESSAGES_PER_TICK = 20  # messages of each kind: a flood must not hold up the watchdog
_CHUNKS_PER_TICK = 100
_RESULTS_PER_TICK = 100
# After these errors `desired` is refused and tried again: it is retained, and would else come with the next connection
# only.
_TEMPORARY = ("command.clock", "state.write")
_AGAIN_S = 5.0

T = TypeVar("T")


@dataclass
class CommandInbox:
    """Drain the link's inboxes at each `tick`; one thread uses it.

    Args:
        deliveries: Receive the chunks of files.
        authority: Decides whose commands count; None admits everybody."""

    link: MqttLink
    handlers: Mapping[str, Handler]
    settings: Settings
    deliveries: Sequence[FileReceiver[Any]]
    labels: LabelsInbox
    authority: Authority | None
    reporter: Reporter
    clock: Clock = SYSTEM_CLOCK
    # The newest `desired` that was admitted, and may be applied later.
    _postponed: bytes | None = field(default=None, init=False)
    _postponed_until: float = field(default=0.0, init=False)  # monotonic

    def __post_init__(self) -> None:
        self._command_log = CommandLog(self.settings.state, clock=self.clock)
        link, command_log = self.link, self._command_log
        self._dispatcher = CommandDispatcher(
            self.handlers, link.send, command_log=command_log, authority=self.authority, reply=link.reply
        )

    def restore(self, known: Iterable[CommandResult], ended_now: Iterable[CommandResult]) -> None:
        """Start with what an earlier process left, as `CommandDispatcher.restore`."""
        self._dispatcher.restore(known, ended_now)
        self.report()

    def report(self) -> None:
        """Publish the settings in force."""
        self.link.send(self.settings.reported())

    def tick(self) -> None:
        """Handle the messages that have arrived. Raises the error that has ended the outbox's thread."""
        for held in _pop(_MESSAGES_PER_TICK, self.link.recognised):
            self._receive_command(held)
            held.confirm()  # it is in the log, or answered: a kill loses it no more
        for message in _pop(_MESSAGES_PER_TICK, self.link.inbox):
            self._receive_command(message)
        for message in _pop(_MESSAGES_PER_TICK, self.link.desired):
            self._apply_desired(message.payload)
        if self._postponed is not None and self.clock.monotonic_s() >= self._postponed_until:
            self._apply_desired(self._postponed)
        chunks = list(_pop(_CHUNKS_PER_TICK, self.link.model_chunks))
        for delivery in self.deliveries:
            for message in chunks:
                delivery.receive(message.topic, message.payload)
            delivery.tick()
        if delivered := list(_pop(_RESULTS_PER_TICK, self.link.delivered_results)):
            self._command_log.mark_delivered(delivered)
        for message in _pop(_MESSAGES_PER_TICK, self.link.labels):
            self.labels.receive(message.payload, self.clock.monotonic_s(), message.retain)
        self._apply_acks(self.link.outbox)
        self.link.answer_births()

    def stop(self, reason: str) -> None:
        """End the deliveries: once the run has ended, nothing may be written for a command of it."""
        for delivery in self.deliveries:
            delivery.end(reason)

    def _receive_command(self, message: Message) -> None:
        reply = Reply(message.reply_to, message.correlation) if message.reply_to is not None else None
        self._dispatcher.receive(message.payload, self.clock.wall_s(), message.retain, reply)

    def _apply_acks(self, outbox: Outbox) -> None:
        """Apply the collector's acks, and report the errors of the outbox's disk."""
        for message in _pop(_MESSAGES_PER_TICK, self.link.acks):
            try:
                ack = Ack.from_json(message.payload)
            except MessageError as error:
                log.warning("ack=unreadable error=%r", str(error))
                continue
            outbox.acknowledge(ack.epoch, ack.upto)
        while not outbox.errors.empty():
            self.reporter.error(outbox.errors.get_nowait())
        if outbox.error is not None:
            raise outbox.error

    def _apply_desired(self, payload: bytes) -> None:
        if not payload:  # somebody has cleared the retained document: the settings stay
            return
        try:
            document, key = admit_desired(payload, self.authority)
        except AgentError as error:  # only logged: anybody may have written it, `reported` is for those with a key
            log.warning("desired=not_admitted error=%r", str(error))
            return
        is_again, self._postponed = payload == self._postponed, None
        try:
            desired = parse_desired(document, key)
            if desired.version == self.settings.version:  # it is retained, and comes with every connection
                return
            check_expiry(desired, self.clock.wall_s(), self.authority)
            self.settings.set(desired.values, Authorisation(desired.version, key), whole=True)
        except AgentError as error:
            if error.code in _TEMPORARY:
                self._postponed, self._postponed_until = payload, self.clock.monotonic_s() + _AGAIN_S
            if not is_again:
                log.warning("desired=refused error=%r", str(error))
                self.link.send(self.settings.reported(error))


def _pop(most: int, inbox: queue.Queue[T] | queue.SimpleQueue[T]) -> Iterator[T]:
    with suppress(queue.Empty):
        for _ in range(most):
            yield inbox.get_nowait()
