"""The broker inside the process: reachable, deaf to slow clients, and clear about what it lacks."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest
from brokers import on_the_air

from agent.common.errors import AgentError
from agent.contract.messages import Birth
from agent.contract.topics import Topics
from agent.mqtt.client import Endpoint, MqttClient
from agent.mqtt.embedded_broker import EmbeddedBroker
from agent.mqtt.message import Message

TOPICS = Topics("fleet", "board")
BIRTH = Birth(agent_version="1.2.3")
pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.mark.broker
@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="needs mosquitto-clients")
def test_the_line_that_make_run_prints_works_with_the_embedded_broker() -> None:
    with EmbeddedBroker() as broker, on_the_air(Endpoint(broker.host, broker.port, protocol="3.1.1"), TOPICS, BIRTH):
        line = ["mosquitto_sub", "-p", str(broker.port), "-v", "-t", TOPICS.status, "-C", "1", "-W", "60"]
        seen = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout
    assert seen.startswith("tared/v1/fleet/board/status {")


def test_a_client_that_does_not_read_does_not_hold_up_the_embedded_broker() -> None:
    pytest.importorskip("amqtt")
    with socket.socket() as deaf, EmbeddedBroker() as broker:
        deaf.connect((broker.host, broker.port))
        deaf.sendall(bytes.fromhex("100d 00044d515454 04 02 003c 000164"))  # CONNECT as "d"
        deaf.sendall(bytes.fromhex("8206 0001 000123 00"))  # SUBSCRIBE to "#"
        assert deaf.recv(9, socket.MSG_WAITALL) == bytes.fromhex("20020000 9003000100")
        with MqttClient(Endpoint(broker.host, broker.port), "loud") as loud:
            for _ in range(100):
                loud.publish(Message("loud", bytes(100_000)))


def test_the_embedded_broker_names_its_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt.adapters", None)
    with pytest.raises(AgentError, match=r"broker\.missing: .*pip install '.\[demo\]'"), EmbeddedBroker():
        pytest.fail("it started")


def test_the_embedded_broker_names_a_taken_port() -> None:
    pytest.importorskip("amqtt")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AgentError, match=r"broker\.port"), EmbeddedBroker(port):
            pytest.fail("it started")
