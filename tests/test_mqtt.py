"""The device on the air, against real brokers: presence, reconnection, queues, and a clean end."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually, free_port

from agent import connection as connection_module
from agent import mqtt as mqtt_module
from agent.backoff import Backoff
from agent.broker import EmbeddedBroker
from agent.errors import AgentError, ConfigError
from agent.link import MqttLink
from agent.messages import Birth, DeviceState, Event
from agent.mqtt import INBOX_SIZE, Endpoint, MqttClient
from agent.outbox import Message, Outbox
from agent.parsing import CommandRefused, parse_command
from agent.topics import Topics
from agent.wire import MAX_PAYLOAD_BYTES

TOPICS = Topics("fleet", "board")
BIRTH = Birth(agent_version="1.2.3", engine="abc")

CHILD = """
import sys, threading
from agent.link import MqttLink
from agent.messages import Birth
from agent.mqtt import Endpoint
from agent.topics import Topics
endpoint = Endpoint("127.0.0.1", int(sys.argv[1]))
with MqttLink(endpoint, Topics("fleet", "board"), Birth(agent_version="child")):
    threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def _no_thread_outlives_its_test() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    eventually(lambda: set(threading.enumerate()) <= before)


def link_to(endpoint: Endpoint) -> MqttLink:
    return MqttLink(endpoint, TOPICS, BIRTH, Backoff(first_s=0.05, cap_s=0.2))


def event(number: int) -> Event:
    return Event(epoch=1, seq=number, ts=0.0, kind="alarm")


@contextlib.contextmanager
def child_on_the_air(broker: RealBroker) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(broker.port)]) as child:
        try:
            yield child
        finally:
            child.kill()


@pytest.mark.broker
def test_birth_and_status_are_retained(broker: RealBroker) -> None:
    with link_to(broker.endpoint) as link:
        eventually(lambda: link.connected)
        with Watcher(broker.endpoint) as late:
            assert late.retained(TOPICS.birth)["engine"] == "abc"
            first = late.retained(TOPICS.status)
            assert first["state"] == "degraded"  # until somebody knows better
            link.set_state("online")
            late.expect(TOPICS.status, state="online", session=first["session"])


@pytest.mark.broker
def test_the_end_is_announced_after_all_that_was_queued(mosquitto: RealBroker) -> None:
    with Watcher(mosquitto.endpoint) as watcher:
        with link_to(mosquitto.endpoint) as link:
            first = watcher.expect(TOPICS.status, state="degraded")
            for number in range(60):  # three windows of unacknowledged messages
                link.send(event(number))
            link.set_state("stopping")  # as the supervisor does: the end does not say it again
        ends = [watcher.next() for _ in range(62)]
        assert [json.loads(end.payload)["seq"] for end in ends if end.topic == TOPICS.event] == list(range(60))
        states = [json.loads(end.payload) for end in ends if end.topic == TOPICS.status]
        assert [state["state"] for state in states] == ["stopping", "offline"]
        assert ends[-1].topic == TOPICS.status
        assert states[-1]["session"] == first["session"]
    assert not link.connected
    with Watcher(mosquitto.endpoint) as later:
        assert later.retained(TOPICS.status)["state"] == "offline"


@pytest.mark.broker
def test_a_killed_process_leaves_its_will(broker: RealBroker) -> None:
    with Watcher(broker.endpoint) as watcher, child_on_the_air(broker) as child:
        first = watcher.expect(TOPICS.status, state="degraded")
        child.send_signal(signal.SIGKILL)
        watcher.expect(TOPICS.status, state="offline", session=first["session"], boot_id=first["boot_id"])
    with Watcher(broker.endpoint) as later:
        assert later.retained(TOPICS.status)["state"] == "offline"


@pytest.mark.broker
def test_the_will_of_a_frozen_predecessor_does_not_bury_its_successor(mosquitto: RealBroker) -> None:
    with Watcher(mosquitto.endpoint) as watcher, child_on_the_air(mosquitto) as child:
        old = watcher.expect(TOPICS.status, state="degraded")
        child.send_signal(signal.SIGSTOP)  # its socket stays open: the broker takes it for alive
        with link_to(mosquitto.endpoint):
            watcher.expect(TOPICS.status, state="offline", session=old["session"])
            new = watcher.expect(TOPICS.status, state="degraded")
            child.kill()
            child.wait()
            with Watcher(mosquitto.endpoint) as later:
                assert later.retained(TOPICS.status) == new


@pytest.mark.broker
def test_a_broker_that_comes_up_later_is_found(broker: RealBroker) -> None:
    broker.stop()
    began = time.monotonic()
    with link_to(broker.endpoint) as link:
        for number in range(1000):
            link.send(event(number))
        assert time.monotonic() - began < 1.0  # nothing waits for a broker
        assert not link.connected
        broker.start()
        eventually(lambda: link.connected)
        with Watcher(broker.endpoint) as watcher:
            assert watcher.retained(TOPICS.status)["state"] == "degraded"
            assert watcher.retained(TOPICS.birth)["agent_version"] == "1.2.3"
    assert link.drops == {"outgoing": 0, "incoming": 0}


@pytest.mark.broker
def test_a_killed_broker_is_found_again(broker: RealBroker) -> None:
    with link_to(broker.endpoint) as link:
        with Watcher(broker.endpoint) as watcher:
            first = watcher.retained(TOPICS.status)
            link.set_state("online")
            watcher.expect(TOPICS.status, state="online")
        broker.stop()
        eventually(lambda: not link.connected)
        broker.start()
        with Watcher(broker.endpoint) as watcher:
            second = watcher.retained(TOPICS.status)
            assert second["state"] == "online"
            assert second["session"] != first["session"]
            assert watcher.retained(TOPICS.birth)["engine"] == "abc"
            link.send(event(1))
            watcher.expect(TOPICS.event, seq=1)


@pytest.mark.broker
def test_a_state_that_is_no_news_is_not_published(broker: RealBroker) -> None:
    with Watcher(broker.endpoint) as watcher, link_to(broker.endpoint) as link:
        watcher.expect(TOPICS.status, state="degraded")
        states: list[DeviceState] = ["degraded", "online", "online", "stopping", "stopping"]
        for state in states:
            link.set_state(state)
        link.send(event(1))
        watcher.expect(TOPICS.event, seq=1)
    told = [json.loads(message.payload)["state"] for message in watcher.seen if message.topic == TOPICS.status]
    assert told in (["degraded", "online", "stopping"], ["degraded", "stopping"])  # the newest replaces what waits


@pytest.mark.broker
def test_publishing_from_many_threads_loses_and_reorders_nothing(broker: RealBroker) -> None:
    with Watcher(broker.endpoint) as watcher, link_to(broker.endpoint) as link:

        def send_twenty(k: int) -> None:
            for number in range(1000 * k, 1000 * k + 20):
                link.send(event(number))

        senders = [threading.Thread(target=send_twenty, args=(k,)) for k in range(4)]
        for sender in senders:
            sender.start()
        numbers = [watcher.expect(TOPICS.event)["seq"] for _ in range(80)]
        for sender in senders:
            sender.join()
    for k in range(4):
        assert [n for n in numbers if n // 1000 == k] == list(range(1000 * k, 1000 * k + 20))


@pytest.mark.broker
def test_a_flood_of_commands_is_bounded_and_counted(any_broker: RealBroker) -> None:
    with link_to(any_broker.endpoint) as link, MqttClient(any_broker.endpoint, "flood") as operator:
        eventually(lambda: link.connected)
        for number in range(INBOX_SIZE + 50):
            operator.publish(TOPICS.command, str(number).encode())
        eventually(lambda: link.drops["incoming"] == 50)
        assert [int(link.inbox.get_nowait().payload) for _ in range(INBOX_SIZE)] == list(range(INBOX_SIZE))


@pytest.mark.broker
@pytest.mark.skipif(shutil.which("mosquitto_sub") is None, reason="needs mosquitto-clients")
def test_the_line_that_make_run_prints_works_with_the_embedded_broker() -> None:
    with EmbeddedBroker() as broker, link_to(Endpoint(broker.host, broker.port)):
        line = ["mosquitto_sub", "-p", str(broker.port), "-v", "-t", TOPICS.status, "-C", "1", "-W", "10"]
        seen = subprocess.run(line, capture_output=True, text=True, check=True, timeout=20).stdout
    assert seen.startswith("tared/v1/fleet/board/status {")


def test_a_client_that_does_not_read_does_not_hold_up_the_embedded_broker() -> None:
    pytest.importorskip("amqtt")
    with socket.socket() as deaf:
        with EmbeddedBroker() as broker:
            deaf.connect((broker.host, broker.port))
            deaf.sendall(bytes.fromhex("100d 00044d515454 04 02 003c 000164"))  # CONNECT as "d"
            deaf.sendall(bytes.fromhex("8206 0001 000123 00"))  # SUBSCRIBE to "#"
            assert deaf.recv(9, socket.MSG_WAITALL) == bytes.fromhex("20020000 9003000100")
            with MqttClient(Endpoint(broker.host, broker.port), "loud") as loud:
                for _ in range(100):
                    loud.publish("loud", bytes(100_000))
            began = time.monotonic()
        assert time.monotonic() - began < 5.0


def test_the_embedded_broker_names_its_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "amqtt.adapters", None)
    with pytest.raises(AgentError, match=r"broker\.missing: .*pip install 'tared\[demo\]'"), EmbeddedBroker():
        pytest.fail("it started")


def test_the_embedded_broker_names_a_taken_port() -> None:
    pytest.importorskip("amqtt")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AgentError, match=r"broker\.port"), EmbeddedBroker(port):
            pytest.fail("it started")


def test_a_port_nobody_listens_on_is_no_error() -> None:
    with link_to(Endpoint("127.0.0.1", free_port())) as link:
        eventually(lambda: "refused" in link.outcome)
    assert not link.connected


def test_a_host_no_resolver_takes_is_no_error() -> None:
    with link_to(Endpoint("a" * 64 + ".invalid", 1883)) as link:
        eventually(lambda: link.outcome != "not tried yet")


def test_a_broker_that_refuses_hears_the_credentials_and_is_quoted(tmp_path: Path) -> None:
    password_file = tmp_path / "password"
    password_file.write_text("s3cret\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = Endpoint("127.0.0.1", server.getsockname()[1], 30, "board-7", password_file)
        seldom = Backoff(60.0, 60.0, random.Random(7))
        with MqttLink(endpoint, TOPICS, BIRTH, seldom) as link:
            connection, _ = server.accept()
            with connection:
                connect = connection.recv(4096)
                connection.sendall(bytes([0x20, 2, 0, 5]))  # CONNACK: not authorised
                eventually(lambda: link.outcome == "refused: Not authorized")
    assert b"board-7" in connect
    assert b"s3cret" in connect


def test_a_mute_broker_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = link_to(Endpoint("127.0.0.1", server.getsockname()[1]))
        with link:
            connection, _ = server.accept()
            began = time.monotonic()
            link.close(timeout_s=0.3)
            assert time.monotonic() - began < 2.0
        connection.close()


class FakeBroker:
    """A listening socket that speaks what a test makes it say, to one connection after the other."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(10.0)
        self.endpoint = Endpoint("127.0.0.1", self._server.getsockname()[1])

    def __enter__(self) -> FakeBroker:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """The next client, its CONNECT taken and not yet answered."""
        connection, _ = self._server.accept()
        with connection:
            connection.settimeout(10.0)
            assert packet_from(connection)[0] == 0x10
            yield connection


def packet_from(connection: socket.socket) -> bytes:
    """A whole packet: its type and flags, then all that follows its length."""
    kind = connection.recv(1)
    length = shift = 0
    while True:
        (digit,) = connection.recv(1)
        length += (digit & 127) << shift
        shift += 7
        if digit < 128:
            return kind + (connection.recv(length, socket.MSG_WAITALL) if length else b"")


def admit(connection: socket.socket, codes: bytes = b"\1") -> None:
    """Answer CONNECT and SUBSCRIBE, with `codes` for the subscriptions."""
    connection.sendall(bytes([0x20, 2, 0, 0]))
    subscribe = packet_from(connection)
    assert subscribe[0] == 0x82
    connection.sendall(bytes([0x90, 2 + len(codes)]) + subscribe[1:3] + codes)


def times_down(caplog: pytest.LogCaptureFixture, reason: str) -> int:
    """How many connections ended for this reason; the outcome itself is soon that of the next attempt."""
    lines = [record.getMessage() for record in list(caplog.records)]
    return sum(line.startswith("mqtt=down") and reason in line for line in lines)


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
        pytest.param(lambda broker: admit(broker, b"\1\1"), "broker.protocol: a SUBACK with 2 codes", id="long-suback"),
        pytest.param(lambda broker: admit(broker, b""), "broker.protocol: a SUBACK with 0 codes", id="empty-suback"),
        pytest.param(lambda broker: admit(broker, b"\x55"), "no answer to SUBSCRIBE, then", id="code-nobody-knows"),
        pytest.param(say("9003 ffff 01"), "broker.protocol: a SUBACK that nobody waits for", id="suback-for-nobody"),
        pytest.param(admit_and_say("3004 0002 fffe"), "broker.protocol: a topic that is no text", id="topic-no-text"),
        pytest.param(admit_and_say("3004 00ff 6161"), "connection lost", id="topic-cut-short"),
        pytest.param(admit_and_say("f000"), "connection lost", id="packet-nobody-knows"),
        pytest.param(admit_and_say("30ffffffffff7f"), "connection lost", id="length-without-end"),
        pytest.param(say("2001 00"), "no answer to CONNECT, then the connection was lost", id="connack-cut-short"),
        pytest.param(say("485454502f312e3120343030"), "no answer to CONNECT, then", id="http"),
        pytest.param(lambda broker: broker.close(), "no answer to CONNECT, then", id="hangs-up"),
    ],
)
def test_garbage_from_a_broker_ends_the_connection_and_not_the_client(
    misbehave: Callable[[socket.socket], None], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with FakeBroker() as broker, link_to(broker.endpoint) as link:
        for number in range(2):
            with broker.connection() as connection:
                misbehave(connection)
                eventually(lambda: times_down(caplog, reason) > number)  # noqa: B023
        with broker.connection() as connection:
            admit(connection)
            eventually(lambda: link.connected)
            assert link.outcome == "connected"
    assert times_down(caplog, reason) == 2


def test_an_error_of_our_own_ends_the_connection_and_not_the_client(caplog: pytest.LogCaptureFixture) -> None:
    greetings = [lambda: 1 / 0, lambda: 0.0]
    with (
        FakeBroker() as broker,
        MqttClient(broker.endpoint, "us", greet=lambda: greetings.pop(0)(), backoff=Backoff(0.05, 0.2)) as client,
    ):
        with broker.connection() as connection:
            connection.sendall(bytes([0x20, 2, 0, 0]))
            eventually(lambda: times_down(caplog, "ZeroDivisionError") == 1)
        with broker.connection() as connection:
            connection.sendall(bytes([0x20, 2, 0, 0]))
            eventually(lambda: client.connected)
    assert "in <lambda>" in caplog.text  # a bug comes with its traceback


def test_a_broker_that_acknowledges_nothing_is_left_and_told_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_module, "ACKNOWLEDGE_TIMEOUT_S", 0.1)
    with FakeBroker() as broker, link_to(broker.endpoint) as link:
        link.send(event(7))
        for number in range(2):
            with broker.connection() as connection:
                admit(connection)
                published = [packet_from(connection) for _ in range(3)]  # birth, status, event
                assert event(7).to_json() in published[-1]
                eventually(lambda: times_down(caplog, "broker.silent: 3 messages unacknowledged") > number)  # noqa: B023
        link.close(timeout_s=0.0)


def test_a_broker_that_never_admits_us_is_left_and_starts_no_backoff_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(connection_module, "CONNECT_TIMEOUT_S", 0.1)
    monkeypatch.setattr(mqtt_module, "STABLE_S", 0.05)
    backoff = Backoff(0.05, 0.2)
    monkeypatch.setattr(backoff, "reset", lambda: pytest.fail("it took a failure for a success"))
    with FakeBroker() as broker, MqttLink(broker.endpoint, TOPICS, BIRTH, backoff):
        with broker.connection():
            eventually(lambda: times_down(caplog, "broker.silent: no answer to CONNECT") == 1)
        with broker.connection() as connection:
            connection.sendall(bytes([0x20, 2, 0, 0]))
            eventually(lambda: times_down(caplog, "broker.silent: no answer to SUBSCRIBE") == 1)


def test_a_payload_without_end_is_kept_as_far_as_it_can_be_read() -> None:
    with FakeBroker() as broker, link_to(broker.endpoint) as link, broker.connection() as connection:
        admit(connection)
        topic = TOPICS.command.encode()
        body = len(topic).to_bytes(2, "big") + topic + bytes(1 << 20)
        length = bytes([len(body) & 127 | 128, len(body) >> 7 & 127 | 128, len(body) >> 14])
        connection.sendall(b"\x30" + length + body)
        message = link.inbox.get(timeout=10.0)
        link.close(timeout_s=0.0)
    with pytest.raises(CommandRefused, match=r"message\.too_large"):
        parse_command(message.payload, 0.0)
    assert len(message.payload) == MAX_PAYLOAD_BYTES + 1


def test_a_password_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    endpoint = Endpoint("127.0.0.1", 1883, username="me", password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"mqtt\.password"):
        link_to(endpoint)


def test_the_outbox_pushes_out_the_oldest_news_and_never_state() -> None:
    outbox = Outbox(size=2)
    outbox.put(Message("status", b"old", retain=True))
    for payload in (b"1", b"2", b"3"):
        outbox.put(Message("event", payload))
    outbox.put(Message("status", b"new", retain=True))
    assert outbox.dropped == 1
    assert [outbox.take() for _ in range(len(outbox))] == [
        Message("status", b"new", retain=True),
        Message("event", b"2"),
        Message("event", b"3"),
    ]
    assert outbox.take() is None


def test_what_was_not_acknowledged_goes_first_and_old_state_is_not_repeated() -> None:
    outbox = Outbox(size=3)
    lost = [Message("event", b"1"), Message("status", b"old", retain=True), Message("event", b"2")]
    outbox.put(Message("event", b"3"))
    outbox.put(Message("status", b"new", retain=True))
    outbox.put_back(lost)
    outbox.renew()
    taken = [outbox.take() for _ in range(len(outbox))]
    assert [message.payload for message in taken if message] == [b"new", b"1", b"2", b"3"]
    outbox.renew()
    assert outbox.take() == Message("status", b"new", retain=True)
    assert outbox.dropped == 0
