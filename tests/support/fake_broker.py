"""A broker that sends the bytes of a test, for behaviour that no real broker shows on demand."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

from turned_clock import TurnedClock

from agent.mqtt.connection import CONNECT_TIMEOUT_S
from agent.mqtt.endpoint import Endpoint, Protocol


class FakeBroker:
    """A listening socket that accepts one connection after the other.

    context: with which it speaks TLS. protocol: that its clients are to speak.
    """

    def __init__(self, protocol: Protocol = "3.1.1", context: ssl.SSLContext | None = None) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(60.0)
        self._context = context
        self.endpoint = Endpoint("127.0.0.1", self._server.getsockname()[1], protocol=protocol)

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """The next client, its CONNECT taken and not yet answered."""
        with self.introduction() as (connection, _):
            yield connection

    @contextlib.contextmanager
    def introduction(self) -> Iterator[tuple[socket.socket, int]]:
        """The same, with the protocol level that the client wants to speak: 4 is MQTT 3.1.1."""
        connection, _ = self._server.accept()
        with connection if self._context is None else self._context.wrap_socket(connection, True) as speaking:
            speaking.settimeout(60.0)
            connect = packet_from(speaking)
            assert connect[0] == 0x10
            yield speaking, connect[7]


def starve(connection: socket.socket, clock: TurnedClock) -> None:
    """Answer nothing, and turn the clock until the client gives up."""
    connection.settimeout(0.05)
    with contextlib.suppress(ConnectionError):
        while True:
            clock.turn(CONNECT_TIMEOUT_S)
            with contextlib.suppress(TimeoutError):
                if not connection.recv(4096):
                    return


def packet_from(connection: socket.socket) -> bytes:
    """A whole packet: its type and flags, then all that follows its length."""
    kind = connection.recv(1)
    length = shift = 0
    while True:
        (digit,) = connection.recv(1)
        length += (digit & 127) << shift
        shift += 7
        if digit < 128:
            return kind + _exactly(connection, length)


def admit(connection: socket.socket, codes: bytes | None = None, properties: bytes | None = None) -> None:
    """Answer CONNECT and SUBSCRIBE with `codes`; None grants all. properties: as in `publish`, of the CONNACK."""
    counted = b"" if properties is None else bytes([len(properties)]) + properties
    connection.sendall(bytes([0x20, 2 + len(counted), 0, 0]) + counted)
    subscribe = packet_from(connection)
    assert subscribe[0] == 0x82
    none = b"" if properties is None else b"\0"
    if codes is None:
        codes = b"\1" * _subscriptions(subscribe[3 + len(none) :])
    connection.sendall(bytes([0x90, 2 + len(none) + len(codes)]) + subscribe[1:3] + none + codes)


def _subscriptions(filters: bytes) -> int:
    """How many there are in a SUBSCRIBE without properties."""
    count = 0
    while filters:
        filters = filters[2 + int.from_bytes(filters[:2], "big") + 1 :]
        count += 1
    return count


def publish(topic: str, payload: bytes, properties: bytes | None = None) -> bytes:
    """A PUBLISH of QoS 0, of at most 127 bytes. properties: of MQTT 5, packed; None: MQTT 3.1.1."""
    counted = b"" if properties is None else bytes([len(properties)]) + properties
    body = len(topic).to_bytes(2, "big") + topic.encode() + counted + payload
    assert len(body) < 128
    return bytes([0x30, len(body)]) + body


def _exactly(connection: socket.socket, length: int) -> bytes:
    """MSG_WAITALL is nothing that TLS knows."""
    received = b""
    while len(received) < length:
        more = connection.recv(length - len(received))
        assert more, "the client has hung up"
        received += more
    return received
