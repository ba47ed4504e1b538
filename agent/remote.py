"""What is said to the board over MQTT, commands and the document `desired`, and who may say it. The supervisor's."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from agent.authority import Authority
from agent.command_log import CommandLog
from agent.commands import CommandDesk, Handler, Mandate, Reply
from agent.errors import AgentError, CommandError
from agent.link import MqttLink
from agent.model_delivery import ModelDelivery
from agent.publishing import Message
from agent.reporting import Reporter
from agent.requests import CommandResult, Desired
from agent.settings import Settings
from agent.wire import MessageError, problems, read_object

log = logging.getLogger(__name__)

_MESSAGES_PER_TICK = 20  # of each kind: a flood of commands must not hold up the watchdog
_CHUNKS_PER_TICK = 100


class Remote:
    """Drains the link's inboxes in `tick`; one thread uses it.

    handlers: of all commands. authority: None admits everybody. Raises AgentError (`command.schema`) for the log of a
    newer tared.
    """

    def __init__(
        self,
        link: MqttLink,
        state_dir: Path,
        handlers: Mapping[str, Handler],
        settings: Settings,
        delivery: ModelDelivery,
        authority: Authority | None,
        reporter: Reporter,
    ) -> None:
        self._link = link
        self._settings = settings
        self._delivery = delivery
        self._authority = authority
        self._reporter = reporter
        self._journal = CommandLog(state_dir / "commands.sqlite", reporter.error)
        self._desk = CommandDesk(handlers, link.send, journal=self._journal, authority=authority, reply=link.reply)

    def recall(self, known: list[CommandResult], news: list[CommandResult]) -> None:
        """Begin with what a process that is gone left: the results of its jobs, and of those that end only now."""
        self._desk.recall(known, news)
        self.report()

    def report(self) -> None:
        """What is set now."""
        self._link.send(self._settings.reported())

    def tick(self) -> None:
        """Take what came."""
        for message in _up_to(_MESSAGES_PER_TICK, self._link.inbox):
            reply = Reply(message.reply_to, message.correlation) if message.reply_to is not None else None
            self._desk.receive(message.payload, time.time(), message.retain, reply)
        for message in _up_to(_MESSAGES_PER_TICK, self._link.desired):
            self._take_desired(message.payload)
        for message in _up_to(_CHUNKS_PER_TICK, self._link.model_chunks):
            self._delivery.receive(message.topic, message.payload)
        self._delivery.tick()
        with suppress(queue.Empty):
            while True:
                self._journal.delivered(self._link.answered.get_nowait())

    def stop(self, reason: str) -> None:
        """The run ends: nothing may be written any more for a command that came in it."""
        self._delivery.end(reason)

    def _take_desired(self, payload: bytes) -> None:
        if not payload:  # somebody has cleared the retained document: what was set stays
            return
        try:
            desired, key = parse_desired(payload, time.time(), self._authority)
            if desired.version == self._settings.version:  # it is retained, and comes with every connection
                return
            self._settings.set(desired.values, Mandate(desired.version, key), whole=True)
        except AgentError as error:
            log.warning("desired=refused error=%r", str(error))
            self._link.send(self._settings.reported(error))


def parse_desired(payload: bytes, now: float, authority: Authority | None) -> tuple[Desired, str]:
    """The document, and the id of the key that signed it, empty where none did; `now` is Unix time in seconds.

    Raises MessageError, CommandError: as `parse_command`.
    """
    document = read_object(payload)
    key = authority.admit(document) if authority is not None else ""
    try:
        desired = Desired.model_validate(document)
    except ValidationError as error:
        raise MessageError("message.invalid", problems(error), "version and values", "correct the sender") from None
    if desired.expires is not None:
        if authority is not None:
            authority.check_clock()
        if now >= desired.expires:
            found = f"expired {now - desired.expires:.1f} s ago by this clock"
            raise CommandError("command.expired", found, "a valid document", "publish it anew")
    return desired, key


def _up_to(most: int, inbox: queue.Queue[Message]) -> Iterator[Message]:
    with suppress(queue.Empty):
        for _ in range(most):
            yield inbox.get_nowait()
