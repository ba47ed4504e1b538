"""A collector and what strangers, broken boards and twins send it: nothing ends it, nothing passes for another's."""

from __future__ import annotations

import json
import logging
import random
import re
from pathlib import Path

import pytest
from attack.documents import DEVICE_TOPIC, HONEST, tampered
from brokers import RealBroker, Watcher, running_mosquitto
from collector_bench import STREAM, alarm
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from stored import Reports

from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.endpoint import Endpoint
from agent.mqtt.message import Message
from agent.mqtt.receive_queue import Arrival, ReceiveQueue
from agent.uplink.home_assistant import device_id
from fleet.collector.batch import Batch, Part, Reader
from fleet.collector.collector import ReadAhead
from fleet.collector.writer import BatchWriter
from fleet.devices.devices import Devices
from fleet.devices.records import quarantined
from fleet.devices.reports import Report, Stream
from fleet.store.transaction import FleetStore
from fleet.untrusted import Warnings

_ACL = ROOT / "docs" / "mosquitto" / "tared.acl"


def test_telemetry_is_read_the_same_the_quick_way_and_the_thorough_one() -> None:
    for payload in (HONEST[b"telemetry"], HONEST[b"telemetry"].replace(b"{", b"{ ")):
        (quick,) = Reader().read([Arrival(DEVICE_TOPIC + b"telemetry", payload)]).entries
        (thorough,) = (
            Reader().read([Arrival(DEVICE_TOPIC + b"telemetry", payload[:-1] + b',"device":"board"}')]).entries
        )
        assert isinstance(quick, Report)
        assert isinstance(thorough, Report)
        assert quick[:-1] == thorough[:-1]
        assert quick.document == payload.decode()


def test_names_that_no_board_may_have_are_refused() -> None:
    topics = [f"tared/v1/{name}/board/event".encode() for name in ("", "x" * 65)]
    batch = Reader().read([Arrival(topic, HONEST[b"event"]) for topic in topics])
    assert ([each.code for each in batch.refused], batch.entries) == (["mqtt.name"] * 2, [])


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("telemetry", b'{"epoch":7,"seq":3,"ts":1.5,"cameras":{},"health":{"a":NaN}}'),
        ("telemetry", b'{"epoch":7,"seq":3,"ts":1.5,"cameras":{},"health":{"a":' + b"[" * 17 + b"]" * 17 + b"}}"),
        ("telemetry", b'{"epoch":7,"seq":3,"ts":1.5,"cameras":{},"health":{"a":"\\ud800"}}'),
        ("telemetry", b'{"epoch":7,"seq":3,"ts":"now","cameras":{}}'),
        ("telemetry", b'{"epoch":7,"seq":3,"ts":1.5,"cameras":{}}' + b" " * 65_536),
        ("telemetry", HONEST[b"telemetry"][:-1]),
        ("event", b'{"epoch":7,"seq":3,"ts":"yesterday"}'),
        ("event", alarm(3, words="x" * 70_000).payload),
    ],
)
def test_an_unreadable_report_keeps_its_number(kind: str, payload: bytes) -> None:
    batch = Reader().read([Arrival(DEVICE_TOPIC + kind.encode(), payload)])
    assert [each.code.partition(".")[0] for each in batch.refused] == ["message"]
    assert [each[1:4] for each in batch.entries] == [(3, 3, "unreadable")]


@given(
    st.lists(
        st.tuples(
            st.sampled_from([*(DEVICE_TOPIC + path for path in HONEST), b"x", DEVICE_TOPIC, b"tared/v1//"]),
            st.binary(max_size=80),
        )
    )
)
def test_bytes_of_any_kind_are_read_or_refused(arrivals: list[tuple[bytes, bytes]]) -> None:
    batch = Reader().read([Arrival(*each) for each in arrivals])
    known = len(batch.entries) + len(batch.statuses) + len(batch.births) + len(batch.results)
    assert known + len(batch.refused) <= 2 * len(arrivals)


def test_documents_that_were_tampered_with_are_stored_or_refused_by_any_database(store: FleetStore) -> None:
    """The database takes each document that the reader takes: one refused row would hold up all others."""
    chance = random.Random(7)
    writer, reader = BatchWriter(store, Warnings(logging.getLogger(), "test")), Reader()
    for _ in range(60):
        writer.write(reader.read([tampered(chance) for _ in range(20)]))
    assert len(quarantined(store, 2000)) > 100
    assert Devices(store).count("fleet") == 1


class _Broken(Reader):
    def read(self, arrivals: object) -> Batch:
        raise ZeroDivisionError(arrivals)


def test_a_bug_in_reading_ends_the_collector_and_is_not_passed_over() -> None:
    intake = ReceiveQueue(1 << 20)
    with ReadAhead({intake: 0.0}, _Broken(), 1 << 20) as reading:
        assert reading.next(0.0) is None
        intake.put([Arrival(DEVICE_TOPIC + b"event", b"{}")])
        with pytest.raises(ZeroDivisionError):
            reading.next(10.0)


@pytest.mark.usefixtures("no_thread_left")
def test_an_untaken_batch_does_not_keep_the_threads_from_ending() -> None:
    intake = ReceiveQueue(most_bytes=1)
    with ReadAhead({intake: 0.0}, Reader(), 1 << 20):
        for _ in range(3):  # one is ready, one waits for its place, one is still to be read
            intake.put([Arrival(DEVICE_TOPIC + b"event", HONEST[b"event"])])


def test_a_board_that_says_it_is_another_is_taken_for_whom_its_topic_names() -> None:
    lie = json.dumps({"epoch": 7, "seq": 1, "ts": 0.0, "kind": "alarm", "device": "other"}).encode()
    truth = lie.replace(b"other", b"board")
    batch = Reader().read([Arrival(DEVICE_TOPIC + b"event", lie), Arrival(DEVICE_TOPIC + b"event", truth)])
    assert {each.stream.device for each in batch.entries} == {"board"}
    assert [each.code for each in batch.refused] == ["fleet.identity"]
    foreign = Arrival(DEVICE_TOPIC + b"cmd/c2/result", HONEST[b"cmd/c1/result"])
    assert [each.code for each in Reader().read([foreign]).refused] == ["fleet.identity"]


def test_a_start_that_goes_on_beside_a_later_one_is_a_twins(store: FleetStore) -> None:
    reports = Reports(store)
    later = Stream("fleet", "board", 100)

    def twins(stream: Stream, seq: int, ts: float) -> list[Stream]:
        with store.transaction() as transaction:
            return list(reports.put(transaction, [Report(stream, seq, "alarm", ts, "{}")], 1.0).duplicates)

    assert twins(STREAM, 1, 50.0) == []
    assert twins(later, 1, 110.0) == []
    assert twins(STREAM, 2, 60.0) == []  # from the disk, of before the later start
    assert twins(STREAM, 2, 120.0) == []  # the same number once more
    assert twins(STREAM, 3, 120.0) == [STREAM]
    assert twins(STREAM, 4, 121.0) == []  # logged once
    assert Reports(store).position("fleet", "board") == (100, 1)


def test_a_later_start_is_known_from_a_redelivery_alone(store: FleetStore) -> None:
    """Two collectors share a store: what one has stored comes to the other one again."""
    ours, others = Reports(store), Reports(store)
    later = Stream("fleet", "board", 100)

    def twins(reports: Reports, stream: Stream, seq: int, ts: float) -> list[Stream]:
        with store.transaction() as transaction:
            return list(reports.put(transaction, [Report(stream, seq, "alarm", ts, "{}")], 1.0).duplicates)

    assert twins(ours, STREAM, 1, 50.0) == []
    assert twins(others, later, 1, 110.0) == []
    assert twins(ours, later, 1, 110.0) == []
    assert twins(ours, STREAM, 2, 120.0) == [STREAM]


def test_parts_are_of_all_devices_each_once() -> None:
    names = [f"board-{number}" for number in range(300)]
    by_part = [[name for name in names if Part(number, 4).contains("fleet", name)] for number in (1, 2, 3, 4)]
    assert sorted(name for part in by_part for name in part) == sorted(names)
    assert all(40 < len(part) < 110 for part in by_part)
    ours, others = by_part[0][0], by_part[1][0]
    arrivals = [Arrival(f"tared/v1/fleet/{name}/event".encode(), alarm(1).payload) for name in (ours, others)]
    assert [each.stream.device for each in Reader(Part(1, 4)).read(arrivals).entries] == [ours]


def client(broker: RealBroker, name: str, *subscriptions: str) -> MqttClient:
    """Return a client that the broker knows by this name."""
    endpoint = Endpoint(broker.host, broker.port, username=name)
    return MqttClient(endpoint, f"{name}'s", SessionOptions(subscriptions=subscriptions))


@pytest.mark.broker
def test_with_the_acl_that_comes_along_no_board_speaks_for_another(tmp_path: Path) -> None:
    with running_mosquitto(tmp_path, f"acl_file {_ACL}") as broker:
        with (
            Watcher(Endpoint(broker.host, broker.port, username="operator")) as watcher,
            client(broker, "board") as board,
            client(broker, "other") as liar,
            client(broker, "tared-collector", "tared/v1/+/+/event") as collector,
        ):
            assert collector.wait_connected(10.0)
            liar.publish(alarm(1))
            liar.publish(Message(Topics("fleet", "board").ack, b'{"epoch":7,"upto":99}'))
            liar.publish(Message(Topics("fleet", "other").event, alarm(2).payload))
            watcher.expect("tared/v1/fleet/other/event", seq=2)
            board.publish(alarm(3))
            watcher.expect("tared/v1/fleet/board/event", seq=3)
            collector.publish(Message(Topics("fleet", "board").ack, b'{"epoch":7,"upto":3}'))
            watcher.expect("tared/v1/fleet/board/ack", upto=3)
            received_topics = [collector.inbox.get(timeout=10.0).topic for _ in range(2)]
        assert received_topics == ["tared/v1/fleet/other/event", "tared/v1/fleet/board/event"]
        assert [json.loads(each.payload).get("seq") for each in watcher.seen if "/ack" not in each.topic] == [2, 3]


@pytest.mark.broker
def test_with_that_acl_a_board_that_is_named_announces_itself_to_home_assistant_and_no_other(tmp_path: Path) -> None:
    """As the comment in it says: uncommented, for one board."""
    (found,) = re.findall(r"#   (user board-7)\n#   (topic write \S+)\n", _ACL.read_text())
    acl = tmp_path / "acl"
    acl.write_text(_ACL.read_text() + "\n" + "\n".join(found) + "\n")
    topics, its_own = Topics("default", "board-7"), Topics("default", "board-8").telemetry
    announced = f"homeassistant/device/{device_id(topics)}/config"
    with (
        running_mosquitto(tmp_path, f"acl_file {acl}") as broker,
        client(broker, "homeassistant", "homeassistant/device/+/config", topics.telemetry, its_own) as house,
        client(broker, "board-7", "homeassistant/status", topics.command) as board,
        client(broker, "board-8") as liar,
    ):
        assert house.wait_connected(10.0)
        assert board.wait_connected(10.0)
        liar.publish(Message(announced, b"a lie"))
        liar.publish(Message("homeassistant/status", b"a lie"))
        liar.publish(Message(its_own, b"after the lies"))
        assert house.inboxes[its_own].get(timeout=10.0).payload == b"after the lies"
        board.publish(Message(announced, b"{}"))
        board.publish(Message(topics.telemetry, b"fps"))
        assert house.inboxes["homeassistant/device/+/config"].get(timeout=10.0).payload == b"{}"
        assert house.inboxes[topics.telemetry].get(timeout=10.0).payload == b"fps"
        house.publish(Message("homeassistant/status", b"online"))
        house.publish(Message(topics.command, b"recalibrate"))
        assert board.inboxes["homeassistant/status"].get(timeout=10.0).payload == b"online"
        assert board.inboxes[topics.command].get(timeout=10.0).payload == b"recalibrate"
