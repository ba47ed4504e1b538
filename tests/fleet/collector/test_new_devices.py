"""Names that anybody may invent: how many become devices is bounded, and the known ones lose nothing."""

from __future__ import annotations

import json
import logging
import threading

import pytest
from brokers import RealBroker, Watcher, eventually
from collector_bench import ONLINE, alarm
from device import TOPICS
from turned_clock import TurnedClock

from agent.contract.topics import Topics
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from agent.mqtt.receive_queue import Arrival
from fleet.collector.admission import NewDevices
from fleet.collector.batch import Batch, Reader
from fleet.collector.collector import NEW_DEVICE, Collector
from fleet.collector.writer import BatchWriter
from fleet.devices.devices import Devices
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore
from fleet.untrusted import Warnings

STRANGERS = 600


def batch(*names: str, seq: int = 1) -> Batch:
    """Return a batch with an alarm of each board."""
    payload = json.dumps({"epoch": 7, "seq": seq, "ts": 0.0, "kind": "alarm"}).encode()
    return Reader().read([Arrival(Topics("fleet", name).event.encode(), payload) for name in names])


def writer_with(store: FleetStore, limits: NewDevices) -> tuple[BatchWriter, TurnedClock]:
    clock = TurnedClock()
    return BatchWriter(store, Warnings(logging.getLogger(), "test"), limits, clock), clock


def test_new_devices_are_limited_by_minute_and_in_all(store: FleetStore, caplog: pytest.LogCaptureFixture) -> None:
    writer, clock = writer_with(store, NewDevices(most=7, per_minute=3))
    _, complete = writer.write(batch("a", "b"))
    assert {each.device for each in complete} == {"a", "b"}
    taken, complete = writer.write(batch("c", "a", "d", "e", "b", seq=2))
    assert {each.device: upto for each, upto in complete.items()} == {"a": 2, "b": 2, "c": 0}  # 1 of c is to come
    assert {each.stream.device for each in taken.entries} == {"a", "b", "c"}
    assert writer.admission.turned_away == 2
    clock.turn(20.0)
    _, complete = writer.write(batch("d", "e", seq=1))
    assert {each.device for each in complete} == {"d"}
    clock.turn(60.0)
    _, complete = writer.write(batch("e", "f", "g", "h", seq=1))
    assert {each.device for each in complete} == {"e", "f", "g"}
    clock.turn(600.0)
    _, complete = writer.write(batch("h", "a", seq=3))
    assert {each.device for each in complete} == {"a"}
    assert Devices(store).count("fleet") == 7
    assert writer.admission.state == "most-devices"
    assert [each.split()[1] for each in caplog.messages if "devices_refused" in each] == [
        "limit=new-devices-per-minute",
        "limit=most-devices",
    ]


def test_there_is_room_again_once_an_operator_has_forgotten_some(store: FleetStore) -> None:
    writer, clock = writer_with(store, NewDevices(most=2, per_minute=100))
    writer.write(batch("a", "b", "c"))
    devices = Devices(store)
    devices.forget([each for each in devices.all("fleet") if each.name == "a"], who="operator")
    clock.turn(10.0)
    _, complete = writer.write(batch("c"))
    assert {each.device for each in complete} == {"c"}
    clock.turn(61.0)
    writer.write(batch("c", seq=2))
    assert not writer.admission.state


@pytest.mark.broker
def test_a_flood_of_names_costs_known_boards_nothing(any_broker: RealBroker, tmp_path: object) -> None:
    where, stopping = f"{tmp_path}/fleet.sqlite", threading.Event()
    collector = Collector(any_broker.endpoint, open_store(where), limits=NewDevices(most=50, per_minute=100))
    thread = threading.Thread(target=collector.run, args=(stopping.is_set,))
    thread.start()
    try:
        with (
            MqttClient(any_broker.endpoint, "board") as board,
            MqttClient(any_broker.endpoint, "stranger") as stranger,
            Watcher(any_broker.endpoint) as watcher,
        ):
            eventually(lambda: collector.connected["reports"])
            board.publish(ONLINE)
            watcher.expect(TOPICS.ack, epoch=0, upto=0)
            for number in range(STRANGERS):
                name = Topics("fleet", f"stranger-{number}")
                stranger.publish(Message(name.event, alarm(1).payload))
                if number % 60 == 0:
                    seq = 1 + number // 60
                    board.publish(alarm(seq))
                    watcher.expect(TOPICS.ack, epoch=7, upto=seq)
            eventually(lambda: collector.refused[NEW_DEVICE] >= STRANGERS - 50, 60.0)
            last = Topics("fleet", f"stranger-{STRANGERS - 1}").ack
            assert last not in {each.topic for each in watcher.all()}
    finally:
        stopping.set()
        thread.join()
    with open_store(where) as store:
        assert Devices(store).count("fleet") == 50
