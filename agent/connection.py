"""One connection to a broker, by MQTT 5 or 3.1.1, from the attempt to its end; the only file that imports paho.

Each has a paho client of its own, because paho would resend a status of the lost connection after the new
one's: what was not acknowledged is left in `in_flight`, for whoever connects next. The broker is not
trusted: what breaks the protocol, and silence where an answer is due, end the connection as an exception.
"""

from __future__ import annotations

import contextlib
import logging
import math
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

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

from agent import tls
from agent.broker_trouble import LastError, no_websocket, recognise, said
from agent.bulk import BulkSocket
from agent.endpoint import Endpoint
from agent.errors import AgentError, ConfigError
from agent.in_flight import InFlight
from agent.intake import Intake
from agent.mqtt5 import Answer, Limits, Version, extras, packet_bytes
from agent.publishing import Message, Source
from agent.wire import MAX_PAYLOAD_BYTES

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
IN_FLIGHT = 20  # messages handed to paho and not yet acknowledged
_MAX_PACKET_BYTES = 4 * MAX_PAYLOAD_BYTES  # what is longer a broker that speaks MQTT 5 does not send a board
_UNACKNOWLEDGED = 1000  # messages that a broker has under way to whoever takes in many
_PROTOCOLS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}


class Connection:
    """Belongs to one thread: it calls `open`, then `turn` while `alive`, and `close` in any case.

    `outcome` says in words how far it has come, `answer` what became of the version it speaks. `admitted_at` is the
    monotonic time at which the broker had taken us and our subscriptions. A byte in `wakee` ends a turn; `hear` gets
    what arrives, with its subscription; where there is an intake, that gets all of it instead. Without a wakee there
    are no turns: who waits for many connections at once waits for their `sock`, and calls `handle`.
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
        intake: Intake | None = None,
    ) -> None:
        self.outcome = "not tried yet"
        self.answer: Answer = "unasked"
        self.admitted_at: float | None = None
        self.in_flight = InFlight(IN_FLIGHT)
        self._endpoint = endpoint
        self._speaks_5 = version == "5"
        # The broker publishes a delayed will no later than at the session's end (section 3.1.3.2.2).
        self._session_s = endpoint.will_delay_s if self._speaks_5 and will is not None else 0
        self._is_board = will is not None
        self._limits = Limits()
        self._subscriptions = subscriptions
        self._subscribing: int | None = None  # the message id of the SUBSCRIBE that waits for its answer
        self._answer_by = math.inf
        self._hear = hear
        self._wakee = wakee
        self._intake = intake
        self._told_dropped = 0
        self._selector = selectors.DefaultSelector() if wakee is not None else None
        self._trouble = LastError()
        self._client = (Client if intake is None else _BulkClient)(
            CallbackAPIVersion.VERSION2,
            client_id,
            protocol=_PROTOCOLS[version],
            transport=endpoint.transport,
            reconnect_on_failure=False,
        )
        self._client.ws_set_options(endpoint.websocket_path)
        self._client.enable_logger(self._trouble.logger)
        self._client.connect_timeout = CONNECT_TIMEOUT_S
        self._client.max_inflight_messages = IN_FLIGHT
        self._client.on_connect = self._on_connect
        self._client.on_subscribe = self._on_subscribe
        self._client.on_message = self._on_message
        self._client.on_publish = self._on_publish
        self._client.on_disconnect = self._on_disconnect
        if will is not None:
            delayed = self._properties(PacketTypes.WILLMESSAGE, WillDelayInterval=self._session_s or None)
            self._client.will_set(will.topic, will.payload, will.qos, will.retain, delayed)

    @property
    def alive(self) -> bool:
        """Whether there is still a socket."""
        return self.sock is not None

    @property
    def sock(self) -> Any:
        """What a selector takes; None without a connection."""
        return self._client.socket()

    @property
    def wants_write(self) -> bool:
        """Whether it waits until the socket takes more."""
        sock = self.sock
        return self._client.want_write() or (isinstance(sock, BulkSocket) and sock.wants_write)

    def open(self, password: str | None) -> None:
        """Reach the broker and introduce ourselves.

        Raises OSError, AgentError (`broker.tls`, `broker.websocket`), ConfigError (`mqtt.host`, `mqtt.tls`).
        """
        endpoint = self._endpoint
        if endpoint.username is not None:
            self._client.username_pw_set(endpoint.username, password)
        if endpoint.tls is not None:
            self._client.tls_set_context(endpoint.tls.context())
        self.outcome = "no answer to CONNECT"
        try:
            self._connect()
        except WebsocketConnectionError as error:
            raise no_websocket(endpoint.websocket_path, endpoint.port, error) from None
        except OSError as error:
            told = tls.explained(error, in_handshake=True) if endpoint.tls is not None else None
            raise told or error from None
        except ValueError as error:
            found = f"{endpoint.host!a} port {endpoint.port} ({error})"
            raise ConfigError("mqtt.host", found, "a host that can be looked up", "correct mqtt.host") from None
        self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S
        if (sock := self._client.socket()) is not None:
            self.answer = "silence"
            if self._selector is not None and self._wakee is not None:
                self._selector.register(self._wakee, selectors.EVENT_READ)
                self._selector.register(sock, selectors.EVENT_READ)

    def _connect(self) -> None:
        where = self._endpoint.host, self._endpoint.port, self._endpoint.keepalive_s
        if self._speaks_5:
            # An operator asks for nothing: amqtt 0.12 refuses a version that comes without properties, else it waits.
            wishes = {"SessionExpiryInterval": self._session_s or None, "MaximumPacketSize": _MAX_PACKET_BYTES}
            wishes |= {} if self._intake is None else {"ReceiveMaximum": _UNACKNOWLEDGED}
            asks = self._is_board or self._intake is not None
            properties = self._properties(PacketTypes.CONNECT, **(wishes if asks else {}))
            # A clean start would end the session that the connection before has left, and with that publish its will.
            self._client.connect(*where, clean_start=not self._session_s, properties=properties)
        else:
            self._client.connect(*where)

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
        if isinstance(sock, BulkSocket) and self._intake is not None:
            self._take_in(sock, self._intake)
        if events & selectors.EVENT_WRITE:
            self._client.loop_write()
        self._client.loop_misc()
        if time.monotonic() > min(self._answer_by, self.in_flight.answer_by):
            found = self.outcome if self.admitted_at is None else f"{len(self.in_flight)} messages unacknowledged"
            raise AgentError("broker.silent", found, "answers in time", "see the broker's log, or restart it")

    def send(self, message: Message, source: Source) -> None:
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
        if not message.qos and self._client.want_write():  # it would wait where nothing bounds what waits
            source.refused(message, for_good=False)
            return
        properties = self._properties(
            PacketTypes.PUBLISH,
            MessageExpiryInterval=message.expires_s,
            ResponseTopic=message.reply_to,
            CorrelationData=message.correlation,
        )
        retain = message.retain and self._limits.retains
        info = self._client.publish(message.topic, message.payload, message.qos, retain, properties)
        if message.qos:
            self.in_flight.add(info.mid, message, source)

    def say_goodbye(self) -> None:
        """Disconnect, so that the will stays unsaid, and nothing of the session is left."""
        ended = {"SessionExpiryInterval": 0} if self._session_s else {}
        self._client.disconnect(properties=self._properties(PacketTypes.DISCONNECT, **ended))

    def close(self) -> None:
        """Cut the connection, unless a goodbye was said: then the broker publishes the will."""
        if self._selector is not None:
            self._selector.close()
        if (sock := self._client.socket()) is not None:
            sock.close()
        # Else we and paho's client hold each other, until Python looks for such: of thousands that takes it seconds.
        client = self._client
        client.on_connect = client.on_subscribe = client.on_message = client.on_publish = client.on_disconnect = None

    def _properties(self, packet: int, **values: object) -> Properties | None:
        """Those that are not None, by their names in the specification. None where there are none, or no MQTT 5."""
        given = {name: value for name, value in values.items() if value is not None}
        if not given or not self._speaks_5:
            return None
        properties = Properties(packet)  # type: ignore[no-untyped-call]  # paho has no types for it
        for name, value in given.items():
            setattr(properties, name, value)
        return properties

    def _read(self, sock: Any) -> None:
        if self.answer == "silence" and isinstance(sock, (socket.socket, BulkSocket)) and self._endpoint.tls is None:
            with contextlib.suppress(ConnectionError):  # which paho is told again
                begin = sock.peek(5) if isinstance(sock, BulkSocket) else sock.recv(5, socket.MSG_PEEK)
                if (other := recognise(begin)) is not None:
                    self.answer = "unasked"
                    raise other
        self._client.loop_read()

    def _take_in(self, bulk: BulkSocket, intake: Intake) -> None:
        """Hand over what came; the broker sends no more than it has under way before there is room for it."""
        if arrived := bulk.take():
            intake.put(arrived)
        bulk.has_room = intake.has_room
        if bulk.dropped > 2 * self._told_dropped:  # a flood is told each time that it has doubled
            log.warning("mqtt=no_room qos=0 dropped=%d", bulk.dropped)
            self._told_dropped = bulk.dropped
        with contextlib.suppress(OSError):  # which paho finds, too
            if bulk.has_room:
                bulk.acknowledge()
            bulk.flush()

    def _on_connect(
        self, client: Client, _user: Any, _flags: ConnectFlags, reason: ReasonCode, properties: Properties | None
    ) -> None:
        self.answer = "refused" if str(reason) == "Unsupported protocol version" else "spoken"
        if reason.is_failure:
            hint = "; set mqtt.protocol: auto" if self.answer == "refused" and self._endpoint.protocol == "5" else ""
            self.outcome = f"refused: {said(reason, properties)}{hint}"
            return
        self._limits = Limits.of(properties)
        self.in_flight.most = min(IN_FLIGHT, self._limits.in_flight)
        if self._limits.qos < 1:
            raise AgentError(
                "broker.limits", "a broker for QoS 0 alone", "QoS 1", "raise the maximum QoS of the broker"
            )
        if self._subscriptions:
            self.outcome = "no answer to SUBSCRIBE"
            self._answer_by = time.monotonic() + CONNECT_TIMEOUT_S
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
            self._hear(subscription, Message(topic, payload, message.qos, message.retain, *extras(message.properties)))

    def _on_publish(self, _client: Client, _user: Any, mid: int, reason: ReasonCode, props: Properties) -> None:
        self.in_flight.acknowledge(mid, said(reason, props) if reason.is_failure else None)

    def _on_disconnect(
        self, _client: Client, _user: Any, flags: DisconnectFlags, reason: ReasonCode, props: Properties | None
    ) -> None:
        error = self._trouble.error
        told = tls.explained(error) if error is not None else None
        if flags.is_disconnect_packet_from_server:
            cause = said(reason, props)
        else:  # paho's reason for an end of the stream is none
            cause = str(error or reason).replace("Unspecified error", "the broker hung up")
        if told is not None:
            self.answer = "unasked"
            self.outcome = str(told)
        elif self.admitted_at is not None:
            self.outcome = f"connection lost: {cause}"
        elif not self.outcome.startswith("refused"):
            hint = "; a port for TLS wants mqtt.tls" if self._endpoint.tls is None and self.answer == "silence" else ""
            self.outcome += f", then the connection was lost: {cause}{hint}"


class _BulkClient(Client):
    """Whose socket takes out publications."""

    def _create_socket(self) -> Any:
        """The one place where paho lets anybody come between it and its socket."""
        return BulkSocket(super()._create_socket(), has_properties=self._protocol == MQTTProtocolVersion.MQTTv5)


def _violation(found: str, expected: str) -> AgentError:
    return AgentError("broker.protocol", found, expected, "update the broker, or use another")
