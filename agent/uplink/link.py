"""Connect the device to its broker: topics in and out, status and last will, results of commands.

`MqttLink` gives each inbound topic an inbox, which the supervisor drains, and each kind of outbound message its source:
the mailbox (status, birth, reported, snapshots), `CommandResults`, the Outbox (telemetry and events), the newest
detections, and `UploadSource` for a calibration's histograms. Nothing here waits for a broker, or needs one.
"""

from __future__ import annotations

import queue
import threading
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.timing import Backoff
from agent.contract.commands import CommandResult, Reported
from agent.contract.histograms import Upload
from agent.contract.messages import Birth, DeviceState, Status
from agent.contract.topics import HOME_ASSISTANT_PREFIX, Topic, Topics, may_reply_to
from agent.mqtt.client import Endpoint, MqttClient, MqttSession, SessionOptions
from agent.mqtt.message import Mailbox, Message, MessageSource, Newest, Reply
from agent.uplink.home_assistant import BORN, Discovery
from agent.uplink.outbox import Outbox

OnChunk = Callable[[int, str], None]  # how many chunks are still to come; which limit of the broker refused one, or ""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class MqttLink:
    """The device's link to its broker; a context manager, in which it connects whenever the broker can be reached.

    Status (also the last will) and birth are retained, and sent again with every connection. The state is `degraded`
    until `set_state` changes it. `outbox` takes telemetry and events.

    The inboxes: `recognised` for commands that `recognise` knew, each held by the broker until it is confirmed; `inbox`
    for the others; `labels`, `desired` for the documents of that name, `model_chunks` for pieces of
    model files, `acks` for what a collector acknowledges. `delivered_results` has the ids of commands whose final
    result the broker has.

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
        client: Callable[[Endpoint, str, SessionOptions, Clock], MqttSession] = MqttClient,
        boot_id: str | None = None,
        recognise: Callable[[bytes], bool] = lambda _: False,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Make the session; it connects from `__enter__` on.

        Args:
            birth: What the device is; published at once.
            outbox: Telemetry and events.
            backoff: Delay between attempts to connect.
            discovery: Announces the device to Home Assistant; None: it is not announced, and no removal is due.
            client: Makes the session, as MqttClient does.
            boot_id: Identifies the boot of the machine; None: this machine's.
            recognise: Returns whether a payload is a command that has room of its own. Called in the MQTT thread.
            clock: The board's.
        """
        self.topics = topics
        self.outbox = outbox
        self._discovery = discovery
        self._birth_topic = discovery.birth_topic if discovery is not None else ""
        self._lock = threading.Lock()  # state and session change together with the status in the mailbox
        self._state: DeviceState = "degraded"
        self._reason = ""
        self._session = ""
        self._clock = clock
        self._boot_id = boot_id or _boot_id()
        self._results = CommandResults(topics, discovery.prefix if discovery is not None else HOME_ASSISTANT_PREFIX)
        self.delivered_results = self._results.delivered_ids
        self._detections = Newest()
        self._histograms = UploadSource(topics)
        inbound = [topics.command, topics.labels, topics.ack, topics.desired, topics.model_chunks]
        self._client = client(
            endpoint,
            # One id per device: a broker ends the connection it still holds for us before it admits the new one,
            # so that the old will cannot come after the new status.
            f"tared/{topics.fleet}/{topics.device}",
            SessionOptions(
                subscriptions=[*inbound, *([self._birth_topic] if self._birth_topic else [])],
                will=self._will,
                greet=self._greet,
                backoff=backoff,
                recognise={topics.command: recognise},
                sources=[
                    *([discovery] if discovery is not None else []),
                    self._results,
                    outbox,
                    self._detections,
                    self._histograms,
                ],
            ),
            clock,
        )
        self.inbox, self.labels, self.acks, self.desired, self.model_chunks = (
            self._client.inboxes[topic] for topic in inbound
        )
        self.recognised = self._client.reserved[topics.command]
        outbox.on_due = self._client.wake
        self.send(birth)

    def __enter__(self) -> MqttLink:
        self._client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def connected(self) -> bool:
        return self._client.connected

    @property
    def drops(self) -> dict[str, int]:
        """Messages dropped from full queues or a full outbox so far, by cause."""
        return {**self._client.drops, "outbox": self.outbox.dropped.total()}

    @property
    def outcome(self) -> str:
        """The result of the latest attempt to connect, in words."""
        return self._client.outcome

    def set_state(self, state: DeviceState, reason: str = "") -> None:
        """Publish the device's state and its reason if they have changed, and repeat them with every connection."""
        with self._lock:
            if (state, reason) != (self._state, self._reason):
                self._state, self._reason = state, reason
                self._client.publish(self._status(state, reason))

    def send(self, message: Birth | Reported | CommandResult) -> None:
        """Publish a document of the contract on its topic."""
        if isinstance(message, CommandResult):
            self._results.add(message)
            self._client.wake()
        else:
            kind = Topics.birth if isinstance(message, Birth) else Topics.reported
            self._client.publish(self._message(kind, message.to_json()))

    def reply(self, reply: Reply, result: CommandResult) -> None:
        """Publish a result also on the topic that the command's sender named."""
        self._results.add_reply(reply, result)
        self._client.wake()

    def send_snapshot(self, jpeg: bytes) -> None:
        self._client.publish(self._message(Topics.snapshot, jpeg))

    def send_detections(self, payload: bytes) -> None:
        """Publish the newest result, which is dropped without a connection or when a newer one comes."""
        if self.connected:
            self._detections.put(self._message(Topics.detections, payload))
            self._client.wake()

    def send_histograms(self, upload: Upload, numbers: Iterable[int], on_chunk: OnChunk) -> None:
        """Publish these chunks of an upload, one after the other; `on_chunk` is called in the MQTT thread."""
        self._histograms.start(upload, numbers, on_chunk)
        self._client.wake()

    def answer_births(self) -> None:
        """Announce the device to every Home Assistant that has started since; the supervisor calls it regularly."""
        if self._discovery is None or not self._birth_topic:
            return
        with suppress(queue.Empty):
            while True:
                if self._client.inboxes[self._birth_topic].get_nowait().payload == BORN:
                    self._discovery.announce()
                    self._client.wake()

    def close(self, timeout_s: float = 2.0) -> None:
        """Publish `stopping`, deliver what is queued for at most `timeout_s`, publish `offline`, disconnect."""
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
            self._client.publish(self._status(self._state, self._reason))

    def _status(self, state: DeviceState, reason: str = "") -> Message:
        ts = self._clock.wall_s()
        status = Status(state=state, session=self._session, boot_id=self._boot_id, ts=ts, reason=reason or None)
        return self._message(Topics.status, status.to_json())

    def _message(self, topic: Topic, payload: bytes) -> Message:
        return Message(self.topics.below(topic.path), payload, topic.qos, topic.retain)


def _boot_id() -> str:
    return _BOOT_ID.read_text(encoding="ascii").strip() if _BOOT_ID.exists() else "unknown"


@dataclass(frozen=True)
class _Final(Message):
    """The message with the final result of a command."""

    command_id: str = ""


class CommandResults(Mailbox):
    """A mailbox for results of commands.

    `delivered_ids` receives the id of each command whose final result the broker has acknowledged.
    """

    def __init__(self, topics: Topics, house: str = HOME_ASSISTANT_PREFIX) -> None:
        """house: the prefix of Home Assistant's topics, where no reply may go."""
        super().__init__()
        self._topics = topics
        self._house = house
        self.delivered_ids: queue.SimpleQueue[str] = queue.SimpleQueue()

    def add(self, result: CommandResult) -> None:
        topic, payload = self._topics.result(result.id), result.to_json()
        self.put(_Final(topic, payload, command_id=result.id) if result.final else Message(topic, payload))

    def add_reply(self, reply: Reply, result: CommandResult) -> None:
        """Add the result on the topic that the command's sender named, unless a message there could do harm."""
        if may_reply_to(reply.topic, self._topics.result(result.id), self._house):
            self.put(Message(reply.topic, result.to_json(), correlation=reply.correlation))

    def delivered(self, message: Message) -> None:
        if isinstance(message, _Final):
            self.delivered_ids.put(message.command_id)


class UploadSource(MessageSource):
    """A MessageSource of chunks.

    Telemetry waits for one chunk at most, however slow the network is: the next chunk is due once the broker has the
    previous one. A chunk that a lost connection carried is sent again. The client does not wait for the rest when it
    closes: the length is 0 at all times.
    """

    def __init__(self, topics: Topics) -> None:
        self._topics = topics
        self._lock = threading.Lock()
        self._upload: Upload | None = None
        self._left: deque[int] = deque()
        self._message: Message | None = None  # on its way; it carries the first chunk of those that are left
        self._on_chunk: OnChunk = lambda _left, _refusal: None

    def start(self, upload: Upload, numbers: Iterable[int], on_chunk: OnChunk) -> None:
        """Send these chunks, instead of what is left of an earlier upload.

        on_chunk: called in the MQTT thread, after each chunk.
        """
        with self._lock:
            self._upload, self._left, self._on_chunk = upload, deque(numbers), on_chunk
            self._message = None

    def end(self) -> None:
        """Send no more chunks."""
        with self._lock:
            self._upload = None
            self._left.clear()

    def pop(self) -> Message | None:
        with self._lock:
            if self._upload is None or self._message is not None or not self._left:
                return None
            topic = self._topics.histogram_chunk(self._upload.name, self._left[0])
            self._message = Message(topic, self._upload.chunk(self._left[0]))
            return self._message

    def delivered(self, message: Message) -> None:
        self._report(message, "")

    def refused(self, message: Message, for_good: bool) -> None:
        """End the upload: the broker would refuse the next chunk as well."""
        self.end()
        self._report(message, "its longest message" if for_good else "its access rules")

    def put_back(self, messages: Sequence[Message]) -> None:  # noqa: ARG002  (only one was on its way)
        with self._lock:
            self._message = None

    def _report(self, message: Message, refusal: str) -> None:
        with self._lock:
            if message is not self._message:  # the upload of this message has ended
                return
            self._message = None
            if self._left:  # the upload goes on
                self._left.popleft()
            left, on_chunk = len(self._left), self._on_chunk
        on_chunk(left, refusal)
