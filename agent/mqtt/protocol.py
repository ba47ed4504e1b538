"""What MQTT 5 adds to a connection (OASIS MQTT Version 5.0): which version is spoken, and what the broker takes."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

from agent.common.errors import AgentError
from agent.mqtt.endpoint import Protocol
from agent.mqtt.message import Message

Version = Literal["5", "3.1.1"]
# What CONNECT brought forth: nothing (it was not sent, or something else than the version explains the failure), no
# CONNACK, one that refuses the version, or one in this version, whatever it says.
Answer = Literal["unasked", "silence", "refused", "spoken"]
_HINTS = 2


class Negotiation:
    """Which version the next connection speaks: 5, until the broker has shown that it does not.

    Some brokers refuse the version, which settles it. Others hang up (RabbitMQ before 3.13), or wait for more (amqtt
    0.12, which takes the properties for the client's name): then 3.1.1 is tried, and settles it where that was of use
    twice; once may have been the network. A broker that has spoken MQTT 5 can only lose it by refusing it.
    """

    def __init__(self, wish: Protocol) -> None:
        self.version: Version = "3.1.1" if wish == "3.1.1" else "5"
        self.fell_back = False  # with the latest connection: the next is due at once
        self._open = wish == "auto"
        self._spoken = False
        self._hints = 0

    def learn(self, answer: Answer, admitted: bool) -> None:
        """What the connection that has ended tells. admitted: whether the broker took us."""
        self.fell_back = False
        if not self._open:
            return
        if self.version == "5":
            self._spoken = self._spoken or answer == "spoken"
            self.fell_back = answer == "refused" or (answer == "silence" and not self._spoken)
            if self.fell_back:
                self.version = "3.1.1"
                self._open = answer != "refused"
        else:
            self._hints += admitted
            if self._hints >= _HINTS:
                self._open = False
            else:
                self.version = "5"


@dataclass(frozen=True)
class BrokerLimits:
    """What a broker takes (section 3.2.2.3); by MQTT 3.1.1 it says nothing of that."""

    packet_bytes: float = math.inf
    in_flight: int = 65535
    qos: int = 2
    retains: bool = True

    @classmethod
    def of(cls, properties: object) -> BrokerLimits:
        """As in the properties of a CONNACK, each an attribute by its name in the specification."""
        return cls(
            getattr(properties, "MaximumPacketSize", math.inf),
            getattr(properties, "ReceiveMaximum", 65535),
            getattr(properties, "MaximumQoS", 2),
            bool(getattr(properties, "RetainAvailable", True)),
        )


def packet_bytes(message: Message) -> int:
    """How long its PUBLISH is (section 3.3)."""
    properties = 0 if message.expires_s is None else 5
    if message.reply_to is not None:
        properties += 3 + len(message.reply_to.encode())
    if message.correlation is not None:
        properties += 3 + len(message.correlation)
    packet_id = 2 if message.qos else 0
    rest = 2 + len(message.topic.encode()) + packet_id + _counted(properties) + len(message.payload)
    return 1 + _counted(rest)


def extras(properties: object) -> tuple[int | None, str | None, bytes | None]:
    """expires_s, reply_to and correlation of a message from its properties; no reply_to that takes no publication."""
    reply_to = getattr(properties, "ResponseTopic", None)
    if not reply_to or set(reply_to) & set("+#"):
        reply_to = None
    return getattr(properties, "MessageExpiryInterval", None), reply_to, getattr(properties, "CorrelationData", None)


def _counted(length: int) -> int:
    """So many bytes, with their number before them as a variable byte integer (section 1.5.5)."""
    digits = 1
    while length >= 1 << 7 * digits:
        digits += 1
    return digits + length


_TAKEN_OVER = "Session taken over"


class LastError(logging.Handler):
    """The error that ended a connection: paho swallows it, and tells its log alone, which `logger` is to be."""

    def __init__(self) -> None:
        super().__init__()
        self.error: OSError | None = None
        self.logger = logging.Logger("paho", logging.ERROR)  # in no hierarchy: nobody else hears it
        self.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        args = record.args if isinstance(record.args, tuple) else ()
        self.error = next((arg for arg in args if isinstance(arg, OSError)), self.error)


def said(reason: object, properties: object) -> str:
    """A reason code's name, what the broker adds to it (ASCII, for it may be anything), and what it may mean."""
    text = getattr(properties, "ReasonString", "")
    told = f"{reason} ({text[:200]!a})" if text else str(reason)
    if str(reason) == _TAKEN_OVER:
        told += "; another client has our name: do two boards have the same mqtt.fleet and mqtt.device, or two "
        told += "collectors the same --client-id?"
    return told


def recognise(start: bytes) -> AgentError | None:
    """The error for a server that is no MQTT broker on TCP, by its first bytes (`broker.port`); None for any other."""
    if start.startswith(b"\x15\x03"):  # a TLS alert (RFC 8446, 5.1)
        return _other_port("for TLS", "set mqtt.tls, or mqtt.port to the broker's port without TLS")
    if start.startswith(b"HTTP/"):
        return _other_port("for HTTP", "set mqtt.transport: websockets, or mqtt.port to the broker's port for TCP")
    return None


def no_websocket(path: str, port: int, error: OSError) -> AgentError:
    """The error for a server that takes us for no websocket (`broker.websocket`)."""
    remedy = "correct mqtt.port and mqtt.websocket_path, or set mqtt.transport: tcp"
    found = f"no websocket at {path} of port {port} ({error})"
    return AgentError("broker.websocket", found, "a listener for MQTT over websockets", remedy)


def violation(found: str, expected: str) -> AgentError:
    """The error for a broker that breaks the protocol (`broker.protocol`)."""
    return AgentError("broker.protocol", found, expected, "update the broker, or use another")


def _other_port(purpose: str, remedy: str) -> AgentError:
    return AgentError("broker.port", f"a port {purpose}", "one for MQTT", remedy)
