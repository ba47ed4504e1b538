"""MQTT 5 where the broker speaks it: what it adds, which limits it sets; and how a broker without it is found out."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from brokers import Amqtt, RealBroker, Watcher, eventually, on_the_air, report, running_mosquitto
from child_link import child_on_the_air
from fake_broker import FakeBroker, admit, packet_from, publish

from agent import connection as connection_module
from agent.backoff import Backoff
from agent.endpoint import Endpoint, Protocol
from agent.messages import Birth
from agent.mqtt import MqttClient
from agent.mqtt5 import Negotiation, packet_bytes
from agent.publishing import Message
from agent.topics import Topics

TOPICS = Topics("fleet", "board")
BIRTH = Birth(agent_version="1.2.3")
pytestmark = pytest.mark.usefixtures("no_thread_left")
SELDOM = 3600.0  # seconds: a client that waits for its backoff fails the test


def client_of(endpoint: Endpoint, *subscriptions: str, name: str = "") -> MqttClient:
    return MqttClient(endpoint, name or uuid.uuid4().hex, subscriptions=subscriptions, backoff=Backoff(0.05, 0.2))


@contextlib.contextmanager
def connected(endpoint: Endpoint, *subscriptions: str, name: str = "") -> Iterator[MqttClient]:
    with client_of(endpoint, *subscriptions, name=name) as client:
        assert client.wait_connected(10.0), client.outcome
        yield client


def impatient(endpoint: Endpoint) -> MqttClient:
    """A client that is connected at once or never."""
    return MqttClient(endpoint, "us", subscriptions=["t"], backoff=Backoff(SELDOM, SELDOM, random.Random(7)))


def told(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if message.startswith(start)]


@pytest.mark.broker
@pytest.mark.parametrize(("wish", "spoken"), [("auto", "5"), ("5", "5"), ("3.1.1", "3.1.1")])
def test_the_version_is_told(
    mosquitto: RealBroker, wish: Protocol, spoken: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with connected(replace(mosquitto.endpoint, protocol=wish)):
        pass
    assert told(caplog, "mqtt=up") == [f"mqtt=up host=127.0.0.1 port={mosquitto.port} protocol={spoken}"]


@pytest.mark.broker
def test_an_answer_finds_who_asked(mosquitto: RealBroker) -> None:
    with connected(mosquitto.endpoint, "answers/a") as asker, connected(mosquitto.endpoint, "questions") as answerer:
        asker.publish(Message("questions", b"?", reply_to="answers/a", correlation=b"\x00\xff7"))
        question = answerer.inbox.get(timeout=10.0)
        assert (question.reply_to, question.correlation) == ("answers/a", b"\x00\xff7")
        answerer.publish(Message(question.reply_to, b"!", correlation=question.correlation))
        assert asker.inbox.get(timeout=10.0) == Message("answers/a", b"!", correlation=b"\x00\xff7")


@pytest.mark.broker
def test_what_mqtt_3_cannot_say_stays_unsaid(broker: RealBroker) -> None:
    with connected(broker.endpoint, "t") as hearer, connected(broker.endpoint) as speaker:
        speaker.publish(Message("t", b"?", expires_s=60, reply_to="a", correlation=b"7"))
        heard = hearer.inbox.get(timeout=10.0)
    said = (60, "a", b"7") if broker.protocol == "5" else (None, None, None)
    assert (heard.expires_s, heard.reply_to, heard.correlation) == said


@pytest.mark.broker
def test_the_broker_drops_what_has_expired(mosquitto: RealBroker) -> None:
    with connected(mosquitto.endpoint) as speaker:
        speaker.publish(Message("t/a", b"1", retain=True, expires_s=1))
        speaker.publish(Message("t/b", b"2", retain=True))

    def first_retained() -> str:
        with connected(mosquitto.endpoint, "t/#") as hearer:
            return hearer.inbox.get(timeout=10.0).topic

    assert first_retained() == "t/a"
    eventually(lambda: first_retained() == "t/b")


def test_a_response_topic_that_takes_no_answer_is_none() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        admit(connection, b"\1", b"")
        for topic in (b"a/#", b"+", b""):
            connection.sendall(publish("t", b"?", b"\x08" + len(topic).to_bytes(2, "big") + topic))
            assert client.inbox.get(timeout=10.0).reply_to is None
        client.close(timeout_s=0.0)


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
def test_the_broker_keeps_commands_for_a_board_that_is_soon_back(mosquitto: RealBroker) -> None:
    patient = replace(mosquitto.endpoint, will_delay_s=20)
    with Watcher(mosquitto.endpoint) as watcher:
        with child_on_the_air(patient) as child:
            watcher.expect(TOPICS.status, state="degraded")
            child.send_signal(signal.SIGKILL)
        with connected(mosquitto.endpoint) as operator:
            operator.publish(Message(TOPICS.command, b"while it was away"))
        with on_the_air(patient, TOPICS, BIRTH) as link:
            assert link.inbox.get(timeout=10.0).payload == b"while it was away"


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
            assert link.inbox.get(timeout=10.0).payload == b"now"


def test_two_boards_of_one_name_are_told_so() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        admit(connection, b"\1", b"")
        connection.sendall(b"\xe0\x01\x8e")  # mosquitto 2.0.11 hangs up without a word
        eventually(
            lambda: client.outcome.startswith("connection lost: Session taken over; another client has our name")
        )


# What the broker limits.


@pytest.mark.broker
def test_what_is_too_long_for_the_broker_is_told_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
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
        assert hearer.inbox.get(timeout=10.0).payload == fits.payload
        assert hearer.inbox.empty()
    lengths = [line.partition(" remedy=")[0] for line in told(caplog, "mqtt=too_large")]
    assert lengths == [f"mqtt=too_large topic=t bytes={length} limit=2000" for length in (2001, 10_028)]
    assert not told(caplog, "mqtt=down")


def test_no_more_is_in_flight_than_the_broker_takes() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        admit(connection, b"\1", b"\x21\x00\x02")  # a receive maximum of 2
        for number in range(5):
            client.publish(Message("t", str(number).encode()))
        waiting = [packet_from(connection), packet_from(connection)]
        connection.settimeout(0.2)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        connection.settimeout(10.0)
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
        eventually(lambda: client.outcome.startswith("broker.limits: a broker for QoS 0 alone"))


@pytest.mark.broker
def test_a_message_beyond_all_measure_does_not_reach_a_board(mosquitto: RealBroker) -> None:
    with on_the_air(mosquitto.endpoint, TOPICS, BIRTH) as link, connected(mosquitto.endpoint) as operator:
        eventually(lambda: link.connected)
        operator.publish(Message(TOPICS.command, bytes(1_000_000)))
        operator.publish(Message(TOPICS.command, b"after it"))
        assert link.inbox.get(timeout=10.0).payload == b"after it"


@pytest.mark.broker
def test_what_the_broker_refuses_to_take_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite t/#\ntopic deny t/secret\n")
    with (
        running_mosquitto(tmp_path, f"acl_file {acl}") as broker,
        connected(broker.endpoint, "t/+") as hearer,
        connected(broker.endpoint) as speaker,
    ):
        for topic in ("t/secret", "t/secret", "t/end"):
            speaker.publish(Message(topic, b""))
        assert hearer.inbox.get(timeout=10.0).topic == "t/end"
    lines = told(caplog, "mqtt=denied")
    assert lines == ["mqtt=denied topic=t/secret reason='Not authorized' remedy=\"the broker's ACL\""]


def test_what_the_broker_refuses_to_take_stays_in_the_outbox() -> None:
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


# A broker that does not speak it.


def hang_up(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_RDWR)


def say(answer: str) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(bytes.fromhex(answer))


def keep_silent(connection: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        connection.recv(1)  # until the client gives up


ANSWERS = [
    pytest.param(say("20020001"), id="refuses-in-3.1.1"),
    pytest.param(say("2003008400"), id="refuses-in-5"),
    pytest.param(say("20020000"), id="takes-it-for-3.1.1"),
    pytest.param(say("20020005"), id="not-authorized-in-3.1.1"),
    pytest.param(hang_up, id="hangs-up"),
    pytest.param(keep_silent, id="silent"),
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_a_broker_without_mqtt_5_gets_3_at_once(
    answer: Callable[[socket.socket], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(connection_module, "CONNECT_TIMEOUT_S", 1.0)
    with (
        FakeBroker("auto") as broker,
        impatient(broker.endpoint) as client,
        broker.introduction() as (connection, level),
    ):
        assert level == 5
        answer(connection)
        with broker.introduction() as (second, level):
            assert level == 4
            admit(second, b"\1")
            assert client.wait_connected(10.0)
            client.close(timeout_s=0.0)
    assert len(told(caplog, "mqtt=fallback")) == 1
    assert not told(caplog, "mqtt=down")


@pytest.fixture(name="amqtt")
def unknown_amqtt() -> Iterator[Endpoint]:
    """An amqtt, for clients that do not know which version it speaks."""
    pytest.importorskip("amqtt", reason="pip install 'tared[demo]'")
    broker = Amqtt()
    broker.start()
    yield replace(broker.endpoint, protocol="auto")
    broker.stop()


@pytest.mark.broker
def test_amqtt_refuses_an_operator_at_once(amqtt: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    with impatient(amqtt) as client:
        assert client.wait_connected(3.0)
    assert "Unsupported protocol version" in told(caplog, "mqtt=fallback")[0]


@pytest.mark.broker
def test_amqtt_keeps_a_board_waiting(
    amqtt: Endpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(connection_module, "CONNECT_TIMEOUT_S", 1.0)
    with on_the_air(amqtt, TOPICS, BIRTH) as link:
        eventually(lambda: link.connected)
    assert "broker.silent" in told(caplog, "mqtt=fallback")[0]
    assert told(caplog, "mqtt=up")[0].endswith("protocol=3.1.1")


def test_a_version_that_is_asked_for_by_name_is_all_that_is_tried() -> None:
    with FakeBroker("5") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        connection.sendall(bytes.fromhex("20020001"))
        eventually(lambda: client.outcome == "refused: Unsupported protocol version; set mqtt.protocol: auto")


def test_a_broker_that_refuses_us_by_mqtt_5_is_not_asked_again_by_3(caplog: pytest.LogCaptureFixture) -> None:
    with FakeBroker("auto") as broker, impatient(broker.endpoint) as client, broker.connection() as connection:
        reason = b"\x1f\x00\x04no\x07!"  # a reason string, with what a terminal rings at
        connection.sendall(bytes([0x20, 3 + len(reason), 0, 0x87, len(reason)]) + reason)
        eventually(lambda: client.outcome == r"refused: Not authorized ('no\x07!')")
    assert len(told(caplog, "mqtt=down")) == 1


def test_a_refused_version_is_not_asked_for_again() -> None:
    negotiation = Negotiation("auto")
    negotiation.learn("refused", admitted=False)
    assert (negotiation.version, negotiation.fell_back) == ("3.1.1", True)
    negotiation.learn("silence", admitted=False)
    assert (negotiation.version, negotiation.fell_back) == ("3.1.1", False)


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


def test_a_failure_that_the_version_has_no_part_in_changes_nothing() -> None:
    negotiation = Negotiation("auto")
    negotiation.learn("unasked", admitted=False)
    assert (negotiation.version, negotiation.fell_back) == ("5", False)
