"""Collect what boards report: receive it, store it, and acknowledge it.

Four threads work on it. Two MQTT connections receive into queues of limited size: one for reports and states, one for
results of commands. `ReadAhead` reads each queue in a thread. The caller's thread, in `Collector.run`, stores one
batch after the other; only then is it acknowledged, to the boards through `Acks` and to the broker by the queue.
"""

from __future__ import annotations

import logging
import queue
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.timing import Backoff
from agent.contract.messages import Ack
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.mqtt.message import Message, MessageSource
from agent.mqtt.receive_queue import ReceiveQueue
from fleet.collector.admission import USUAL, NewDevices
from fleet.collector.batch import NUMBERED, RESULTS, STATES, WHOLE, Batch, Part, Reader
from fleet.collector.writer import BatchWriter, ReportRetention
from fleet.devices.reports import Gap, Stream
from fleet.store.transaction import FleetStore
from fleet.untrusted import Warnings

log = logging.getLogger(__package__)

CLIENT_ID = "tared-collector"

_WAIT_S = 0.2  # between two checks whether it is time to stop
_QUEUE_BYTES = 32 << 20  # that wait here, before the broker has to keep the rest
_GATHER_S = 0.1
_GATHER_RESULTS_S = 0.02  # shorter: a broker has only so many of these under way, and waits for their commit
_SESSION_S = 86_400  # for so long the broker keeps results for a collector that is away
_RETRY_S = 1.0  # after the database refused
_LASTING = "fleet.schema"
NEW_DEVICE = "fleet.new-device"  # in `refused`: devices that stay out, each once a batch
# How an error is logged; any other is a full disk's.
_STATES = {"fleet.damaged": "damaged", "fleet.unreachable": "unreachable", "fleet.contended": "contended"}


class Collector:
    """Store what boards send, and acknowledge it.

    A report is acknowledged when it is durably stored and no earlier one is missing. A board that comes online gets an
    acknowledgement at once, so that it repeats what nobody received. While the database refuses, nothing is
    acknowledged to boards, and once the queue is full nothing to the broker either.

    Boards do not number results of commands, nor wait for their acknowledgement. They come over a connection of their
    own, and the broker keeps each result until it is stored, also while the collector is away for up to a day.

    Attributes:
        counts: Documents so far: report, gap, status, birth, result, refused.
        refused: Those refused, by code.
        admission: Which new devices stay out, and why.
        batches: How many were stored.
        stored_at: When the latest one was, Unix time in s; 0.0 before the first.
        queues: What waits to be stored, by connection.
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
        limits: NewDevices = USUAL,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare a collector.

        Args:
            store: The collector's own from now on; `run` closes it.
            client_id: The broker keeps results under this name, so no other client may use it. None: a random name,
                for which nothing is kept.
            part: Collect from this part of the devices.
            share: Name of a group of collectors. Each gets a share of the reports (MQTT 5, section 4.8.2), and all
                results, which the store has once.
            fleet: Collect from this fleet; None: from all.
            limits: Of new devices.
        """
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.batches, self.stored_at = 0, 0.0
        self._store, self._clock = store, clock
        self._reader = Reader(part)
        self._warnings = Warnings(log, "collector", clock)
        self._writer = BatchWriter(store, self._warnings, limits, clock)
        self.admission = self._writer.admission
        self._retention = retention or ReportRetention(clock=clock)
        self._reports, self._results = ReceiveQueue(_QUEUE_BYTES), ReceiveQueue(_QUEUE_BYTES)
        self.queues: Mapping[str, ReceiveQueue] = {"reports": self._reports, "results": self._results}
        self._acks = Acks()
        name = client_id or f"{CLIENT_ID}-{uuid.uuid4().hex[:12]}"
        session = SessionOptions(
            subscriptions=subscriptions(share, fleet),
            backoff=Backoff(0.2, 10.0),
            sources=[self._acks],
            receive_queue=self._reports,
        )
        self._client = MqttClient(endpoint, name, session)
        # A session remembers its subscriptions, so each fleet has a session of its own.
        suffix = "" if fleet is None else f"-{fleet}"
        session = SessionOptions(
            subscriptions=_topics(RESULTS, fleet),
            backoff=Backoff(0.2, 10.0),
            receive_queue=self._results,
            session_s=0 if client_id is None else _SESSION_S,
        )
        self._results_client = MqttClient(endpoint, f"{name}-results{suffix}", session)

    @property
    def connected(self) -> Mapping[str, bool]:
        """Return whether the broker has admitted each of the connections."""
        return {"reports": self._client.connected, "results": self._results_client.connected}

    @property
    def outcome(self) -> str:
        """The state of the connections in words; if one of the two is down, its state."""
        return (self._results_client if self._client.connected else self._client).outcome

    def run(self, stopping: Callable[[], bool]) -> None:
        """Collect until `stopping` returns True; it is called several times a second.

        Raises AgentError: fleet.schema  a newer tared has taken over the database
        """
        gather_s = {self._reports: _GATHER_S, self._results: _GATHER_RESULTS_S}
        reading = ReadAhead(gather_s, self._reader, self._store.batch_bytes)
        with self._store, self._client, self._results_client, reading:
            self._prune()  # first: it compares the clock with the newest row, before there are rows of this clock
            while not stopping():
                read = reading.next(_WAIT_S)
                if read is not None and not self._store_batch(read, stopping):
                    return
                self._prune()
                self._warnings.tick()

    def _prune(self) -> None:
        try:
            self._retention.prune_if_due(self._store)
        except AgentError as error:
            self._log_or_raise(error)

    def _store_batch(self, read: ReadBatch, stopping: Callable[[], bool]) -> bool:
        """Store and acknowledge a batch; return False if it was time to stop before the database accepted it."""
        for each in read.batch.refused:
            self._warnings.warn("refused", f"topic={each.topic!r} error={each.found!r}")
        while True:
            try:
                batch, complete = self._writer.write(read.batch)
                break
            except AgentError as error:  # a damaged file is moved aside, and the next attempt creates a new one
                self._log_or_raise(error)
                if stopping():
                    return False
                self._clock.sleep(_RETRY_S)
        gaps = sum(isinstance(each, Gap) for each in batch.entries)
        counts = {"gap": gaps, "report": len(batch.entries) - gaps, "refused": len(batch.refused)}
        counts |= {"status": len(batch.statuses), "birth": len(batch.births), "result": len(batch.results)}
        self.counts.update({name: count for name, count in counts.items() if count})
        self.refused.update(each.code for each in batch.refused)
        if batch is not read.batch:
            turned_away = len(read.batch.names) - len(batch.names)
            self.refused[NEW_DEVICE] += turned_away
            self.counts["refused"] += turned_away
        self.batches, self.stored_at = self.batches + 1, self._clock.wall_s()
        self._acks.put(complete)
        read.queue.confirm(read.arrivals)
        self._client.wake()
        return True

    def _log_or_raise(self, error: AgentError) -> None:
        """Log an error that may pass by itself; raise one that somebody has to resolve, which ends the collector."""
        if error.code == _LASTING:
            raise error
        state = _STATES.get(error.code, "full")
        log.error("collector=%s error=%r retry_s=%.0f", state, str(error), _RETRY_S)


class Acks(MessageSource):
    """A MessageSource with the newest acknowledgement of each stream; thread-safe.

    An acknowledgement that a connection did not carry is not repeated: a board that sends again gets another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._due: dict[Stream, int] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._due)

    def put(self, complete: Mapping[Stream, int]) -> None:
        """Acknowledge each of these streams up to its number."""
        with self._lock:
            self._due.update(complete)

    def pop(self) -> Message | None:
        with self._lock:
            if not self._due:
                return None
            stream, upto = self._due.popitem()
        payload = Ack(epoch=stream.epoch, upto=upto).to_json()
        return Message(Topics(stream.fleet, stream.device).ack, payload)


class ReadBatch(NamedTuple):
    """A batch, made of the next `arrivals` messages of `queue`."""

    batch: Batch
    queue: ReceiveQueue
    arrivals: int


class ReadAhead:
    """Read batches from several queues, with a thread for each queue; a context manager.

    One batch is ready at a time, and each thread may have read another one.

    gather_s: for each queue, how long a batch waits for more messages. batch_bytes: about the most in one batch.
    """

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
        """Return the next batch; None if none is ready in time. Raises what ended a thread, which is a bug."""
        try:
            read = self._ready.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(read, BaseException):
            raise read
        return read

    def _run(self, receive_queue: ReceiveQueue, gather_s: float) -> None:
        try:
            while not self._ending.is_set():
                if arrivals := receive_queue.pop(self._batch_bytes, _WAIT_S, gather_s):
                    self._offer(ReadBatch(self._reader.read(arrivals), receive_queue, len(arrivals)))
        except BaseException as error:
            self._offer(error)

    def _offer(self, read: ReadBatch | BaseException) -> None:
        """Wait until there is room, or until nobody reads any more."""
        while not self._ending.is_set():
            with suppress(queue.Full):
                self._ready.put(read, timeout=_WAIT_S)
                return


def client_id_for(part: Part = WHOLE, fleet: str | None = None) -> str:
    """Return the client ID of the one collector for this part and fleet; the same at each start."""
    names = [CLIENT_ID] if fleet is None else [CLIENT_ID, fleet]
    return "-".join(names if part == WHOLE else [*names, f"{part.number}-of-{part.count}"])


def subscriptions(share: str | None = None, fleet: str | None = None) -> list[str]:
    """Return what a collector subscribes to, apart from results.

    A broker sends no retained messages to a group (MQTT 5, section 4.8.2), so each collector gets all states.
    """
    numbered = _topics(NUMBERED, fleet)
    shared = numbered if share is None else [f"$share/{share}/{topic}" for topic in numbered]
    return [*shared, *_topics(STATES, fleet)]


def _topics(paths: Iterable[str], fleet: str | None) -> list[str]:
    return [f"tared/v1/{fleet or '+'}/+/{path}" for path in paths]
