"""What is said to the board over MQTT: commands, the document `desired`, labels, acks. The supervisor's."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from agent.authority import Authority
from agent.command_log import CommandLog
from agent.commands import CommandDesk, Handler, Mandate
from agent.delivery import Deliverer
from agent.errors import AgentError, CommandError
from agent.labels import LabelsDesk
from agent.link import MqttLink
from agent.messages import Ack
from agent.outbox import Outbox
from agent.publishing import Reply
from agent.reporting import Reporter
from agent.requests import CommandResult, Desired
from agent.settings import Settings
from agent.wire import MessageError, problems, read_object

log = logging.getLogger(__name__)

_MESSAGES_PER_TICK = 20  # of each kind: a flood of them must not hold up the watchdog
_CHUNKS_PER_TICK = 100
_ANSWERED_PER_TICK = 100
_PASSING = ("command.clock", "settings.write")  # for which `desired` is refused, and tried again: it is retained,
_AGAIN_S = 5.0  # and else would come with the next connection only

T = TypeVar("T")


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
        delivery: Deliverer,
        labels: LabelsDesk,
        authority: Authority | None,
        reporter: Reporter,
    ) -> None:
        self._link = link
        self._settings = settings
        self._delivery = delivery
        self._postponed: bytes | None = None  # the newest `desired` that was admitted, and may be taken later
        self._postponed_until = 0.0  # monotonic
        self._labels = labels
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
        """Take what came. Raises what has ended the thread of the outbox."""
        for message in _up_to(_MESSAGES_PER_TICK, self._link.inbox):
            reply = Reply(message.reply_to, message.correlation) if message.reply_to is not None else None
            self._desk.receive(message.payload, time.time(), message.retain, reply)
        for message in _up_to(_MESSAGES_PER_TICK, self._link.desired):
            self._take_desired(message.payload)
        if self._postponed is not None and time.monotonic() >= self._postponed_until:
            self._take_desired(self._postponed)
        for message in _up_to(_CHUNKS_PER_TICK, self._link.model_chunks):
            self._delivery.receive(message.topic, message.payload)
        self._delivery.tick()
        if answered := list(_up_to(_ANSWERED_PER_TICK, self._link.answered)):
            self._journal.delivered(answered)
        for message in _up_to(_MESSAGES_PER_TICK, self._link.labels):
            self._labels.receive(message.payload, time.monotonic(), message.retain)
        self._take_acks(self._link.outbox)
        self._link.answer_births()

    def stop(self, reason: str) -> None:
        """The run ends: nothing may be written any more for a command that came in it."""
        self._delivery.end(reason)

    def _take_acks(self, outbox: Outbox) -> None:
        """Of the fleet's collector; and what there is to tell of the disk that keeps what it has not collected."""
        for message in _up_to(_MESSAGES_PER_TICK, self._link.acks):
            try:
                ack = Ack.from_json(message.payload)
            except MessageError as error:
                log.warning("ack=unreadable error=%r", str(error))
                continue
            outbox.acknowledge(ack.epoch, ack.upto)
        while not outbox.errors.empty():
            self._reporter.error(outbox.errors.get_nowait())
        if outbox.error is not None:
            raise outbox.error

    def _take_desired(self, payload: bytes) -> None:
        if not payload:  # somebody has cleared the retained document: what was set stays
            return
        try:
            document, key = admit_desired(payload, self._authority)
        except AgentError as error:  # anybody may have written it: `reported` is for those who have a say
            log.warning("desired=not_admitted error=%r", str(error))
            return
        again, self._postponed = payload == self._postponed, None
        try:
            desired = parse_desired(document, key)
            if desired.version == self._settings.version:  # it is retained, and comes with every connection
                return
            check_expiry(desired, time.time(), self._authority)
            self._settings.set(desired.values, Mandate(desired.version, key), whole=True)
        except AgentError as error:
            if error.code in _PASSING:
                self._postponed, self._postponed_until = payload, time.monotonic() + _AGAIN_S
            if not again:
                log.warning("desired=refused error=%r", str(error))
                self._link.send(self._settings.reported(error))


def admit_desired(payload: bytes, authority: Authority | None) -> tuple[dict[str, Any], str]:
    """The document, and the id of the key that signed it, empty where none did.

    Raises MessageError, and CommandError as `Authority.admit`.
    """
    document = read_object(payload)
    return document, authority.admit(document) if authority is not None else ""


def parse_desired(document: dict[str, Any], key: str) -> Desired:
    """What was admitted with this key. Raises MessageError (`message.invalid`).

    A signed document says until when it may be taken up: without that whoever kept one back could let it through when
    it does harm.
    """
    try:
        desired = Desired.model_validate(document)
    except ValidationError as error:
        raise MessageError("message.invalid", problems(error), "version and values", "correct the sender") from None
    if key and desired.expires is None:
        found, remedy = "a signed document without 'expires'", "sign it with a time, Unix seconds"
        raise MessageError("message.invalid", found, "one that says until when it may be taken up", remedy)
    return desired


def check_expiry(desired: Desired, now: float, authority: Authority | None) -> None:
    """`now` is Unix time in seconds. Raises CommandError (`command.clock`, `command.expired`)."""
    if desired.expires is not None:
        if authority is not None:
            authority.check_clock()
        if now >= desired.expires:
            found = f"expired {now - desired.expires:.1f} s ago by this clock"
            raise CommandError("command.expired", found, "a valid document", "publish it anew")


def _up_to(most: int, inbox: queue.Queue[T] | queue.SimpleQueue[T]) -> Iterator[T]:
    with suppress(queue.Empty):
        for _ in range(most):
            yield inbox.get_nowait()
