"""MQTT over websockets, for firewalls that let nothing else through: the same as over TCP."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from brokers import (
    PROTOCOLS,
    Mosquitto,
    check_board_reports_and_obeys,
    eventually,
    free_port,
    running_mosquitto,
)
from certificates import Authority

from agent.common.timing import Backoff
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint, Protocol, TlsFiles

pytestmark = [pytest.mark.broker, pytest.mark.usefixtures("no_thread_left")]
# paho leaves the socket of a refused handshake to Python, which closes it with the exception.
left_to_python = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


@pytest.fixture(name="listener", params=["plain", "tls"])
def websocket_listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Mosquitto, Endpoint]]:
    """A mosquitto that listens for websockets, and how to reach it."""
    beside = f"listener {free_port()} 127.0.0.1"  # mosquitto 2.0 does not start with websockets alone (its issue 2578)
    settings, tls = ["protocol websockets"], None
    if request.param == "tls":
        authority = Authority(tmp_path)
        served = authority.issue("broker")
        settings += [f"cafile {authority.file}", f"certfile {served.certificate}", f"keyfile {served.key}"]
        tls = TlsFiles(ca_file=authority.file)
    with running_mosquitto(tmp_path, *settings, beside) as broker:
        yield broker, replace(broker.endpoint, transport="websockets", tls=tls)


@pytest.mark.parametrize("protocol", PROTOCOLS.values())
def test_a_board_reports_and_obeys(listener: tuple[Mosquitto, Endpoint], protocol: Protocol) -> None:
    check_board_reports_and_obeys(replace(listener[1], protocol=protocol))


@left_to_python
def test_a_websocket_to_a_port_for_tcp_is_refused_in_words(tmp_path: Path) -> None:
    with running_mosquitto(tmp_path) as broker:
        assert_refused(
            replace(broker.endpoint, transport="websockets"), "broker.websocket: no websocket at /mqtt of port"
        )


def assert_refused(endpoint: Endpoint, words: str) -> None:
    seldom = Backoff(3600.0, 3600.0, random.Random(7))
    with MqttClient(endpoint, "us", SessionOptions(backoff=seldom)) as client:
        eventually(lambda: client.outcome.startswith(words))
        client.close(timeout_s=0.0)
