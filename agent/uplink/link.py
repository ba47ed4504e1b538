"""Results of commands on their way to the broker, which says when it has the last of each."""

from __future__ import annotations

import queue
import threading
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from agent.common.timing import Backoff
from agent.contract.commands import CommandResult, Reported
from agent.contract.histograms import Upload
from agent.contract.messages import Birth, DeviceState, Status
from agent.contract.topics import HOME_ASSISTANT_PREFIX, Topics, may_reply_to
from agent.mqtt.client import Endpoint, MqttClient, MqttSession, SessionOptions
from agent.mqtt.message import Mailbox, Message, Newest, Reply
from agent.system.clock import unix_s
from agent.uplink.histogram_sender import OnChunk, UploadSource
from agent.uplink.home_assistant import BORN, Discovery
from agent.uplink.outbox import Outbox


@dataclass(frozen=True)
class _Final(Message):
    """The message that carries the final result of a command."""

    command_id: str = ""


class CommandResults(Mailbox):
    """`delivered_ids` has the id of each command whose final result the broker has acknowledged.

    house: the prefix under which Home Assistant hears, where no answer goes.
    """

    def __init__(self, topics: Topics, house: str = HOME_ASSISTANT_PREFIX) -> None:
        super().__init__()
        self._topics = topics
        self._house = house
        self.delivered_ids: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, result: CommandResult) -> None:
        topic, payload = self._topics.result(result.id), result.to_json()
        self.put(_Final(topic, payload, command_id=result.id) if result.final else Message(topic, payload))

    def add_reply(self, reply: Reply, result: CommandResult) -> None:
        """On the topic that the command's sender named, unless it could do harm there."""
        if may_reply_to(reply.topic, self._topics.result(result.id), self._house):
            self.put(Message(reply.topic, result.to_json(), correlation=reply.correlation))

    def delivered(self, message: Message) -> None:
        if isinstance(message, _Final):
            self.delivered_ids.put(message.command_id)


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MqttLink:
    """A context manager; inside it the device is on the air whenever the broker can be reached.

    Status (also the last will) and birth are retained and sent anew with every connection; the state is
    `degraded` until `set_state` knows better. `inbox` holds the commands, `labels` the labels, `desired` the documents
    of that name, `model_chunks` pieces of model files and `acks` what a collector acknowledges, as they came, for the
    supervisor to drain; `outbox` takes what is to be reported. Nothing here waits for a broker, or needs one.
    Raises ConfigError for a password file that cannot be read.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        topics: Topics,
        birth: Birth,
        outbox: Outbox,
        backoff: Backoff | None = None,
        discovery: Discovery | None = None,
        client: Callable[[Endpoint, str, SessionOptions], MqttSession] = MqttClient,
        clock: Callable[[], float] = unix_s,
        boot_id: str | None = None,
    ) -> None:
        """client: makes the session, as MqttClient is made. clock: Unix time as the board has it. boot_id: None for
        this machine's."""
        self.topics = topics
        self.outbox = outbox
        self._discovery = discovery
        self._births = discovery.birth_topic if discovery is not None else ""
        self._lock = threading.Lock()  # state and session change together with the status in the outbox
        self._state: DeviceState = "degraded"
        self._session = ""
        self._clock = clock
        self._boot_id = boot_id or _boot_id()
        self._results = CommandResults(topics, discovery.prefix if discovery is not None else HOME_ASSISTANT_PREFIX)
        self._detections = Newest()
        self._histograms = UploadSource(topics)
        # One id per device: a broker ends the connection it still holds for us before it admits the new one,
        # so that the old will cannot come after the new status.
        client_id = f"tared/{topics.fleet}/{topics.device}"
        presented = [discovery] if discovery is not None else []
        heard = [topics.command, topics.labels, topics.ack, topics.desired, topics.model_chunks]
        self._client = client(
            endpoint,
            client_id,
            SessionOptions(
                subscriptions=[*heard, *([self._births] if self._births else [])],
                will=self._will,
                greet=self._greet,
                backoff=backoff,
                sources=[*presented, self._results, outbox, self._detections, self._histograms],
            ),
        )
        outbox.on_due = self._client.wake
        self.send(birth)

    def __enter__(self) -> MqttLink:
        self._client.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def inbox(self) -> queue.Queue[Message]:
        return self._client.inboxes[self.topics.command]

    @property
    def labels(self) -> queue.Queue[Message]:
        return self._client.inboxes[self.topics.labels]

    @property
    def acks(self) -> queue.Queue[Message]:
        return self._client.inboxes[self.topics.ack]

    @property
    def desired(self) -> queue.Queue[Message]:
        return self._client.inboxes[self.topics.desired]

    @property
    def model_chunks(self) -> queue.Queue[Message]:
        return self._client.inboxes[self.topics.model_chunks]

    @property
    def delivered_results(self) -> queue.SimpleQueue[str]:
        """Ids of commands whose final result the broker has."""
        return self._results.delivered_ids

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def drops(self) -> dict[str, int]:
        """Messages that fell out of a full queue or a full outbox so far, by cause."""
        return {**self._client.drops, "outbox": self.outbox.dropped.total()}

    @property
    def outcome(self) -> str:
        """What became of the latest attempt to connect, in words."""
        return self._client.outcome

    def set_state(self, state: DeviceState) -> None:
        """Publish what the device is now, if that is news, and say so again with every later connection."""
        with self._lock:
            if state != self._state:
                self._state = state
                self._client.publish(self._status(state))

    def send(self, message: Birth | Reported | CommandResult) -> None:
        """Publish a document of the contract on its topic."""
        if isinstance(message, CommandResult):
            self._results.add(message)
            self._client.wake()
        else:
            topic = self.topics.birth if isinstance(message, Birth) else self.topics.reported
            self._client.publish(Message(topic, message.to_json(), retain=True))

    def reply(self, reply: Reply, result: CommandResult) -> None:
        """A result on the topic that the command's sender named."""
        self._results.add_reply(reply, result)
        self._client.wake()

    def send_snapshot(self, jpeg: bytes) -> None:
        self._client.publish(Message(self.topics.snapshot, jpeg))

    def send_detections(self, payload: bytes) -> None:
        """The newest answer, which nobody waits for: without a connection, or with a newer one, it is gone."""
        if self.connected:
            self._detections.put(Message(self.topics.detections, payload, qos=0))
            self._client.wake()

    def send_histograms(self, upload: Upload, numbers: Iterable[int], told: OnChunk) -> None:
        """These chunks of an upload, one after the other; told: called in the MQTT thread, after each."""
        self._histograms.start(upload, numbers, told)
        self._client.wake()

    def answer_births(self) -> None:
        """Present the device to every Home Assistant that was started since; the supervisor calls it now and then."""
        if self._discovery is None or not self._births:
            return
        with suppress(queue.Empty):
            while True:
                if self._client.inboxes[self._births].get_nowait().payload == BORN:
                    self._discovery.announce()
                    self._client.wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Say `stopping`, deliver what is queued for at most `timeout_s`, say `offline`, disconnect."""
        self._histograms.end()
        self.set_state("stopping")
        self.outbox.hurry()
        self._client.close(self._status("offline"), timeout_s=timeout_s)

    def _will(self) -> Message:
        with self._lock:
            self._session = uuid.uuid4().hex
            return self._status("offline")

    def _greet(self) -> None:
        with self._lock:
            self._client.publish(self._status(self._state))

    def _status(self, state: DeviceState) -> Message:
        status = Status(state=state, session=self._session, boot_id=self._boot_id, ts=self._clock())
        return Message(self.topics.status, status.to_json(), qos=1, retain=True)


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "unknown"
