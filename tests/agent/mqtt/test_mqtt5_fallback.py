"""Negotiation with a broker that does not speak MQTT 5."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from brokers import Amqtt, eventually, on_the_air
from device import TOPICS
from fake_broker import FakeBroker, admit, starve
from mqtt_clients import impatient, logged
from turned_clock import TurnedClock

from agent.contract.messages import Birth
from agent.mqtt import connection as connection_module
from agent.mqtt.client import Negotiation
from agent.mqtt.endpoint import Endpoint

BIRTH = Birth(agent_version="1.2.3")
pytestmark = pytest.mark.usefixtures("no_thread_left")


def hang_up(connection: socket.socket, _: TurnedClock) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def say(answer: str) -> Callable[[socket.socket, TurnedClock], None]:
    return lambda connection, _: connection.sendall(bytes.fromhex(answer))


ANSWERS = [
    pytest.param(say("20020001"), id="refuses-in-3.1.1"),
    pytest.param(say("2003008400"), id="refuses-in-5"),
    pytest.param(say("20020000"), id="takes-it-for-3.1.1"),
    pytest.param(say("20020005"), id="not-authorized-in-3.1.1"),
    pytest.param(hang_up, id="hangs-up"),
    pytest.param(starve, id="silent"),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_broker_without_mqtt_5_gets_3_at_once(
    answer: Callable[[socket.socket, TurnedClock], None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    clock = TurnedClock()
    with (
        FakeBroker("auto") as broker,
        impatient(broker.endpoint, clock) as client,
        broker.introduction() as (connection, level),
    ):
        assert level == 5
        answer(connection, clock)
        with broker.introduction() as (second, level):
            assert level == 4
            admit(second, b"\1")
            assert client.wait_connected(60.0)
            client.close(timeout_s=0.0)
    assert len(logged(caplog, "mqtt=fallback")) == 1
    assert not logged(caplog, "mqtt=down")


@pytest.fixture(name="amqtt")
def unknown_amqtt() -> Iterator[Endpoint]:
    """An amqtt, for clients that do not know which version it speaks."""
    pytest.importorskip("amqtt", reason="pip install '.[demo]'")
    broker = Amqtt()
    broker.start()
    yield replace(broker.endpoint, protocol="auto")
    broker.stop()


@pytest.mark.broker
def test_amqtt_keeps_a_board_waiting(
    amqtt: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(connection_module, "CONNECT_TIMEOUT_S", 1.0)
    with on_the_air(amqtt, TOPICS, BIRTH) as link:
        eventually(lambda: link.connected)
    assert "broker.silent" in logged(caplog, "mqtt=fallback")[0]
    assert logged(caplog, "mqtt=up")[0].endswith("protocol=3.1.1")


def test_a_version_that_is_asked_for_by_name_is_all_that_is_tried() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        connection.sendall(bytes.fromhex("20020001"))
        eventually(lambda: client.outcome == "refused: Unsupported protocol version; set mqtt.protocol: auto")


def test_a_broker_that_refuses_us_by_mqtt_5_is_not_asked_again_by_3(caplog: pytest.LogCaptureFixture) -> None:
    with FakeBroker("auto") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        reason = b"\x1f\x00\x04no\x07!"  # a reason string, with what a terminal rings at
        connection.sendall(bytes([0x20, 3 + len(reason), 0, 0x87, len(reason)]) + reason)
        eventually(lambda: logged(caplog, "mqtt=down"))
        assert client.outcome == r"refused: Not authorized ('no\x07!')"
    assert len(logged(caplog, "mqtt=down")) == 1


def test_silence_has_to_be_explained_twice_by_the_version() -> None:
    negotiation = Negotiation("auto")
    for wins in (0, 1, 0, 2):
        assert negotiation.version == "5"
        negotiation.learn("silence", admitted=False)
        assert (negotiation.version, negotiation.fell_back) == ("3.1.1", True)
        negotiation.learn("spoken" if wins else "silence", admitted=wins > 0)
        assert not negotiation.fell_back
    assert negotiation.version == "3.1.1"


def test_a_broker_that_has_spoken_mqtt_5_may_fall_silent() -> None:
    negotiation = Negotiation("auto")
    negotiation.learn("spoken", admitted=True)
    for _ in range(3):
        negotiation.learn("silence", admitted=False)
        assert (negotiation.version, negotiation.fell_back) == ("5", False)
    negotiation.learn("refused", admitted=False)  # another broker, at the same address
    assert (negotiation.version, negotiation.fell_back) == ("3.1.1", True)
