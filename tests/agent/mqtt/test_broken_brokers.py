"""Brokers that break the protocol or fall silent: each costs a connection, none the client."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable

import pytest
from brokers import eventually, on_the_air, report
from fake_broker import FakeBroker, admit, packet_from, starve
from turned_clock import TurnedClock

from agent.common.timing import Backoff
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.contract.wire import MAX_PAYLOAD_BYTES
from agent.mqtt.client import Endpoint, MqttClient, SessionOptions
from agent.uplink.link import MqttLink

pytestmark = pytest.mark.usefixtures("no_thread_left")
TOPICS = Topics("fleet", "board")
BIRTH = Birth(agent_version="1.2.3")
AT_ONCE = Backoff(0.0, 0.0)
HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\n\r\n" + b"no MQTT here" * 4


def link_to(endpoint: Endpoint) -> contextlib.AbstractContextManager[MqttLink]:
    return on_the_air(endpoint, TOPICS, BIRTH)


def down(caplog: pytest.LogCaptureFixture, reason: str, times: int = 1) -> None:
    """Wait until so many connections have ended for this reason; the outcome is soon that of the next attempt."""
    line = re.compile(f"mqtt=down .*({reason})")
    eventually(lambda: sum(bool(line.match(record.getMessage())) for record in list(caplog.records)) == times)


def say(garbage: str) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(bytes.fromhex(garbage))


def admit_and_say(garbage: str) -> Callable[[socket.socket], None]:
    def act(connection: socket.socket) -> None:
        admit(connection)
        connection.sendall(bytes.fromhex(garbage))

    return act


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        pytest.param(
            lambda broker: admit(broker, b"\1" * 9), "broker.protocol: a SUBACK with 9 codes", id="long-suback"
        ),
        pytest.param(
            lambda broker: admit(broker, b"\1\1\x55"), "no answer to SUBSCRIBE, then|KeyError", id="unknown-code"
        ),
        pytest.param(
            say("9003 ffff 01"), "broker.protocol: a SUBACK without a SUBSCRIBE", id="suback-without-subscribe"
        ),
        pytest.param(admit_and_say("3004 0002 fffe"), "broker.protocol: a topic that is not text", id="topic-no-text"),
        pytest.param(admit_and_say("3004 00ff 6161"), "connection lost|error:", id="topic-cut-short"),
        pytest.param(lambda broker: broker.sendall(HTTP), "broker.port: a port for HTTP", id="http"),
        pytest.param(lambda broker: broker.close(), "no answer to CONNECT, then", id="hangs-up"),
    ],
)
def test_garbage_from_a_broker_ends_the_connection_and_not_the_client(
    misbehave: Callable[[socket.socket], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeBroker() as broker, link_to(broker.endpoint) as link:
        for times in (1, 2):
            with broker.connection() as connection:
                misbehave(connection)
                down(caplog, reason, times)
        with broker.connection() as connection:
            admit(connection)
            eventually(lambda: link.connected)
            assert link.outcome == "connected"


def test_a_payload_without_end_is_kept_as_far_as_it_can_be_read() -> None:
    """One byte more than a document may have, by which its reader refuses it."""
    with FakeBroker() as broker, link_to(broker.endpoint) as link, broker.connection() as connection:
        admit(connection)
        topic = TOPICS.command.encode()
        body = len(topic).to_bytes(2, "big") + topic + bytes(1 << 20)
        length = bytes([len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14])
        connection.sendall(b"\x30" + length + body)
        assert link.inbox.get(timeout=60.0).payload == bytes(MAX_PAYLOAD_BYTES + 1)
        link.close(timeout_s=0.0)


def test_an_error_of_our_own_ends_the_connection_and_not_the_client(caplog: pytest.LogCaptureFixture) -> None:
    divisors = [0, 1]

    def greet() -> None:
        assert 1 / divisors.pop(0)

    with (
        FakeBroker() as broker,
        MqttClient(broker.endpoint, "us", SessionOptions(greet=greet, backoff=Backoff(0.05, 0.2))) as client,
    ):
        with broker.connection() as connection:
            connection.sendall(bytes([0x20, 2, 0, 0]))
            down(caplog, "ZeroDivisionError")
        with broker.connection() as connection:
            connection.sendall(bytes([0x20, 2, 0, 0]))
            eventually(lambda: client.connected)
    assert "in greet" in caplog.text  # a bug comes with its traceback


def test_a_broker_that_acknowledges_nothing_is_left_and_gets_the_messages_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = TurnedClock()
    with FakeBroker() as broker, on_the_air(broker.endpoint, TOPICS, BIRTH, AT_ONCE, clock=clock) as link:
        report(link)
        for times in (1, 2):
            with broker.connection() as connection:
                admit(connection)
                published = [packet_from(connection) for _ in range(3)]  # birth, status, event
                assert b'"kind":"alarm"' in published[-1]
                starve(connection, clock)
                down(caplog, "broker.silent: 3 messages unacknowledged", times)
        link.close(timeout_s=0.0)


def test_a_broker_that_never_admits_us_is_left_and_starts_no_backoff_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock, backoff = TurnedClock(), Backoff(0.0, 0.0)
    monkeypatch.setattr(backoff, "reset", lambda: pytest.fail("it took a failure for a success"))
    with FakeBroker() as broker, on_the_air(broker.endpoint, TOPICS, BIRTH, backoff, clock=clock) as link:
        with broker.connection() as connection:
            starve(connection, clock)
            down(caplog, "broker.silent: no answer to CONNECT")
        with broker.connection() as connection:
            connection.sendall(bytes([0x20, 2, 0, 0]))
            packet_from(connection)  # SUBSCRIBE
            starve(connection, clock)
            down(caplog, "broker.silent: no answer to SUBSCRIBE")
        link.close(timeout_s=0.0)
