"""Decide which version of MQTT a broker speaks, what it accepts, and put its errors into words.

`Negotiation` chooses between MQTT 5 and 3.1.1 (OASIS MQTT Version 5.0; the sections named here are its). `BrokerLimits`
holds what the broker's CONNACK allows. The functions at the end make an AgentError, or a text, of what a broker does.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from agent.common.errors import AgentError
from agent.mqtt.endpoint import Protocol
from agent.mqtt.message import Message

Version = Literal["5", "3.1.1"]
# How the broker reacted to the version in CONNECT:
#   none     CONNECT was not sent, or the failure has another reason than the version
#   silence  no CONNACK came
#   refused  CONNACK refused the version
#   spoken   CONNACK came in this version, whatever it says otherwise
VersionReply = Literal["none", "silence", "refused", "spoken"]
_HINTS = 2  # so many connections by 3.1.1, each after silence to 5, show that the broker does not speak 5
_TAKEN_OVER = "Session taken over"


class Negotiation:
    """Which version the next connection speaks: 5, until the broker has shown that it does not.

    1. A broker that refuses the version does not speak it: 3.1.1 from now on.
    2. Other brokers hang up (RabbitMQ before 3.13), or wait for more (amqtt 0.12, which reads the properties as the
       client's name). Then 3.1.1 is tried once; after that has helped twice, 3.1.1 is kept. Once may have been the
       network.
    3. A broker that has spoken MQTT 5 before falls back only if it refuses the version.
    """

    def __init__(self, wish: Protocol) -> None:
        self.version: Version = "3.1.1" if wish == "3.1.1" else "5"
        self.fell_back = False  # with the latest connection: the next one is due at once
        self._open = wish == "auto"
        self._spoken = False
        self._hints = 0

    def learn(self, reply: VersionReply, admitted: bool) -> None:
        """Choose the next version after a connection has ended. admitted: whether the broker accepted us."""
        self.fell_back = False
        if not self._open:
            return
        if self.version == "5":
            self._spoken = self._spoken or reply == "spoken"
            self.fell_back = reply == "refused" or (reply == "silence" and not self._spoken)
            if self.fell_back:
                self.version = "3.1.1"
                self._open = reply != "refused"
        else:
            self._hints += admitted
            if self._hints >= _HINTS:
                self._open = False
            else:
                self.version = "5"


@dataclass(frozen=True)
class BrokerLimits:
    """What a broker accepts (section 3.2.2.3). By MQTT 3.1.1 it does not say: the defaults hold."""

    packet_bytes: float = math.inf
    in_flight: int = 65535
    qos: int = 2
    retains: bool = True

    @classmethod
    def from_connack(cls, properties: object) -> BrokerLimits:
        """Read the properties of a CONNACK, each an attribute by its name in the specification."""
        return cls(
            getattr(properties, "MaximumPacketSize", math.inf),
            getattr(properties, "ReceiveMaximum", 65535),
            getattr(properties, "MaximumQoS", 2),
            bool(getattr(properties, "RetainAvailable", True)),
        )


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


def parse_properties(properties: object) -> tuple[int | None, str | None, bytes | None]:
    """Return expires_s, reply_to and correlation of a received message; a reply_to with wildcards is left out."""
    reply_to = getattr(properties, "ResponseTopic", None)
    if not reply_to or set(reply_to) & set("+#"):
        reply_to = None
    return getattr(properties, "MessageExpiryInterval", None), reply_to, getattr(properties, "CorrelationData", None)


class LastError(logging.Handler):
    """Keep the error that ended a connection: paho only logs it, to the logger that it is given, which is `logger`."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.logger = logging.Logger("paho", logging.ERROR)  # in no hierarchy: no other handler gets these records
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args if isinstance(record.args, tuple) else ()
        self.error = next((arg for arg in args if isinstance(arg, OSError)), self.error)


def describe_reason(reason: object, properties: object) -> str:
    """Return a reason code's name, with the broker's own text in ASCII (it may be anything) and a likely cause."""
    text = getattr(properties, "ReasonString", "")
    description = f"{reason} ({text[:200]!a})" if text else str(reason)
    if str(reason) == _TAKEN_OVER:
        description += "; another client has our name: do two boards have the same mqtt.fleet and mqtt.device, or two "
        description += "collectors the same --client-id?"
    return description


def wrong_port_error(first_bytes: bytes) -> AgentError | None:
    """Return the error for a server that is no MQTT broker on TCP, by its first bytes (`broker.port`), or None."""
    if first_bytes.startswith(b"\x15\x03"):  # a TLS alert (RFC 8446, 5.1)
        found, remedy = "a port for TLS", "set mqtt.tls, or mqtt.port to the broker's port without TLS"
    elif first_bytes.startswith(b"HTTP/"):
        found, remedy = "a port for HTTP", "set mqtt.transport: websockets, or mqtt.port to the broker's port for TCP"
    else:
        return None
    return AgentError("broker.port", found, "one for MQTT", remedy)


def websocket_error(path: str, port: int, error: OSError) -> AgentError:
    """Return the error for a server that accepts no websocket (`broker.websocket`)."""
    remedy = "correct mqtt.port and mqtt.websocket_path, or set mqtt.transport: tcp"
    found = f"no websocket at {path} of port {port} ({error})"
    return AgentError("broker.websocket", found, "a listener for MQTT over websockets", remedy)


def protocol_error(found: str, expected: str) -> AgentError:
    """Return the error for a broker that breaks the protocol (`broker.protocol`)."""
    return AgentError("broker.protocol", found, expected, "update the broker, or use another")
