"""paho's client in the project's own terms: how it is built, called, and heard; the only file that imports paho.

It knows packets, and nothing of what follows from them: agent/connection.py leads the conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from agent import tls
from agent.broker_trouble import LastError, no_websocket, said, violation
from agent.bulk import BulkSocket
from agent.endpoint import Endpoint
from agent.errors import ConfigError
from agent.mqtt5 import Limits, Version, extras
from agent.publishing import Message
from agent.wire import MAX_PAYLOAD_BYTES

_PROTOCOLS = {"3.1.1": MQTTProtocolVersion.MQTTv311, "5": MQTTProtocolVersion.MQTTv5}


class Hearer(Protocol):
    """Whom the client tells what comes, while it is called. A refusal is in words; None: there is none."""

    def on_connack(self, refusal: str | None, speaks_version: bool, limits: Limits) -> None:
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
    hearer.on_connack(refusal, str(reason) != "Unsupported protocol version", Limits.of(properties))


def _on_subscribe(
    _client: Client, hearer: Hearer, packet_id: int, reasons: list[ReasonCode], _properties: Properties | None
) -> None:
    hearer.on_suback(packet_id, [str(reason) if reason.is_failure else None for reason in reasons])


def _on_publish(
    _client: Client, hearer: Hearer, packet_id: int, reason: ReasonCode, properties: Properties | None
) -> None:
    hearer.on_puback(packet_id, said(reason, properties) if reason.is_failure else None)
