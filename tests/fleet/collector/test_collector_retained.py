"""Retained messages are no sign of life: a board that is gone does not come alive with the collector."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest
from brokers import RealBroker, Watcher, eventually
from collector_bench import ONLINE, collecting, online
from device import TOPICS
from rich.console import Console

from agent.contract.commands import CommandResult
from agent.contract.messages import Birth, Status
from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from agent.mqtt.receive_queue import Arrival
from fleet.collector.batch import Reader
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import facts
from fleet.store.opening import open_store
from fleet.views import watch
from fleet.views.words import ago

_TOPIC = b"tared/v1/fleet/board/"
_BIRTH = Birth(agent_version="1")


def the_board(where: Path) -> Device:
    with open_store(where) as store:
        (device,) = Devices(store).all("fleet")
    return device


@pytest.mark.broker
def test_a_board_that_is_gone_is_not_seen_because_a_collector_comes_back(
    any_broker: RealBroker, tmp_path: Path
) -> None:
    first, other = tmp_path / "first.sqlite", tmp_path / "other.sqlite"
    with Watcher(any_broker.endpoint) as watcher:
        with MqttClient(any_broker.endpoint, "board") as board, collecting(any_broker, first):
            online(board, watcher)  # or some of it would have been kept for the collector
            board.publish(Message(TOPICS.birth, _BIRTH.to_json(), retain=True))
            board.publish(ONLINE)
            watcher.expect(TOPICS.ack, epoch=0)
            eventually(lambda: the_board(first).agent_version == "1")
        assert the_board(first).last_seen > time.time() - 60.0
        with open_store(first) as store, store.transaction() as transaction:
            transaction.execute("UPDATE devices SET last_seen = 1000.0")
        for where, seen in ((first, 1000.0), (other, 0.0)):
            with collecting(any_broker, where):
                watcher.expect(TOPICS.ack, epoch=0)
                eventually(lambda where=where: the_board(where).agent_version == "1")  # type: ignore[misc]  # a default
            device = the_board(where)
            assert (device.state, device.last_seen) == ("online", seen)
            assert facts(device, time.time())["state"] == "silent"
        with collecting(any_broker, other), MqttClient(any_broker.endpoint, "board") as board:
            watcher.expect(TOPICS.ack, epoch=0)
            board.publish(ONLINE)
            eventually(lambda: the_board(other).last_seen > time.time() - 60.0)


def test_a_board_that_never_sent_is_listed_as_never_seen() -> None:
    assert [ago(seconds) for seconds in (None, 0.0, 7300.0)] == ["never", "0 s ago", "2 h ago"]


@pytest.mark.parametrize(
    ("path", "payload"),
    [
        ("telemetry", b'{"epoch":7,"seq":3,"ts":1.5,"cameras":{}}'),
        ("event", b'{"epoch":7,"seq":4,"ts":1.5,"kind":"alarm"}'),
        ("cmd/c1/result", CommandResult(id="c1", status="SUCCEEDED").to_json()),
    ],
)
def test_a_retained_message_of_a_kind_that_no_board_retains_is_refused(path: str, payload: bytes) -> None:
    topic = _TOPIC + path.encode()
    batch = Reader().read([Arrival(topic, payload, retained=True)])
    assert ([each.code for each in batch.refused], batch.entries, batch.seen) == (["fleet.retained"], [], set())
    batch = Reader().read([Arrival(topic, payload)])
    assert (batch.refused, len(batch.entries) + len(batch.results)) == ([], 1)


def test_a_word_that_was_kept_and_one_of_now_in_one_batch_are_a_sign_of_life() -> None:
    status, birth = Arrival(_TOPIC + b"status", ONLINE.payload, True), Arrival(_TOPIC + b"birth", _BIRTH.to_json())
    assert Reader().read([status, birth._replace(retained=True)]).seen == set()
    assert Reader().read([status, birth]).seen == {("fleet", "board")}
    assert Reader().read([birth, status]).seen == {("fleet", "board")}


def test_a_late_will_in_one_batch_with_the_connection_that_followed_does_not_end_it() -> None:
    def status_arrival(state: str, session: str, ts: float) -> Arrival:
        status = Status.model_validate({"state": state, "session": session, "boot_id": "b", "ts": ts})
        return Arrival(_TOPIC + b"status", status.to_json())

    first, second, will = (
        status_arrival("online", "1", 1.0),
        status_arrival("online", "2", 2.0),
        status_arrival("offline", "1", 1.0),
    )
    end = status_arrival("offline", "2", 2.0)
    for arrivals, state in (
        ([first, second, will], "online"),
        ([second, will], "online"),
        ([first, will], "offline"),
        ([first, second, will, end], "offline"),
    ):
        (status,) = Reader().read(arrivals).statuses.values()
        assert status.state == state


def test_a_watch_does_not_count_a_retained_message_as_a_sign_of_life() -> None:
    known: dict[str, watch.WatchedDevice] = {}
    for retain, is_seen in ((True, False), (False, True)):
        arrival = Arrival(TOPICS.status.encode(), ONLINE.payload, retain)
        watch._receive(arrival, "fleet", frozenset(), known, None)
        assert known["board"].newest["status"]["state"] == "online"
        assert (known["board"].heard_s is not None) is is_seen
        shown = Console(file=(text := io.StringIO()), width=200)
        shown.print(watch._table(known, 200))
        assert ("not yet" in text.getvalue()) is not is_seen
