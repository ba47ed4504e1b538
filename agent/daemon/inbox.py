"""What is said to the board over MQTT: commands, the document `desired`, labels, acks. The supervisor's."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from agent.commands.authority import Authority
from agent.commands.deliveries import CalibrationDelivery, ModelDelivery
from agent.commands.dispatcher import Authorisation, CommandDispatcher, Handler
from agent.commands.file_transfer import Deliverer, Deliverers
from agent.commands.labels import LabelsInbox
from agent.commands.log import CommandLog
from agent.commands.releases import Releases
from agent.commands.settings import Settings, admit_desired, check_expiry, parse_desired
from agent.common.errors import AgentError
from agent.common.main_thread import RunInMainThread
from agent.contract.commands import CommandResult
from agent.contract.messages import Ack
from agent.contract.wire import MessageError
from agent.control.operations import Operations
from agent.daemon.handlers import BoardHandlers, EngineHandlers, HistogramHandlers
from agent.models.engine_service import EngineService
from agent.mqtt.message import Reply
from agent.serving.pipeline import Pipeline
from agent.uplink.link import MqttLink
from agent.uplink.outbox import Outbox
from agent.uplink.reporter import Reporter

log = logging.getLogger(__package__)

_MESSAGES_PER_TICK = 20  # of each kind: a flood of them must not hold up the watchdog
_CHUNKS_PER_TICK = 100
_ANSWERED_PER_TICK = 100
_PASSING = ("command.clock", "settings.write")  # for which `desired` is refused, and tried again: it is retained,
_AGAIN_S = 5.0  # and else would come with the next connection only

T = TypeVar("T")


class CommandInbox:
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
        labels: LabelsInbox,
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
        self._desk = CommandDispatcher(
            handlers, link.send, journal=self._journal, authority=authority, reply=link.reply
        )

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
            self._settings.set(desired.values, Authorisation(desired.version, key), whole=True)
        except AgentError as error:
            if error.code in _PASSING:
                self._postponed, self._postponed_until = payload, time.monotonic() + _AGAIN_S
            if not again:
                log.warning("desired=refused error=%r", str(error))
                self._link.send(self._settings.reported(error))


def _up_to(most: int, inbox: queue.Queue[T] | queue.SimpleQueue[T]) -> Iterator[T]:
    with suppress(queue.Empty):
        for _ in range(most):
            yield inbox.get_nowait()


def open_remote(
    link: MqttLink,
    settings: Settings,
    service: EngineService,
    pipeline: Pipeline,
    operations: Operations,
    labels: LabelsInbox,
    authority: Authority | None,
    reporter: Reporter,
    watched: bool,
    post: RunInMainThread,
    stop: Callable[[str], None],
) -> CommandInbox:
    """watched: whether the model's file is, so that a delivered one is seen. post: runs a function in the supervisor's
    thread. stop: ends the daemon, for a reason."""
    config = settings.config
    releases = Releases(authority, config.state_dir / "releases.json")
    if releases.damage is not None:
        reporter.error(releases.damage)
    models = ModelDelivery(
        config.state_dir / "incoming",
        config.model.path,
        watched,
        config.store.reserve_bytes,
        releases,
        post,
        operations.new_model.bring,
    )
    calibrations = CalibrationDelivery(
        config.state_dir / "incoming_calibration",
        config.store.reserve_bytes,
        lambda: service.planned,
        post,
        operations.try_calibration,
    )
    deliveries = Deliverers((models, calibrations))
    handlers = {
        **EngineHandlers(operations, service, pipeline, deliveries).handlers,
        **BoardHandlers(settings, pipeline, models, link, stop).handlers,
        **HistogramHandlers(config.privacy, service, link, post).handlers,
        "calibration": calibrations.on_calibration,
    }
    return CommandInbox(link, config.state_dir, handlers, settings, deliveries, labels, authority, reporter)
