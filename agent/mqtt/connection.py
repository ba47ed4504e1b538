"""What the broker was handed on one connection and has not acknowledged yet."""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from paho.mqtt.client import (
    Client,
    ConnectFlags,
    DisconnectFlags,
    MQTTMessage,
    WebsocketConnectionError,
    topic_matches_sub,
)
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from agent.common.errors import AgentError, ConfigError
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt import endpoint as tls
from agent.mqtt.bulk_receive import BulkSocket, PubackPolicy, ReceiveQueue
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Message, MessageSource
from agent.mqtt.protocol import (
    Answer,
    BrokerLimits,
    LastError,
    Version,
    extras,
    no_websocket,
    packet_bytes,
    recognise,
    said,
    violation,
)

log = logging.getLogger(__package__)

ACKNOWLEDGE_TIMEOUT_S = 60.0  # between one acknowledgement and the next, while there is something to acknowledge


class InFlight:
    """At most `most` messages of QoS 1, by their packet ids, the oldest first.

    `answer_by` is the monotonic time by which the broker has to acknowledge one more.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.answer_by = math.inf
        self._sent: dict[int, tuple[Message, MessageSource]] = {}
        self._denied: set[str] = set()  # topics

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def has_room(self) -> bool:
        """Whether one more may be on its way."""
        return len(self._sent) < self.most

    def of(self, source: MessageSource) -> list[Message]:
        """What was taken from this source, the oldest first."""
        return [message for message, its_source in self._sent.values() if its_source is source]

    def add(self, packet_id: int, message: Message, source: MessageSource) -> None:
        """It is on its way; `source` hears of its delivery."""
        if not self._sent:
            self.answer_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S
        self._sent[packet_id] = message, source

    def acknowledge(self, packet_id: int, refusal: str | None) -> None:
        """The broker has it, or says why not: that is told once for each topic.

        A source that keeps its messages gives a refused one away again after a while.
        """
        if packet_id in self._sent:
            message, source = self._sent.pop(packet_id)
            if refusal is None:
                source.delivered(message)
            else:
                source.refused(message, for_good=False)
            if refusal is not None and message.topic not in self._denied:
                self._denied.add(message.topic)
                log.warning("mqtt=denied topic=%s reason=%r remedy=%r", message.topic, refusal, "the broker's ACL")
        self.answer_by = time.monotonic() + ACKNOWLEDGE_TIMEOUT_S if self._sent else math.inf


_PROTOCOLS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}


class Hearer(Protocol):
    """Whom the client tells what comes, while it is called. A refusal is in words; None: there is none."""

    def on_connack(self, refusal: str | None, speaks_version: bool, limits: BrokerLimits) -> None:
        """speaks_version: false where the version is why the broker refuses."""

    def on_suback(self, packet_id: int, refusals: Sequence[str | None]) -> None:
        """For each topic of a SUBSCRIBE."""

    def on_message(self, subscription: str, message: Message) -> None:
        """subscription: the first of those that it fits."""

    def on_puback(self, packet_id: int, refusal: str | None) -> None:
        """For a message of ours."""

    def on_end(self, cause: str, error: OSError | None) -> None:
        """The connection is over. error: the socket's, where that is why."""


class PahoClient:
    """For one connection, and one thread. will_delay_s, session_s: how long after the connection the broker waits with
    the will, and keeps the session; 0 where there is to be none, and by MQTT 3.1.1 that lasts as long as it pleases.

    in_flight: how many messages it sends at once. connect_s: for how long an attempt to connect may last. bulk: `sock`
    is a BulkSocket, which has all publications.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        version: Version,
        client_id: str,
        hearer: Hearer,
        *,
        will: Message | None,
        will_delay_s: int,
        session_s: int,
        in_flight: int,
        connect_s: float,
        bulk: bool,
    ) -> None:
        self._endpoint = endpoint
        self._speaks_5 = version == "5"
        self._session_s = session_s
        self._subscriptions: Sequence[str] = ()
        self._trouble = LastError()
        self._client = client = (_BulkClient if bulk else Client)(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if self._speaks_5 else not session_s,
            userdata=hearer,
            protocol=_PROTOCOLS[version],
            transport=endpoint.transport,
            reconnect_on_failure=False,
        )
        client.ws_set_options(endpoint.websocket_path)
        client.enable_logger(self._trouble.logger)
        client.connect_timeout = connect_s
        client.max_inflight_messages = in_flight
        client.on_connect = _on_connect
        client.on_subscribe = _on_subscribe
        client.on_message = self._on_message
        client.on_publish = _on_publish
        client.on_disconnect = self._on_disconnect
        if will is not None:
            delayed = self._properties(PacketTypes.WILLMESSAGE, WillDelayInterval=will_delay_s or None)
            client.will_set(will.topic, will.payload, will.qos, will.retain, delayed)

    @property
    def sock(self) -> Any:
        """What a selector takes; None without a connection."""
        return self._client.socket()

    @property
    def wants_write(self) -> bool:
        """Whether it waits until the socket takes more."""
        return self._client.want_write()

    def connect(self, password: str | None, **properties: int | None) -> None:
        """Reach the broker, and send CONNECT. properties: by their names in MQTT 5, section 3.1.2.11.

        Raises OSError, AgentError (`broker.tls`, `broker.websocket`), ConfigError (`mqtt.host`, `mqtt.tls`).
        """
        endpoint = self._endpoint
        if endpoint.username is not None:
            self._client.username_pw_set(endpoint.username, password)
        if endpoint.tls is not None:
            self._client.tls_set_context(endpoint.tls.context())
        where = endpoint.host, endpoint.port, endpoint.keepalive_s
        try:
            if self._speaks_5:
                lasts_s = self._session_s or None
                asked = self._properties(PacketTypes.CONNECT, SessionExpiryInterval=lasts_s, **properties)
                # A clean start would end the session that the connection before has left, and publish its will.
                self._client.connect(*where, clean_start=not self._session_s, properties=asked)
            else:
                self._client.connect(*where)
        except WebsocketConnectionError as error:
            raise no_websocket(endpoint.websocket_path, endpoint.port, error) from None
        except OSError as error:
            told = tls.explained(error, in_handshake=True) if endpoint.tls is not None else None
            raise told or error from None
        except ValueError as error:
            found = f"{endpoint.host!a} port {endpoint.port} ({error})"
            raise ConfigError("mqtt.host", found, "a host that can be looked up", "correct mqtt.host") from None

    def subscribe(self, topics: Sequence[str]) -> int | None:
        """At QoS 1; the packet id that the answer will have."""
        self._subscriptions = topics
        _, packet_id = self._client.subscribe([(topic, 1) for topic in topics])
        return packet_id

    def publish(self, message: Message, retain: bool) -> int:
        """Its packet id."""
        properties = self._properties(
            PacketTypes.PUBLISH,
            MessageExpiryInterval=message.expires_s,
            ResponseTopic=message.reply_to,
            CorrelationData=message.correlation,
        )
        return self._client.publish(message.topic, message.payload, message.qos, retain, properties).mid

    def disconnect(self, ends_session: bool) -> None:
        """Say goodbye, so that the will stays unsaid. ends_session: which else lasts as long as it was asked to."""
        expiry_s = 0 if ends_session else None
        self._client.disconnect(properties=self._properties(PacketTypes.DISCONNECT, SessionExpiryInterval=expiry_s))

    def read(self) -> None:
        """What has come. Raises what the hearer does, and whatever paho makes of broken packets."""
        self._client.loop_read()

    def write(self) -> None:
        """What waits for the socket."""
        self._client.loop_write()

    def keep_alive(self) -> None:
        """Ping, or give up, where that is due; called every second or so."""
        self._client.loop_misc()

    def close(self) -> None:
        """Cut the connection, unless it was ended."""
        if (sock := self.sock) is not None:
            sock.close()
        # Else we and paho's client hold each other, until Python looks for such: of thousands that takes it seconds.
        client = self._client
        client.on_connect = client.on_subscribe = client.on_message = client.on_publish = client.on_disconnect = None
        client.user_data_set(None)

    def _properties(self, packet: int, **values: object) -> Properties | None:
        """Those that are not None, by their names in the specification. None where there are none, or no MQTT 5."""
        given = {name: value for name, value in values.items() if value is not None}
        if not given or not self._speaks_5:
            return None
        properties = Properties(packet)  # type: ignore[no-untyped-call]  # paho has no types for it
        for name, value in given.items():
            setattr(properties, name, value)
        return properties

    def _on_message(self, _client: Client, hearer: Hearer, message: MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError as error:
            raise violation(f"a topic that is no text ({error})", "UTF-8") from None
        # amqtt sends a new client the retained messages of everybody's subscriptions.
        subscription = next((each for each in self._subscriptions if topic_matches_sub(each, topic)), None)
        if subscription is not None:
            # One byte too many is kept, so that its reader sees that it is too long; 256 MB of them are not.
            payload = bytes(message.payload[: MAX_PAYLOAD_BYTES + 1])
            heard = Message(topic, payload, message.qos, message.retain, *extras(message.properties))
            hearer.on_message(subscription, heard)

    def _on_disconnect(
        self, _client: Client, hearer: Hearer, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        error = self._trouble.error
        if flags.is_disconnect_packet_from_server:
            cause = said(reason, properties)
        else:  # paho's reason for an end of the stream is none
            cause = str(error or reason).replace("Unspecified error", "the broker hung up")
        hearer.on_end(cause, error)


class _BulkClient(Client):
    """Whose socket takes out publications."""

    def _create_socket(self) -> Any:
        """The one place where paho lets anybody come between it and its socket."""
        return BulkSocket(super()._create_socket(), has_properties=self._protocol == MQTTProtocolVersion.MQTTv5)


def _on_connect(
    _client: Client, hearer: Hearer, _flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
) -> None:
    refusal = said(reason, properties) if reason.is_failure else None
    hearer.on_connack(refusal, str(reason) != "Unsupported protocol version", BrokerLimits.of(properties))


def _on_subscribe(
    _client: Client, hearer: Hearer, packet_id: int, reasons: list[ReasonCode], _properties: Properties | None
) -> None:
    hearer.on_suback(packet_id, [str(reason) if reason.is_failure else None for reason in reasons])


def _on_publish(
    _client: Client, hearer: Hearer, packet_id: int, reason: ReasonCode, properties: Properties | None
) -> None:
    hearer.on_puback(packet_id, said(reason, properties) if reason.is_failure else None)


CONNECT_TIMEOUT_S = 5.0
IN_FLIGHT = 20  # messages handed to paho and not yet acknowledged
_MAX_PACKET_BYTES = 4 * MAX_PAYLOAD_BYTES  # what is longer a broker that speaks MQTT 5 does not send a board
_UNACKNOWLEDGED = 1000  # messages that a broker has under way to whoever takes in many


class Connection:
    """Belongs to one thread: it calls `open`, then `turn` while `alive`, and `close` in any case.

    `outcome` says in words how far it has come, `answer` what became of the version it speaks. `admitted_at` is the
    monotonic time at which the broker had taken us and our subscriptions. A byte in `wakee` ends a turn; `hear` gets
    what arrives, with its subscription; where there is an intake, that gets all of it instead. Without a wakee there
    are no turns: who waits for many connections at once waits for their `sock`, and calls `handle`.

    session_s: for so long the broker keeps what comes for us after the connection, by MQTT 3.1.1 for as long as it
    pleases; and until the intake's reader has settled what came, it stays unacknowledged. 0: nothing outlasts us.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        version: Version,
        client_id: str,
        subscriptions: Sequence[str],
        will: Message | None,
        hear: Callable[[str, Message], None],
        wakee: socket.socket | None,
        intake: ReceiveQueue | None = None,
        session_s: int = 0,
    ) -> None:
        self.outcome = "not tried yet"
        self.answer: Answer = "unasked"
        self.admitted_at: float | None = None
        self.in_flight = InFlight(IN_FLIGHT)
        self._endpoint = endpoint
        # The broker publishes a delayed will no later than at the session's end (section 3.1.3.2.2).
        will_delay_s = endpoint.will_delay_s if version == "5" and will is not None else 0
        self._session_ends = bool(will_delay_s) and not session_s  # with a goodbye
        self._is_board = will is not None
        self._limits = BrokerLimits()
        self._subscriptions = subscriptions
        self._subscribing: int | None = None  # the message id of the SUBSCRIBE that waits for its answer
        self._answer_by = math.inf
        self._hear = hear
        self._wakee = wakee
        self._taking_in = PubackPolicy(intake, holds=session_s > 0) if intake is not None else None
        self._selector = selectors.DefaultSelector() if wakee is not None else None
        self._client = PahoClient(
            endpoint,
            version,
            client_id,
            self,
            will=will,
            will_delay_s=will_delay_s,
            session_s=max(session_s, will_delay_s),
            in_flight=IN_FLIGHT,
            connect_s=CONNECT_TIMEOUT_S,
            bulk=self._taking_in is not None,
        )

    @property
    def alive(self) -> bool:
        """Whether there is still a socket."""
        return self.sock is not None

    @property
    def sock(self) -> Any:
        """What a selector takes; None without a connection."""
        return self._client.sock

    @property
    def wants_write(self) -> bool:
        """Whether it waits until the socket takes more."""
        sock = self.sock
        return self._client.wants_write or (isinstance(sock, BulkSocket) and sock.wants_write)

    def open(self, password: str | None) -> None:
        """Reach the broker and introduce ourselves.

        Raises OSError, AgentError (`broker.tls`, `broker.websocket`), ConfigError (`mqtt.host`, `mqtt.tls`).
        """
        self.outcome = "no answer to CONNECT"
        # An operator asks for nothing: amqtt 0.12 refuses a version that comes without properties, else it waits.
        wishes: dict[str, int | None] = {}
        if self._is_board or self._taking_in is not None:
            wishes["MaximumPacketSize"] = _MAX_PACKET_BYTES
        if self._taking_in is not None:
            wishes["ReceiveMaximum"] = _UNACKNOWLEDGED
        self._client.connect(password, **wishes)
        self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S
        if (sock := self.sock) is not None:
            self.answer = "silence"
            if self._selector is not None and self._wakee is not None:
                self._selector.register(self._wakee, selectors.EVENT_READ)
                self._selector.register(sock, selectors.EVENT_READ)

    def turn(self, patience_s: float) -> None:
        """Wait for something to do, for at most `patience_s`, and do it.

        Raises AgentError (`broker.protocol`, `broker.silent`, `broker.port`, `broker.limits`), and whatever paho makes
        of broken packets.
        """
        if (sock := self.sock) is None or self._selector is None or self._wakee is None:
            return
        self._selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.wants_write else 0))
        ready = {
            key.fileobj: events for key, events in self._selector.select(0.0 if self.has_read_ahead else patience_s)
        }
        if self._wakee in ready:
            self._wakee.recv(4096)
        self.handle(ready.get(sock, 0))

    @property
    def has_read_ahead(self) -> bool:
        """Whether there is something to read that no selector sees."""
        # Only the sockets of TLS, and paho's for websockets, have `pending`.
        return bool(getattr(self.sock, "pending", int)())

    def handle(self, events: int) -> None:
        """Do what is due. events: of `selectors`, that the socket is ready for. Raises as `turn`."""
        if (sock := self.sock) is None:
            return
        if events & selectors.EVENT_READ or self.has_read_ahead:
            self._read(sock)
        if isinstance(sock, BulkSocket) and self._taking_in is not None:
            self._taking_in.advance(sock)
        if events & selectors.EVENT_WRITE:
            self._client.write()
        self._client.keep_alive()
        if time.monotonic() > min(self._answer_by, self.in_flight.answer_by):
            found = self.outcome if self.admitted_at is None else f"{len(self.in_flight)} messages unacknowledged"
            raise AgentError("broker.silent", found, "answers in time", "see the broker's log, or restart it")

    def send(self, message: Message, source: MessageSource) -> None:
        """Publish what was taken from `source`, which hears of its delivery.

        What the broker takes from nobody, for its length, is left out, and the source hears of that; so is a message of
        QoS 0 while the network has no room.
        """
        length = packet_bytes(message)
        if length > self._limits.packet_bytes:
            line = "mqtt=too_large topic=%s bytes=%d limit=%d remedy='the maximum packet size of the broker'"
            log.warning(line, message.topic, length, self._limits.packet_bytes)
            source.refused(message, for_good=True)
            return
        if not message.qos and self._client.wants_write:  # it would wait where nothing bounds what waits
            source.refused(message, for_good=False)
            return
        packet_id = self._client.publish(message, message.retain and self._limits.retains)
        if message.qos:
            self.in_flight.add(packet_id, message, source)

    def say_goodbye(self) -> None:
        """Disconnect, so that the will stays unsaid, and no session is left but one that was asked for."""
        self._client.disconnect(ends_session=self._session_ends)

    def close(self) -> None:
        """Cut the connection, unless a goodbye was said: then the broker publishes the will."""
        if self._selector is not None:
            self._selector.close()
        self._client.close()

    def _read(self, sock: Any) -> None:
        if self.answer == "silence" and isinstance(sock, (socket.socket, BulkSocket)) and self._endpoint.tls is None:
            with contextlib.suppress(ConnectionError):  # which paho is told again
                begin = sock.peek(5) if isinstance(sock, BulkSocket) else sock.recv(5, socket.MSG_PEEK)
                if (other := recognise(begin)) is not None:
                    self.answer = "unasked"
                    raise other
        self._client.read()

    def on_connack(self, refusal: str | None, speaks_version: bool, limits: BrokerLimits) -> None:
        """As PahoClient tells it; so are all `on_`."""
        self.answer = "spoken" if speaks_version else "refused"
        if refusal is not None:
            hint = "; set mqtt.protocol: auto" if self.answer == "refused" and self._endpoint.protocol == "5" else ""
            self.outcome = f"refused: {refusal}{hint}"
            return
        self._limits = limits
        self.in_flight.most = min(IN_FLIGHT, limits.in_flight)
        if limits.qos < 1:
            raise AgentError(
                "broker.limits", "a broker for QoS 0 alone", "QoS 1", "raise the maximum QoS of the broker"
            )
        if self._subscriptions:
            self.outcome = "no answer to SUBSCRIBE"
            self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S
            self._subscribing = self._client.subscribe(self._subscriptions)
        else:
            self._admit()

    def on_suback(self, packet_id: int, refusals: Sequence[str | None]) -> None:
        if packet_id != self._subscribing:
            raise violation("a SUBACK that nobody waits for", "one answer to each SUBSCRIBE")
        self._subscribing = None
        if len(refusals) != len(self._subscriptions):
            raise violation(f"a SUBACK with {len(refusals)} codes", f"{len(self._subscriptions)}")
        for topic, refusal in zip(self._subscriptions, refusals, strict=True):
            if refusal is not None:
                log.warning("mqtt=deaf topic=%s reason=%r remedy=%r", topic, refusal, "the broker's ACL")
        self._admit()

    def _admit(self) -> None:
        self.outcome = "connected"
        self.admitted_at = time.monotonic()
        self._answer_by = math.inf

    def on_message(self, subscription: str, message: Message) -> None:
        self._hear(subscription, message)

    def on_puback(self, packet_id: int, refusal: str | None) -> None:
        self.in_flight.acknowledge(packet_id, refusal)

    def on_end(self, cause: str, error: OSError | None) -> None:
        if error is not None and (told := tls.explained(error)) is not None:
            self.answer = "unasked"
            self.outcome = str(told)
        elif self.admitted_at is not None:
            self.outcome = f"connection lost: {cause}"
        elif not self.outcome.startswith("refused"):
            hint = "; a port for TLS wants mqtt.tls" if self._endpoint.tls is None and self.answer == "silence" else ""
            self.outcome += f", then the connection was lost: {cause}{hint}"
