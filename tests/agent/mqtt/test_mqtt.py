"""The device's link against real brokers: presence, reconnection, queues, and a clean end."""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually, on_the_air, report
from child_link import child_on_the_air
from mqtt_clients import logged

from agent.common.errors import ConfigError
from agent.contract.messages import Birth, DeviceState
from agent.contract.topics import Topics
from agent.mqtt.client import INBOX_SIZE, Endpoint, MqttClient
from agent.mqtt.message import Message
from agent.uplink.link import MqttLink

TOPICS = Topics("fleet", "board")
pytestmark = pytest.mark.usefixtures("no_thread_left")
BIRTH = Birth(agent_version="1.2.3", engine="abc")


def link_to(endpoint: Endpoint) -> contextlib.AbstractContextManager[MqttLink]:
    return on_the_air(endpoint, TOPICS, BIRTH)


@pytest.mark.broker
def test_the_end_is_announced_after_all_that_was_queued(mosquitto: RealBroker) -> None:
    with Watcher(mosquitto.endpoint) as watcher:
        with link_to(mosquitto.endpoint) as link:
            first = watcher.expect(TOPICS.status, state="degraded")
            for _ in range(60):  # three windows of unacknowledged messages
                report(link)
            link.set_state("stopping")  # as the supervisor does: the end does not say it again
        ends = [watcher.next() for _ in range(62)]
        assert [json.loads(end.payload)["seq"] for end in ends if end.topic == TOPICS.event] == list(range(1, 61))
        states = [json.loads(end.payload) for end in ends if end.topic == TOPICS.status]
        assert [state["state"] for state in states] == ["stopping", "offline"]
        assert ends[-1].topic == TOPICS.status
        assert states[-1]["session"] == first["session"]
    assert not link.connected
    with Watcher(mosquitto.endpoint) as later:
        assert later.retained(TOPICS.status)["state"] == "offline"


@pytest.mark.broker
def test_a_killed_process_leaves_its_will(broker: RealBroker) -> None:
    with Watcher(broker.endpoint) as watcher, child_on_the_air(broker.endpoint) as child:
        first = watcher.expect(TOPICS.status, state="degraded")
        child.send_signal(signal.SIGKILL)
        watcher.expect(TOPICS.status, state="offline", session=first["session"], boot_id=first["boot_id"])
    with Watcher(broker.endpoint) as later:
        assert later.retained(TOPICS.status)["state"] == "offline"


@pytest.mark.broker
def test_the_will_of_a_frozen_predecessor_does_not_bury_its_successor(mosquitto: RealBroker) -> None:
    mosquitto.protocol = "3.1.1"
    with Watcher(mosquitto.endpoint) as watcher, child_on_the_air(mosquitto.endpoint) as child:
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
            report(link)
            watcher.expect(TOPICS.event, seq=1)


@pytest.mark.broker
def test_a_state_that_is_no_news_is_not_published(any_broker: RealBroker) -> None:
    with Watcher(any_broker.endpoint) as watcher, link_to(any_broker.endpoint) as link:
        states: list[DeviceState] = ["degraded", "online", "stopping"]
        for state in states:
            link.set_state(state)
            watcher.expect(TOPICS.status, state=state)
            link.set_state(state)
        for _ in range(2):
            link.set_state("degraded", "the view is blind; see the camera")
        report(link)
        watcher.expect(TOPICS.event, seq=1)  # what waits is sent state before news: a repetition would be here
    statuses = [json.loads(message.payload) for message in watcher.seen if message.topic == TOPICS.status]
    assert [status["state"] for status in statuses] == [*states, "degraded"]
    assert [status.get("reason") for status in statuses] == [None, None, None, "the view is blind; see the camera"]


@pytest.mark.broker
def test_publishing_from_many_threads_loses_and_reorders_nothing(any_broker: RealBroker) -> None:
    with Watcher(any_broker.endpoint) as watcher, link_to(any_broker.endpoint) as link:

        def send_twenty(k: int) -> None:
            for number in range(20):
                report(link, f"{k} {number}")

        senders = [threading.Thread(target=send_twenty, args=(k,)) for k in range(4)]
        for sender in senders:
            sender.start()
        events = [watcher.expect(TOPICS.event) for _ in range(80)]
        for sender in senders:
            sender.join()
    assert [event["seq"] for event in events] == list(range(1, 81))
    for k in range(4):
        assert [event["kind"] for event in events if event["kind"][0] == str(k)] == [f"{k} {n}" for n in range(20)]


@pytest.mark.broker
def test_a_flood_of_labels_pushes_no_command_out(any_broker: RealBroker, caplog: pytest.LogCaptureFixture) -> None:
    with link_to(any_broker.endpoint) as link, MqttClient(any_broker.endpoint, "flood") as operator:
        eventually(lambda: link.connected)
        for number in range(INBOX_SIZE + 200):
            operator.publish(Message(TOPICS.labels, str(number).encode()))
        for number in range(INBOX_SIZE):
            operator.publish(Message(TOPICS.command, str(number).encode()))
        for inbox in (link.inbox, link.labels):
            eventually(inbox.full)
            assert [int(inbox.get_nowait().payload) for _ in range(INBOX_SIZE)] == list(range(INBOX_SIZE))
        eventually(lambda: link.drops == {"outgoing": 0, "incoming": 200, "outbox": 0})
    lines = logged(caplog, "mqtt=inbox_full")
    assert lines == [f"mqtt=inbox_full topic={TOPICS.labels} dropped={2**k}" for k in range(8)]


def test_a_host_that_no_resolver_accepts_is_no_error() -> None:
    with link_to(Endpoint("a" * 64 + ".invalid", 1883)) as link:
        eventually(lambda: link.outcome != "not tried yet")


def test_a_password_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    endpoint = Endpoint("127.0.0.1", 1883, username="me", password_file=tmp_path / "none")
    with pytest.raises(ConfigError, match=r"mqtt\.password"), link_to(endpoint):
        pass
