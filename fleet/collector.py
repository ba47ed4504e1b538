"""Collects what boards report: stores it, and then tells each board what it may forget."""

from __future__ import annotations

import logging
import queue
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

from agent.backoff import Backoff
from agent.errors import AgentError, ConfigError
from agent.messages import Ack, Dropped, Event, Telemetry
from agent.mqtt import Endpoint, MqttClient
from agent.publishing import Message
from agent.topics import Topics
from agent.wire import read_object
from fleet.reports import Gap, Report, Reports, Stream
from fleet.store import Store

log = logging.getLogger(__name__)

_BATCH = 500  # documents in one transaction
_BATCH_S = 0.2  # and so long it waits for more
_INBOX = 10_000  # what comes faster for longer is dropped, and sent again by its board
_UNREADABLE = "unreadable"  # the kind of what came, and could not be stored
_HEAD_BYTES = 400  # in which a board writes the number
_RETRY_S = 1.0  # after a disk that refused


class Collector:
    """`counts` is of documents so far: report, gap, or refused.

    Acknowledged is what is durably stored and has nothing missing before it. Whoever comes online hears how far this
    collector is: what was sent while nobody was there to take it then comes again at once.
    """

    def __init__(self, endpoint: Endpoint, store: Store, client_id: str = "tared-collector") -> None:
        """The store is the collector's own from now on."""
        self.counts: Counter[str] = Counter()
        self._database = store
        self._reports = Reports(store)
        self._inbox: queue.Queue[Message] = queue.Queue(_INBOX)
        self._client = MqttClient(
            endpoint,
            client_id,
            subscriptions=[f"tared/v1/+/+/{topic}" for topic in ("telemetry", "event", "status")],
            backoff=Backoff(0.2, 10.0),
            shared_inbox=self._inbox,
        )

    @property
    def outcome(self) -> str:
        """How far the connection is, in words."""
        return self._client.outcome

    def run(self, stopping: Callable[[], bool]) -> None:
        """Collect until it is time to stop, asked several times a second."""
        with self._database, self._client:
            while not stopping():
                batch = self._next_batch()
                if batch and not self._store(batch, stopping):
                    return

    def _next_batch(self) -> list[Message]:
        batch: list[Message] = []
        until = time.monotonic() + _BATCH_S
        with suppress(queue.Empty):
            while len(batch) < _BATCH:
                batch.append(self._inbox.get(timeout=max(0.0, until - time.monotonic())))
        return batch

    def _store(self, batch: Sequence[Message], stopping: Callable[[], bool]) -> bool:
        """Take what came; False if it was time to stop before the disk took it: then nothing was acknowledged."""
        news: list[Report | Gap] = []
        arrivals: set[tuple[str, str]] = set()
        for message in batch:
            _, _, fleet, device, topic = message.topic.split("/")
            try:
                Topics(fleet, device)  # a broker lets anybody publish under any name
                if topic == "status":
                    arrivals.add((fleet, device))
                else:
                    news.append(read(fleet, device, topic, message.payload))
            except ConfigError as error:
                self._refuse(message, error)
            except AgentError as error:
                self._refuse(message, error)
                news.extend(numbered(fleet, device, message.payload))
        while True:
            try:
                complete = self._progress(news, arrivals)
                break
            except AgentError as error:  # a damaged file is moved aside, and the next attempt begins a new one
                state = "damaged" if error.code == "fleet.damaged" else "full"
                log.error("collector=%s error=%r retry_s=%.0f", state, str(error), _RETRY_S)
                if stopping():
                    return False
                time.sleep(_RETRY_S)
        for stream, upto in complete.items():
            ack = Ack(epoch=stream.epoch, upto=upto)
            self._client.publish(Message(Topics(stream.fleet, stream.device).ack, ack.to_json()))
        self.counts.update("gap" if isinstance(each, Gap) else "report" for each in news)
        return True

    def _refuse(self, message: Message, error: AgentError) -> None:
        self.counts["refused"] += 1
        log.warning("collector=refused topic=%r error=%r", message.topic, str(error))

    def _progress(self, news: Sequence[Report | Gap], arrivals: set[tuple[str, str]]) -> dict[Stream, int]:
        """Store what is new; how far the boards are that it is of, and those that came online. Raises AgentError."""
        complete = self._reports.add(news)
        for fleet, device in arrivals - {(stream.fleet, stream.device) for stream in complete}:
            epoch, upto = self._reports.latest(fleet, device)
            complete[Stream(fleet, device, epoch)] = upto
        return complete


def read(fleet: str, device: str, topic: str, payload: bytes) -> Report | Gap:
    """A document of `telemetry` or `event`. Raises AgentError for one that is none."""
    if topic == "telemetry":
        sample = Telemetry.from_json(payload)
        return Report(Stream(fleet, device, sample.epoch), sample.seq, topic, sample.ts, payload.decode())
    document = read_object(payload)
    if "seq" not in document and "from" in document:
        gap = Dropped.from_json(payload)
        return Gap(Stream(fleet, device, gap.epoch), gap.first, gap.last, gap.kind, gap.n)
    event = Event.from_json(payload)
    return Report(Stream(fleet, device, event.epoch), event.seq, event.kind, event.ts, payload.decode())


def numbered(fleet: str, device: str, payload: bytes) -> list[Gap]:
    """What is known of a document that cannot be read, if its number can be: it will not be any better when it comes
    again, and must not hold up all that comes after it."""
    found = [re.search(rb'"%s"\s*:\s*(\d{1,18})\b' % name, payload[:_HEAD_BYTES]) for name in (b"epoch", b"seq")]
    epoch, seq = (int(match[1]) if match else 0 for match in found)
    return [Gap(Stream(fleet, device, epoch), seq, seq, _UNREADABLE, 1)] if epoch and seq else []
