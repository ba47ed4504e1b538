"""One MQTT 3.1.1 connection to a broker, from the attempt to its end; the only file that imports paho.

Each has a paho client of its own, because paho would resend a status of the lost connection after the new
one's: what was not acknowledged is left in `unacknowledged`, for whoever connects next. The broker is not
trusted: what breaks the protocol, and silence where an answer is due, end the connection as an exception.
"""

from __future__ import annotations

import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from paho.mqtt.client import Client, MQTTMessage, MQTTv311, topic_matches_sub
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.reasoncodes import ReasonCode

from agent.endpoint import Endpoint
from agent.errors import AgentError, ConfigError
from agent.publishing import Message, Source
from agent.wire import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ACKNOWLEDGE_TIMEOUT_S = 60.0  # between one acknowledgement and the next, while there is something to acknowledge
IN_FLIGHT = 20  # messages handed to paho and not yet acknowledged


class Connection:
    """Belongs to one thread: it calls `open`, then `turn` while `alive`, and `close` in any case.

    `outcome` says in words how far it has come. `admitted_at` is the monotonic time at which the broker had
    taken us and our subscriptions. A byte in `wakee` ends a turn; `hear` gets what arrives, with its subscription.
    """

    def __init__(
        self,
        client_id: str,
        subscriptions: Sequence[str],
        will: Message | None,
        hear: Callable[[str, Message], None],
        wakee: socket.socket,
    ) -> None:
        self.outcome = "not tried yet"
        self.admitted_at: float | None = None
        self.unacknowledged: dict[int, tuple[Message, Source]] = {}  # by paho's message id, in the order they were sent
        self._subscriptions = subscriptions
        self._subscribing: int | None = None  # the message id of the SUBSCRIBE that waits for its answer
        self._answer_by = math.inf
        self._hear = hear
        self._wakee = wakee
        self._selector = selectors.DefaultSelector()
        self._client = Client(CallbackAPIVersion.VERSION2, client_id, protocol=MQTTv311, reconnect_on_failure=False)
        self._client.connect_timeout = CONNECT_TIMEOUT_S
        self._client.max_inflight_messages = IN_FLIGHT
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_publish = self._on_publish
        self._client.on_disconnect = self._on_disconnect
        if will is not None:
            self._client.will_set(will.topic, will.payload, will.qos, will.retain)

    @property
    def alive(self) -> bool:
        """Whether there is still a socket."""
        return self._client.socket() is not None

    @property
    def has_room(self) -> bool:
        """Whether one more message may be on its way."""
        return len(self.unacknowledged) < IN_FLIGHT

    def open(self, endpoint: Endpoint, password: str | None) -> None:
        """Reach the broker and introduce ourselves. Raises OSError, ConfigError (`mqtt.host`)."""
        if endpoint.username is not None:
            self._client.username_pw_set(endpoint.username, password)
        try:
            self._client.connect(endpoint.host, endpoint.port, endpoint.keepalive_s)
        except ValueError as error:
            found = f"{endpoint.host!a} port {endpoint.port} ({error})"
            raise ConfigError("mqtt.host", found, "a host that can be looked up", "correct mqtt.host") from None
        self._expect("no answer to CONNECT")
        if (sock := self._client.socket()) is not None:
            self._selector.register(self._wakee, selectors.EVENT_READ)
            self._selector.register(sock, selectors.EVENT_READ)

    def turn(self, patience_s: float) -> None:
        """Wait for something to do, for at most `patience_s`, and do it.

        Raises AgentError (`broker.protocol`, `broker.silent`), and whatever paho makes of broken packets.
        """
        client = self._client
        if (sock := client.socket()) is None:
            return
        writing = selectors.EVENT_WRITE if client.want_write() else 0
        self._selector.modify(sock, selectors.EVENT_READ | writing)
        ready = {key.fileobj: events for key, events in self._selector.select(patience_s)}
        if self._wakee in ready:
            self._wakee.recv(4096)
        if ready.get(sock, 0) & selectors.EVENT_READ:
            client.loop_read()
        if ready.get(sock, 0) & selectors.EVENT_WRITE:
            client.loop_write()
        client.loop_misc()
        if time.monotonic() > self._answer_by:
            found = self.outcome if self.admitted_at is None else f"{len(self.unacknowledged)} messages unacknowledged"
            raise AgentError("broker.silent", found, "answers in time", "see the broker's log, or restart it")

    def unacknowledged_of(self, source: Source) -> list[Message]:
        """What was taken from this source, the oldest first."""
        return [message for message, its_source in self.unacknowledged.values() if its_source is source]

    def send(self, message: Message, source: Source) -> None:
        """Publish what was taken from `source`, which hears of its delivery."""
        info = self._client.publish(message.topic, message.payload, message.qos, message.retain)
        if message.qos:
            if not self.unacknowledged:
                self._answer_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
            self.unacknowledged[info.mid] = message, source

    def say_goodbye(self) -> None:
        """Disconnect, so that the will stays unsaid."""
        self._client.disconnect()

    def close(self) -> None:
        """Cut the connection, unless a goodbye was said: then the broker publishes the will."""
        self._selector.close()
        if (sock := self._client.socket()) is not None:
            sock.close()

    def _expect(self, missing: str) -> None:
        self.outcome = missing
        self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S

    def _on_connect(self, client: Client, _user: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if reason.is_failure:
            self.outcome = f"refused: {reason}"
        elif self._subscriptions:
            self._expect("no answer to SUBSCRIBE")
            _, self._subscribing = client.subscribe([(topic, 1) for topic in self._subscriptions])
        else:
            self._admit()

    def _on_subscribe(self, _client: Client, _user: Any, mid: int, reasons: list[ReasonCode], _props: Any) -> None:
        if mid != self._subscribing:
            raise _violation("a SUBACK that nobody waits for", "one answer to each SUBSCRIBE")
        self._subscribing = None
        if len(reasons) != len(self._subscriptions):
            raise _violation(f"a SUBACK with {len(reasons)} codes", f"{len(self._subscriptions)}")
        for topic, reason in zip(self._subscriptions, reasons, strict=True):
            if reason.is_failure:
                log.warning("mqtt=deaf topic=%s reason=%r remedy=%r", topic, str(reason), "the broker's ACL")
        self._admit()

    def _admit(self) -> None:
        self.outcome = "connected"
        self.admitted_at = time.monotonic()
        self._answer_by = math.inf

    def _on_message(self, _client: Client, _user: Any, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError as error:
            raise _violation(f"a topic that is no text ({error})", "UTF-8") from None
        # amqtt sends a new client the retained messages of everybody's subscriptions.
        subscription = next((each for each in self._subscriptions if topic_matches_sub(each, topic)), None)
        if subscription is not None:
            # One byte too many is kept, so that its reader sees that it is too long; 256 MB of them are not.
            payload = bytes(message.payload[: MAX_PAYLOAD_BYTES + 1])
            self._hear(subscription, Message(topic, payload, message.qos, message.retain))

    def _on_publish(self, _client: Client, _user: Any, mid: int, _reason: Any, _props: Any) -> None:
        if mid in self.unacknowledged:
            message, source = self.unacknowledged.pop(mid)
            source.delivered(message)
        self._answer_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S if self.unacknowledged else math.inf

    def _on_disconnect(self, _client: Client, _user: Any, _flags: Any, reason: ReasonCode, _props: Any) -> None:
        if self.admitted_at is not None:
            self.outcome = f"connection lost: {reason}"
        elif not self.outcome.startswith("refused"):
            self.outcome += f", then the connection was lost: {reason}"


def _violation(found: str, expected: str) -> AgentError:
    return AgentError("broker.protocol", found, expected, "update the broker, or use another")
