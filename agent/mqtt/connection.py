"""Drive one connection to an MQTT broker, from CONNECT until it ends.

A connection passes through these steps; each of the first three has CONNECT_TIMEOUT_S:

1. `Connection.open` reaches the broker, with TLS where it is configured, and sends CONNECT with the will.
2. The broker answers CONNACK. Its limits apply from here on. We send SUBSCRIBE.
3. The broker answers SUBACK: it has admitted us, and `admitted_at` is set.
4. Each `turn` moves messages. `InFlight` holds what we have published and the broker has not acknowledged (PUBACK).
5. The connection ends; `outcome` says why. The session returns to its sources what is still in flight.

This is the only module that imports paho. Its client runs without a thread of its own: `turn` or `handle` drive it. The
sections named here are those of OASIS MQTT Version 5.0.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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

from agent.common.clock import SYSTEM_CLOCK, Clock, Waker
from agent.common.errors import AgentError, ConfigError
from agent.common.timing import Backoff
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.acknowledgements import OrderedAcks, PendingAck
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.endpoint import explain as explain_tls_error
from agent.mqtt.message import Message, MessageSource
from agent.mqtt.receive_queue import Arrival, PubackPolicy, ReceiveQueue

log = logging.getLogger(__package__)

CONNECT_TIMEOUT_S = 5.0  # for each of: reaching the broker, its CONNACK, its SUBACK
ACKNOWLEDGE_TIMEOUT_S = 60.0  # between one acknowledgement and the next, while there is something to acknowledge
IN_FLIGHT = 20  # messages handed to paho and not yet acknowledged
INBOX_SIZE = 100  # messages, for each subscription
_MAX_PACKET_BYTES = 4 * MAX_PAYLOAD_BYTES  # a broker that speaks MQTT 5 sends a board nothing longer
_READ_AT_ONCE = 100  # messages, before any is acknowledged
_UNACKNOWLEDGED = 1000  # messages that a broker may have under way to a client with a receive queue
Version = Literal["5", "3.1.1"]
# How the broker reacted to the version in CONNECT:
#   none     CONNECT was not sent, or the failure has another reason than the version
#   silence  no CONNACK came
#   refused  CONNACK refused the version
#   spoken   CONNACK came in this version, whatever it says otherwise
VersionReply = Literal["none", "silence", "refused", "spoken"]
_TAKEN_OVER = "Session taken over"
_PROTOCOLS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}


@dataclass(frozen=True)
class SessionOptions:
    """Topics and messages of an MQTT session; the same for each of its connections.

    Args:
        subscriptions: Topic filters, at QoS 1. Each gets a bounded inbox of its own, so that a flood on one pushes
            nothing out of another.
        will: Called for each attempt to connect. The broker gets its message as the last will.
        greet: Called at the start of each connection, in the thread that drives it. It may publish; it must not wait.
        backoff: Delay between attempts to connect; None: the default Backoff.
        sources: Messages to publish, after all that `publish` was given. Call `wake` after filling one.
        recognise: By subscription, whether a message has room of its own. Such messages go into `reserved` instead of
            the subscription's inbox, so that a flood of others pushes none of them out, and the broker keeps each until
            it is confirmed. Called in the MQTT thread, for each message; it must be quick.
        receive_queue: Receives all messages, in the order of arrival, instead of the inboxes. While it is full, the
            broker waits.
        session_s: Seconds for which the broker keeps messages for us after a connection; 0: it keeps none. By MQTT
            3.1.1 a broker keeps them as long as it pleases. With a receive queue, messages are acknowledged only once
            the reader of the queue has confirmed them.
    """

    subscriptions: Sequence[str] = ()
    will: Callable[[], Message] | None = None
    greet: Callable[[], None] | None = None
    backoff: Backoff | None = None
    sources: Sequence[MessageSource] = ()
    recognise: Mapping[str, Callable[[bytes], bool]] = field(default_factory=dict)
    receive_queue: ReceiveQueue | None = None
    session_s: int = 0


class InFlight:
    """Messages of QoS 1 that were sent and not acknowledged: at most `most`, by packet id, the oldest first.

    `answer_by` is the monotonic time by which the broker has to acknowledge one more.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self.most = most
        self._clock = clock
        self.answer_by = math.inf
        self._sent: dict[int, tuple[Message, MessageSource]] = {}
        self._denied_topics: set[str] = set()

    def __len__(self) -> int:
        return len(self._sent)

    @property
    def has_room(self) -> bool:
        """True if one more may be sent."""
        return len(self._sent) < self.most

    def messages_from(self, source: MessageSource) -> list[Message]:
        """Return the messages that were popped from this source, the oldest first."""
        return [message for message, its_source in self._sent.values() if its_source is source]

    def add(self, packet_id: int, message: Message, source: MessageSource) -> None:
        """Note that a message was sent; `source` is notified of its delivery."""
        if not self._sent:
            self.answer_by = self._clock.monotonic_s() + ACKNOWLEDGE_TIMEOUT_S
        self._sent[packet_id] = message, source

    def acknowledge(self, packet_id: int, refusal: str | None) -> None:
        """Pass the broker's PUBACK to the message's source; a refusal is logged once for each topic.

        A source that keeps its messages sends a refused one again after a while.
        """
        if packet_id in self._sent:
            message, source = self._sent.pop(packet_id)
            if refusal is None:
                source.delivered(message)
            else:
                source.refused(message, for_good=False)
                if message.topic not in self._denied_topics:
                    self._denied_topics.add(message.topic)
                    log.warning("mqtt=denied topic=%s reason=%r remedy=%r", message.topic, refusal, "the broker's ACL")
        self.answer_by = self._clock.monotonic_s() + ACKNOWLEDGE_TIMEOUT_S if self._sent else math.inf


class _LastError(logging.Handler):
    """Keep the error that ended a connection: paho only logs it, to the logger that it is given, which is `logger`."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.logger = logging.Logger("paho", logging.ERROR)  # in no hierarchy: no other handler gets these records
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args if isinstance(record.args, tuple) else ()
        self.error = next((arg for arg in args if isinstance(arg, OSError)), self.error)


class Connection:
    """One connection, which belongs to one thread: call `open`, then `turn` while `alive`, and `close` in any case.

    `outcome` says in words how far the connection has come. `version_reply` is the broker's reaction to the version of
    MQTT. `admitted_at` is the monotonic time at which the broker had accepted us and our subscriptions.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        version: Version,
        client_id: str,
        options: SessionOptions,
        on_message: Callable[[str, Message, PendingAck], None],
        waker: Waker | None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Prepare a connection without reaching for the broker.

        Args:
            client_id: Our name at the broker; it ends an older connection of the same name.
            options: Those of the session. Of `will`, the message is taken now.
            on_message: Receives each message with its subscription, unless there is a receive queue. It is acknowledged
                once the PendingAck was released and the connection has had a turn.
            waker: Ends a `turn`. None: there are no turns; a caller that waits for many connections at once waits for
                their `sock`, and calls `handle`.
            clock: Measures the deadlines of the broker's answers.
        """
        self.outcome = "not tried yet"
        self.version_reply: VersionReply = "none"
        self.admitted_at: float | None = None
        self.in_flight = InFlight(IN_FLIGHT, clock)
        self._clock = clock
        self._endpoint = endpoint
        self._speaks_5 = version == "5"
        self._subscriptions = options.subscriptions
        will = options.will() if options.will is not None else None
        # The broker publishes a delayed will no later than at the session's end (section 3.1.3.2.2).
        will_delay_s = endpoint.will_delay_s if self._speaks_5 and will is not None else 0
        self._session_s = max(options.session_s, will_delay_s)
        self._goodbye_ends_session = bool(will_delay_s) and not options.session_s
        self._is_board = will is not None
        self._most_packet_bytes = math.inf  # this and the next line: what the broker accepts, as its CONNACK says
        self._may_retain = True
        self._subscribing: int | None = None  # the packet id of the SUBSCRIBE that waits for its answer
        self._answer_by = math.inf
        self._receive = on_message
        self._waker = waker
        queue = options.receive_queue
        self._selector = selectors.DefaultSelector() if waker is not None else None
        self._last_error = _LastError()
        self._client = self._new_client(client_id, will, will_delay_s, in_bulk=queue is not None)
        self._acks = OrderedAcks(self._client.ack)
        self._received = 0
        self._holds = bool(options.recognise)
        self._puback_policy = PubackPolicy(queue, options.session_s > 0, self._acks) if queue is not None else None

    def _new_client(self, client_id: str, will: Message | None, will_delay_s: int, in_bulk: bool) -> Client:
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id,
            clean_session=None if self._speaks_5 else not self._session_s,
            protocol=_PROTOCOLS["5" if self._speaks_5 else "3.1.1"],
            transport=self._endpoint.transport,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.ws_set_options(self._endpoint.websocket_path)
        client.enable_logger(self._last_error.logger)
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages = IN_FLIGHT
        client.on_connect = self._on_connect
        client.on_subscribe = self._on_subscribe
        client.on_message = self._on_bulk_message if in_bulk else self._on_message
        client.on_publish = self._on_publish
        client.on_disconnect = self._on_disconnect
        if will is not None:
            delay = self._properties(PacketTypes.WILLMESSAGE, WillDelayInterval=will_delay_s or None)
            client.will_set(will.topic, will.payload, will.qos, will.retain, delay)
        return client

    @property
    def alive(self) -> bool:
        """True if there is still a socket."""
        return self.sock is not None

    @property
    def sock(self) -> Any:
        """The socket, for a selector; None without a connection."""
        return self._client.socket()

    @property
    def wants_write(self) -> bool:
        """True if data waits until the socket accepts more."""
        return self._client.want_write()

    @property
    def has_read_ahead(self) -> bool:
        """True if there is something to read that no selector sees."""
        # Only the sockets of TLS, and paho's for websockets, have `pending`.
        return bool(getattr(self.sock, "pending", int)())

    def open(self, password: str | None) -> None:
        """Reach the broker and send CONNECT.

        Raises OSError, AgentError (`broker.tls`, `broker.websocket`), ConfigError (`mqtt.host`, `mqtt.tls`).
        """
        self.outcome = "no answer to CONNECT"
        # An operator sets no property: amqtt 0.12 refuses a version that comes without properties, else it waits.
        properties: dict[str, int] = {}  # by their names in MQTT 5, section 3.1.2.11
        if self._is_board or self._puback_policy is not None:
            properties["MaximumPacketSize"] = _MAX_PACKET_BYTES
        if self._puback_policy is not None:
            properties["ReceiveMaximum"] = _UNACKNOWLEDGED
        elif self._holds:  # no more than there is room for
            properties["ReceiveMaximum"] = INBOX_SIZE
        if self._session_s:
            properties["SessionExpiryInterval"] = self._session_s
        self._connect(password, properties)
        self._answer_by = self._clock.monotonic_s() + CONNECT_TIMEOUT_S
        if (sock := self.sock) is not None:
            self.version_reply = "silence"
            if self._selector is not None and self._waker is not None:
                self._selector.register(self._waker.socket, selectors.EVENT_READ)
                self._selector.register(sock, selectors.EVENT_READ)

    def _connect(self, password: str | None, properties: Mapping[str, int]) -> None:
        endpoint = self._endpoint
        if endpoint.username is not None:
            self._client.username_pw_set(endpoint.username, password)
        if endpoint.tls is not None:
            self._client.tls_set_context(endpoint.tls.context())
        address = endpoint.host, endpoint.port, endpoint.keepalive_s
        try:
            if self._speaks_5:
                requested = self._properties(PacketTypes.CONNECT, **properties)
                # A clean start would end the session that the previous connection has left, and publish its will.
                self._client.connect(*address, clean_start=not self._session_s, properties=requested)
            else:
                self._client.connect(*address)
        except WebsocketConnectionError as error:
            found = f"no websocket at {endpoint.websocket_path} of port {endpoint.port} ({error})"
            remedy = "correct mqtt.port and mqtt.websocket_path, or set mqtt.transport: tcp"
            raise AgentError("broker.websocket", found, "a listener for MQTT over websockets", remedy) from None
        except OSError as error:
            tls_error = explain_tls_error(error, in_handshake=True) if endpoint.tls is not None else None
            raise tls_error or error from None
        except ValueError as error:
            found = f"{endpoint.host!a} port {endpoint.port} ({error})"
            raise ConfigError("mqtt.host", found, "the name or the address of a host", "correct mqtt.host") from None

    def turn(self, wait_s: float) -> None:
        """Wait for something to do, for at most `wait_s`, and do it.

        Raises AgentError (`broker.protocol`, `broker.silent`, `broker.port`, `broker.limits`), and whatever paho makes
        of broken packets.
        """
        if (sock := self.sock) is None or self._selector is None or self._waker is None:
            return
        self._selector.modify(sock, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.wants_write else 0))
        ready = {key.fileobj: events for key, events in self._selector.select(0.0 if self.has_read_ahead else wait_s)}
        if self._waker.socket in ready:
            self._waker.clear()
        self.handle(ready.get(sock, 0))

    def handle(self, events: int) -> None:
        """Do what is due. events: for which the socket is ready, as in `selectors`. Raises as `turn`."""
        if (sock := self.sock) is None:
            return
        if events & selectors.EVENT_READ or self.has_read_ahead:
            self._read(sock)
        if self._puback_policy is not None:
            self._puback_policy.update()
        self._acks.send()
        if events & selectors.EVENT_WRITE:
            self._client.loop_write()
        self._client.loop_misc()  # pings the broker, or gives it up; has to be called every second or so
        if self._clock.monotonic_s() > min(self._answer_by, self.in_flight.answer_by):
            if self.admitted_at is None:
                found, limit_s = self.outcome, CONNECT_TIMEOUT_S
            else:
                found, limit_s = f"{len(self.in_flight)} messages unacknowledged", ACKNOWLEDGE_TIMEOUT_S
            remedy = "see the broker's log, or restart it"
            raise AgentError("broker.silent", found, f"an answer within {limit_s:g} s", remedy)

    def _read(self, sock: Any) -> None:
        if self.version_reply == "silence" and isinstance(sock, socket.socket) and self._endpoint.tls is None:
            with contextlib.suppress(ConnectionError):  # paho gets the same error below
                if (error := _wrong_port_error(sock.recv(5, socket.MSG_PEEK))) is not None:
                    self.version_reply = "none"
                    raise error
        received, most = -1, self._received + _READ_AT_ONCE
        while received < self._received < most and self.sock is not None:  # all messages that are there already
            received = self._received
            self._client.loop_read()

    def send(self, message: Message, source: MessageSource) -> None:
        """Publish what was popped from `source`, which is notified of its delivery.

        A message that is longer than the broker accepts is not sent, and neither is a message of QoS 0 while the
        network has no room; the source is notified of either.
        """
        length = packet_bytes(message)
        if length > self._most_packet_bytes:
            line = "mqtt=too_large topic=%s bytes=%d limit=%d remedy='the maximum packet size of the broker'"
            log.warning(line, message.topic, length, self._most_packet_bytes)
            source.refused(message, for_good=True)
            return
        if not message.qos and self._client.want_write():  # paho's queue for these is unbounded
            source.refused(message, for_good=False)
            return
        properties = self._properties(
            PacketTypes.PUBLISH,
            MessageExpiryInterval=message.expires_s,
            ResponseTopic=message.reply_to,
            CorrelationData=message.correlation,
        )
        retain = message.retain and self._may_retain
        packet_id = self._client.publish(message.topic, message.payload, message.qos, retain, properties).mid
        if message.qos:
            self.in_flight.add(packet_id, message, source)

    def say_goodbye(self) -> None:
        """Disconnect, so that the broker discards the will, and keeps a session only if one was requested."""
        expiry_s = 0 if self._goodbye_ends_session else None
        self._client.disconnect(properties=self._properties(PacketTypes.DISCONNECT, SessionExpiryInterval=expiry_s))

    def close(self) -> None:
        """Cut the connection, unless a goodbye was said: then the broker publishes the will."""
        if self._selector is not None:
            self._selector.close()
        if (sock := self.sock) is not None:
            sock.close()
        # Otherwise we and paho's client refer to each other until the garbage collector runs: seconds for thousands.
        client = self._client
        client.on_connect = client.on_subscribe = client.on_message = client.on_publish = client.on_disconnect = None

    def _properties(self, packet: int, **values: object) -> Properties | None:
        """Return the values that are not None as properties; None if there are none, or without MQTT 5."""
        given = {name: value for name, value in values.items() if value is not None}
        if not given or not self._speaks_5:
            return None
        properties = Properties(packet)  # type: ignore[no-untyped-call]  # paho has no types for it
        for name, value in given.items():
            setattr(properties, name, value)
        return properties

    # paho calls the following methods while it is driven, in the same thread. What they raise, `turn` raises.

    def _on_connect(
        self, _client: Client, _: object, _flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self.version_reply = "refused" if str(reason) == "Unsupported protocol version" else "spoken"
        if reason.is_failure:
            is_fixed = self.version_reply == "refused" and self._endpoint.protocol == "5"
            hint = "; set mqtt.protocol: auto" if is_fixed else ""
            self.outcome = f"refused: {_describe_reason(reason, properties)}{hint}"
            return
        # A broker's limits (section 3.2.2.3); one that speaks 3.1.1 states none.
        self.in_flight.most = min(IN_FLIGHT, getattr(properties, "ReceiveMaximum", IN_FLIGHT))
        self._most_packet_bytes = getattr(properties, "MaximumPacketSize", math.inf)
        self._may_retain = bool(getattr(properties, "RetainAvailable", True))
        if getattr(properties, "MaximumQoS", 2) < 1:
            found, expected = "a broker that supports QoS 0 only", "a broker that supports QoS 1"
            raise AgentError("broker.limits", found, expected, "raise the maximum QoS of the broker")
        if self._subscriptions:
            self.outcome = "no answer to SUBSCRIBE"
            self._answer_by = self._clock.monotonic_s() + CONNECT_TIMEOUT_S
            _, self._subscribing = self._client.subscribe([(topic, 1) for topic in self._subscriptions])
        else:
            self._admit()

    def _on_subscribe(
        self, _client: Client, _: object, packet_id: int, reasons: Sequence[ReasonCode], _properties: Properties | None
    ) -> None:
        if packet_id != self._subscribing:
            raise _protocol_error("a SUBACK without a SUBSCRIBE", "one answer to each SUBSCRIBE")
        self._subscribing = None
        if len(reasons) != len(self._subscriptions):
            raise _protocol_error(f"a SUBACK with {len(reasons)} codes", f"{len(self._subscriptions)}")
        for topic, reason in zip(self._subscriptions, reasons, strict=True):
            if reason.is_failure:
                log.warning("mqtt=deaf topic=%s reason=%r remedy=%r", topic, str(reason), "the broker's ACL")
        self._admit()

    def _admit(self) -> None:
        self.outcome = "connected"
        self.admitted_at = self._clock.monotonic_s()
        self._answer_by = math.inf

    def _on_message(self, _client: Client, _: object, message: MQTTMessage) -> None:
        self._received += 1
        topic = _topic_of(message)
        if (ack := self._acks.add(message.mid, message.qos)) is None:
            return
        # amqtt sends a new client the retained messages of everybody's subscriptions.
        subscription = next((each for each in self._subscriptions if topic_matches_sub(each, topic)), None)
        if subscription is None:
            ack.release()
        else:
            expires_s, reply_to, correlation = (
                getattr(message.properties, name, None)
                for name in ("MessageExpiryInterval", "ResponseTopic", "CorrelationData")
            )
            if not reply_to or set(reply_to) & set("+#"):  # no topic to publish on
                reply_to = None
            payload, qos = _payload_of(message), message.qos
            received = Message(topic, payload, qos, message.retain, expires_s, reply_to, correlation)
            self._receive(subscription, received, ack)

    def _on_bulk_message(self, _client: Client, _: object, message: MQTTMessage) -> None:
        assert self._puback_policy is not None
        self._received += 1
        arrival = Arrival(_topic_of(message).encode(), _payload_of(message), message.retain)
        self._puback_policy.receive(arrival, message.mid, message.qos)

    def _on_publish(
        self, _client: Client, _: object, packet_id: int, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self.in_flight.acknowledge(packet_id, _describe_reason(reason, properties) if reason.is_failure else None)

    def _on_disconnect(
        self, _client: Client, _: object, flags: DisconnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        error = self._last_error.error
        if error is not None and (tls_error := explain_tls_error(error)) is not None:
            self.version_reply = "none"
            self.outcome = str(tls_error)
            return
        if flags.is_disconnect_packet_from_server:
            cause = _describe_reason(reason, properties)
        else:  # paho reports the end of the stream as "Unspecified error"
            cause = str(error or reason).replace("Unspecified error", "the broker closed the connection")
        if self.admitted_at is not None:
            self.outcome = f"connection lost: {cause}"
        elif not self.outcome.startswith("refused"):
            is_plain = self._endpoint.tls is None and self.version_reply == "silence"
            hint = "; a port for TLS wants mqtt.tls" if is_plain else ""
            self.outcome += f", then the connection was lost: {cause}{hint}"


def _topic_of(message: MQTTMessage) -> str:
    try:
        return message.topic
    except UnicodeDecodeError as error:
        raise _protocol_error(f"a topic that is not text ({error})", "UTF-8") from None


def _payload_of(message: MQTTMessage) -> bytes:
    """Return the payload, or so much of it that its reader sees that it is too long; 256 MB are not kept."""
    return bytes(message.payload[: MAX_PAYLOAD_BYTES + 1])


def packet_bytes(message: Message) -> int:
    """Return the length of a message's PUBLISH packet (section 3.3)."""
    properties = 0 if message.expires_s is None else 5
    if message.reply_to is not None:
        properties += 3 + len(message.reply_to.encode())
    if message.correlation is not None:
        properties += 3 + len(message.correlation)
    packet_id = 2 if message.qos else 0
    rest = 2 + len(message.topic.encode()) + packet_id + _with_length(properties) + len(message.payload)
    return 1 + _with_length(rest)


def _with_length(length: int) -> int:
    """Return `length` plus the bytes of the variable byte integer that states it (section 1.5.5)."""
    digits = 1
    while length >= 1 << 7 * digits:
        digits += 1
    return digits + length


def _describe_reason(reason: object, properties: object) -> str:
    """Return a reason code's name, with the broker's own text in ASCII (it may be anything) and a likely cause."""
    text = getattr(properties, "ReasonString", "")
    description = f"{reason} ({text[:200]!a})" if text else str(reason)
    if str(reason) == _TAKEN_OVER:
        description += "; another client uses our name: do two boards have the same mqtt.fleet and mqtt.device, or two "
        description += "collectors the same --client-id?"
    return description


def _wrong_port_error(first_bytes: bytes) -> AgentError | None:
    """Return the error for a server that is no MQTT broker on TCP, by its first bytes (`broker.port`), or None."""
    if first_bytes.startswith(b"\x15\x03"):  # a TLS alert (RFC 8446, 5.1)
        found, remedy = "a port for TLS", "set mqtt.tls, or mqtt.port to the broker's port without TLS"
    elif first_bytes.startswith(b"HTTP/"):
        found, remedy = "a port for HTTP", "set mqtt.transport: websockets, or mqtt.port to the broker's port for TCP"
    else:
        return None
    return AgentError("broker.port", found, "a port for MQTT", remedy)


def _protocol_error(found: str, expected: str) -> AgentError:
    """Return the error for a broker that breaks the protocol (`broker.protocol`)."""
    return AgentError("broker.protocol", found, expected, "update the broker, or use another")
