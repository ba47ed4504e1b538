"""What goes wrong between us and a broker, in words for whoever has to mend it."""

from __future__ import annotations

import logging

from agent.errors import AgentError

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
