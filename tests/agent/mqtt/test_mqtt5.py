"""MQTT 5 where the broker speaks it: what it adds, and which limits it sets."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually, on_the_air, report, running_mosquitto
from child_link import child_on_the_air
from device import TOPICS
from fake_broker import FakeBroker, admit, packet_from
from mqtt_clients import connected, impatient, logged

from agent.contract.messages import Birth
from agent.mqtt.connection import packet_bytes
from agent.mqtt.message import Message

BIRTH = Birth(agent_version="1.2.3")
pytestmark = pytest.mark.usefixtures("no_thread_left")


@pytest.mark.broker
def test_mqtt_3_carries_no_properties(broker: RealBroker) -> None:
    with connected(broker.endpoint, "t") as hearer, connected(broker.endpoint) as speaker:
        speaker.publish(Message("t", b"?", expires_s=60, reply_to="a", correlation=b"7"))
        received = hearer.inbox.get(timeout=60.0)
    said = (60, "a", b"7") if broker.protocol == "5" else (None, None, None)
    assert (received.expires_s, received.reply_to, received.correlation) == said


# The will, and the session that it waits in.


@pytest.mark.broker
def test_a_board_that_is_soon_back_was_never_offline(mosquitto: RealBroker) -> None:
    patient = replace(mosquitto.endpoint, will_delay_s=20)
    with Watcher(mosquitto.endpoint) as watcher:
        with child_on_the_air(patient) as child:
            first = watcher.expect(TOPICS.status, state="degraded")
            child.send_signal(signal.SIGKILL)
        with connected(mosquitto.endpoint) as operator:
            operator.publish(Message(TOPICS.command, b"while it was away"))
        with child_on_the_air(patient) as child:
            second = watcher.expect(TOPICS.status, state="degraded")
            child.send_signal(signal.SIGSTOP)  # its socket stays open: the broker takes it for alive
            with on_the_air(patient, TOPICS, BIRTH) as link:
                third = watcher.expect(TOPICS.status, state="degraded")
                assert link.inbox.empty()  # the one before has had the command
            watcher.expect(TOPICS.status, state="offline", session=third["session"])
    assert len({status["session"] for status in (first, second, third)}) == 3
    states = [json.loads(message.payload)["state"] for message in watcher.seen if message.topic == TOPICS.status]
    assert states == ["degraded", "degraded", "degraded", "stopping", "offline"]


@pytest.mark.broker
def test_a_goodbye_ends_the_session(mosquitto: RealBroker) -> None:
    patient = replace(mosquitto.endpoint, will_delay_s=2)
    with Watcher(mosquitto.endpoint) as watcher:
        with on_the_air(patient, TOPICS, BIRTH) as link:
            eventually(lambda: link.connected)
        watcher.expect(TOPICS.status, state="offline")
        with connected(mosquitto.endpoint) as operator:
            operator.publish(Message(TOPICS.command, b"while it was away"))
        with on_the_air(patient, TOPICS, BIRTH) as link, connected(mosquitto.endpoint) as operator:
            eventually(lambda: link.connected)
            operator.publish(Message(TOPICS.command, b"now"))
            assert link.inbox.get(timeout=60.0).payload == b"now"


def test_the_outcome_names_another_client_of_the_same_name() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        admit(connection, b"\1", b"")
        connection.sendall(b"\xe0\x01\x8e")  # mosquitto 2.0.11 hangs up without a word
        eventually(
            lambda: client.outcome.startswith("connection lost: Session taken over; another client uses our name")
        )


# What the broker limits.


@pytest.mark.broker
def test_a_message_too_long_for_the_broker_is_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        running_mosquitto(tmp_path, "max_packet_size 2000") as broker,
        connected(broker.endpoint, "t") as hearer,
        connected(broker.endpoint) as speaker,
    ):
        fits = Message("t", bytes(1000), expires_s=60, reply_to="answers", correlation=b"7")
        fits = replace(fits, payload=bytes(2000 - packet_bytes(replace(fits, payload=bytes(1000))) + 1000))
        assert packet_bytes(fits) == 2000
        for payload in (fits.payload + b"1", bytes(10_000), fits.payload):
            speaker.publish(replace(fits, payload=payload))
        assert hearer.inbox.get(timeout=60.0).payload == fits.payload
        assert hearer.inbox.empty()
    lengths = [line.partition(" remedy=")[0] for line in logged(caplog, "mqtt=too_large")]
    assert lengths == [f"mqtt=too_large topic=t bytes={length} limit=2000" for length in (2001, 10_028)]
    assert not logged(caplog, "mqtt=down")


def test_no_more_is_in_flight_than_the_broker_takes() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        admit(connection, b"\1", b"\x21\x00\x02")  # a receive maximum of 2
        for number in range(5):
            client.publish(Message("t", str(number).encode()))
        waiting = [packet_from(connection), packet_from(connection)]
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(60.0)
        for _ in range(3):
            connection.sendall(b"\x40\x02" + waiting.pop(0)[4:6])
            waiting.append(packet_from(connection))
        client.close(timeout_s=0.0)


def test_a_broker_that_retains_nothing_gets_nothing_to_retain() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        admit(connection, b"\1", b"\x25\x00")
        client.publish(Message("t", b"state", retain=True))
        assert packet_from(connection)[0] == 0x32  # QoS 1, not retained
        client.close(timeout_s=0.0)


def test_a_broker_for_qos_0_alone_is_none_for_us() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        connection.sendall(bytes([0x20, 5, 0, 0, 2, 0x24, 0]))
        eventually(lambda: client.outcome.startswith("broker.limits: a broker that supports QoS 0 only"))


@pytest.mark.broker
def test_a_message_beyond_all_measure_does_not_reach_a_board(mosquitto: RealBroker) -> None:
    with on_the_air(mosquitto.endpoint, TOPICS, BIRTH) as link, connected(mosquitto.endpoint) as operator:
        eventually(lambda: link.connected)
        operator.publish(Message(TOPICS.command, bytes(1_000_000)))
        operator.publish(Message(TOPICS.command, b"after it"))
        assert link.inbox.get(timeout=60.0).payload == b"after it"


@pytest.mark.broker
def test_a_refused_topic_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite t/#\ntopic deny t/secret\n")
    with (
        running_mosquitto(tmp_path, f"acl_file {acl}") as broker,
        connected(broker.endpoint, "t/+") as hearer,
        connected(broker.endpoint) as speaker,
    ):
        for topic in ("t/secret", "t/secret", "t/end"):
            speaker.publish(Message(topic, b""))
        assert hearer.inbox.get(timeout=60.0).topic == "t/end"
    lines = logged(caplog, "mqtt=denied")
    assert lines == ["mqtt=denied topic=t/secret reason='Not authorized' remedy=\"the broker's ACL\""]


def test_a_row_that_the_broker_refuses_stays_in_the_outbox() -> None:
    with FakeBroker("5") as broker, on_the_air(broker.endpoint, TOPICS, BIRTH) as link:
        report(link)
        for code in (b"\x87", b""):
            with broker.connection() as connection:
                admit(connection, properties=b"")
                event = b""
                while b'"kind":"alarm"' not in event:  # after birth and status
                    event = packet_from(connection)
                packet_id = 3 + len(TOPICS.event)
                connection.sendall(bytes([0x40, 2 + len(code)]) + event[packet_id : packet_id + 2] + code)
        link.close(timeout_s=0.0)
