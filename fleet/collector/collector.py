"""What boards are to be told of their reports: for each stream its newest word, however many there were."""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from agent.common.errors import AgentError
from agent.common.timing import Backoff
from agent.contract.messages import Ack
from agent.contract.topics import Topics
from agent.mqtt.bulk_receive import ReceiveQueue
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message
from fleet.collector.batch import NUMBERED, RESULTS, STATES, WHOLE, Batch, Part, Reader
from fleet.collector.writer import BatchWriter, ReportRetention
from fleet.devices.reports import Gap, Stream
from fleet.store.transaction import FleetStore
from fleet.untrusted import Warnings


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

    def pop(self) -> Message | None:
        with self._lock:
            if not self._due:
                return None
            stream, upto = self._due.popitem()
        payload = Ack(epoch=stream.epoch, upto=upto).to_json()
        return Message(Topics(stream.fleet, stream.device).ack, payload)

    def connection_started(self) -> None:
        """Nothing is due anew."""

    def delivered(self, message: Message) -> None:
        """Nothing of it is kept."""

    def refused(self, message: Message, for_good: bool) -> None:
        """Nothing of it is kept."""

    def put_back(self, messages: Sequence[Message]) -> None:
        """Nothing of it is kept."""


_READ_WAIT_S = 0.2  # until it looks whether it is to end


class ReadBatch(NamedTuple):
    """batch: what so many arrivals are, the next ones that this intake had."""

    batch: Batch
    queue: ReceiveQueue
    arrivals: int

    def confirm(self) -> None:
        """None of it need come again."""
        self.queue.confirm(self.arrivals)


class ReadAhead:
    """Batches of what each of these intakes has, in its order, made by a thread for each; a context manager. One is
    ready at a time, and one more of each may be read already. gather_s: by intake, how long it waits for more.
    batch_bytes: of messages, at most about so much in one."""

    def __init__(self, gather_s: Mapping[ReceiveQueue, float], reader: Reader, batch_bytes: int) -> None:
        self._reader = reader
        self._batch_bytes = batch_bytes
        self._ready: queue.Queue[ReadBatch | BaseException] = queue.Queue(1)
        self._ending = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=each, name="reading", daemon=True) for each in gather_s.items()
        ]

    def __enter__(self) -> ReadAhead:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def next(self, wait_s: float) -> ReadBatch | None:
        """The next one; None where there is none for so long. Raises what ended a thread, which is a bug."""
        try:
            read = self._ready.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(read, BaseException):
            raise read
        return read

    def _run(self, intake: ReceiveQueue, gather_s: float) -> None:
        try:
            while not self._ending.is_set():
                if arrivals := intake.pop(self._batch_bytes, _READ_WAIT_S, gather_s):
                    self._offer(ReadBatch(self._reader.read(arrivals), intake, len(arrivals)))
        except BaseException as error:
            self._offer(error)

    def _offer(self, read: ReadBatch | BaseException) -> None:
        """Nobody may be there any more to take it."""
        while not self._ending.is_set():
            with suppress(queue.Full):
                self._ready.put(read, timeout=_READ_WAIT_S)
                return


log = logging.getLogger(__package__)

CLIENT_ID = "tared-collector"

_WAIT_S = 0.2  # until it looks whether it is to stop
_INTAKE_BYTES = 32 << 20  # waiting, before the broker is to wait
_GATHER_S = 0.1
_GATHER_RESULTS_S = 0.02  # shorter: of these a broker has only so many under way, and waits for their commit
_SESSION_S = 86_400  # for so long the broker keeps results for a collector that is away
_RETRY_S = 1.0  # after a database that refused
_LASTING = "fleet.schema"
# Any other is a full disk's.
_STATES = {"fleet.damaged": "damaged", "fleet.unreachable": "unreachable", "fleet.contended": "contended"}


class Collector:
    """`counts` is of documents so far: report, gap, status, birth, result, or refused.

    Acknowledged is what is durably stored and has nothing missing before it. Whoever comes online hears how far this
    collector is: what was sent while nobody was there to take it then comes again at once. While the database refuses
    nothing is acknowledged, neither to boards nor, once so much waits, to the broker.

    Boards number no results of commands and wait for no word of ours for them: these come over a connection of their
    own, and the broker keeps each until it is stored, also while the collector is away for up to a day.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: FleetStore,
        client_id: str | None = CLIENT_ID,
        part: Part = WHOLE,
        share: str | None = None,
        retention: ReportRetention | None = None,
        fleet: str | None = None,
    ) -> None:
        """The store is the collector's own from now on. part: of the devices, the others are somebody else's. fleet:
        only those of this one. share: of all who name the same group, each is sent a share of the reports (MQTT 5,
        section 4.8.2), and all results, which the store has once.

        client_id: the broker keeps results for whoever comes back under it, so nobody else has it. None: one at random,
        for which nothing is kept.
        """
        self.counts: Counter[str] = Counter()
        self._store = store
        self._reader = Reader(part)
        self._warnings = Warnings(log, "collector")
        self._keeper = BatchWriter(store, self._warnings)
        self._retention = retention or ReportRetention()
        self._intake, self._results = ReceiveQueue(_INTAKE_BYTES), ReceiveQueue(_INTAKE_BYTES)
        self._acks = Acks()
        name = client_id or f"{CLIENT_ID}-{uuid.uuid4().hex[:12]}"
        self._client = MqttClient(
            endpoint,
            name,
            SessionOptions(
                subscriptions=subscriptions(share, fleet),
                backoff=Backoff(0.2, 10.0),
                sources=[self._acks],
                receive_queue=self._intake,
            ),
        )
        # A session remembers what it was subscribed to: that of another fleet is another one.
        of_fleet = "" if fleet is None else f"-{fleet}"
        self._results_client = MqttClient(
            endpoint,
            f"{name}-results{of_fleet}",
            SessionOptions(
                subscriptions=_topics(RESULTS, fleet),
                backoff=Backoff(0.2, 10.0),
                receive_queue=self._results,
                session_s=0 if client_id is None else _SESSION_S,
            ),
        )

    @property
    def outcome(self) -> str:
        """How far the connections are, in words: of two that differ the one that is not there."""
        return (self._results_client if self._client.connected else self._client).outcome

    def run(self, stopping: Callable[[], bool]) -> None:
        """Collect until it is time to stop, asked several times a second.

        Raises AgentError (`fleet.schema`) where a newer tared has taken over the database meanwhile.
        """
        gather_s = {self._intake: _GATHER_S, self._results: _GATHER_RESULTS_S}
        reading = ReadAhead(gather_s, self._reader, self._store.batch_bytes)
        with self._store, self._client, self._results_client, reading:
            while not stopping():
                read = reading.next(_WAIT_S)
                if read is not None and not self._take(read, stopping):
                    return
                self._tidy()

    def _take(self, read: ReadBatch, stopping: Callable[[], bool]) -> bool:
        """Take what came; False if it was time to stop before the database took it: then nothing was acknowledged."""
        batch = read.batch
        for each in batch.refused:
            self._warnings.warn("refused", f"topic={each.topic!r} error={each.found!r}")
        while True:
            try:
                self._acks.put(self._keeper.write(batch))
                break
            except AgentError as error:  # a damaged file is moved aside, and the next attempt begins a new one
                self._tell_or_raise(error)
                if stopping():
                    return False
                time.sleep(_RETRY_S)
        read.confirm()
        self._client.wake()
        self._count(batch)
        return True

    def _count(self, batch: Batch) -> None:
        gaps = sum(isinstance(each, Gap) for each in batch.entries)
        told = {"gap": gaps, "report": len(batch.entries) - gaps, "refused": len(batch.refused)}
        told |= {"status": len(batch.statuses), "birth": len(batch.births), "result": len(batch.results)}
        self.counts.update({name: count for name, count in told.items() if count})

    def _tidy(self) -> None:
        try:
            self._retention.prune_if_due(self._store, time.time())
        except AgentError as error:
            self._tell_or_raise(error)
        self._warnings.tick()

    def _tell_or_raise(self, error: AgentError) -> None:
        """What does not pass by itself ends the collector: somebody has to see to it."""
        if error.code == _LASTING:
            raise error
        state = _STATES.get(error.code, "full")
        log.error("collector=%s error=%r retry_s=%.0f", state, str(error), _RETRY_S)


def client_id_for(part: Part = WHOLE, fleet: str | None = None) -> str:
    """The same at each start, for the one collector of a part and a fleet, or of all fleets."""
    own = [CLIENT_ID] if fleet is None else [CLIENT_ID, fleet]
    return "-".join(own if part == WHOLE else [*own, f"{part.number}-of-{part.of}"])


def subscriptions(share: str | None = None, fleet: str | None = None) -> list[str]:
    """What a collector listens to but for results. What is retained no broker sends to a group (MQTT 5, section 4.8.2),
    so each listens to all of that."""
    numbered = _topics(NUMBERED, fleet)
    shared = numbered if share is None else [f"$share/{share}/{topic}" for topic in numbered]
    return [*shared, *_topics(STATES, fleet)]


def _topics(paths: Iterable[str], fleet: str | None) -> list[str]:
    return [f"tared/v1/{fleet or '+'}/+/{path}" for path in paths]
