"""Floods of messages are bounded in memory and in the log."""

from __future__ import annotations

import logging
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
from brokers import RealBroker, Watcher, eventually
from collector_bench import ONLINE, alarm, online
from device import TOPICS
from turned_clock import TurnedClock

from agent.common.errors import AgentError
from agent.mqtt.client import MqttClient, SessionOptions
from agent.mqtt.message import Message
from agent.mqtt.receive_queue import Arrival, ReceiveQueue
from benchmarks.postgres import Postgres
from fleet.collector import collector as collector_module
from fleet.collector.batch import Reader
from fleet.collector.collector import Collector
from fleet.store.opening import open_store
from fleet.untrusted import Warnings


@pytest.mark.broker
def test_a_full_queue_drops_unacknowledged_messages_alone(
    any_broker: RealBroker, caplog: pytest.LogCaptureFixture
) -> None:
    intake = ReceiveQueue(most_bytes=1)
    with (
        MqttClient(
            any_broker.endpoint, "taker", SessionOptions(subscriptions=[TOPICS.event, "begin"], receive_queue=intake)
        ) as taker,
        MqttClient(any_broker.endpoint, "flooding") as flooding,
        MqttClient(any_broker.endpoint, "board") as board,
    ):
        assert taker.wait_connected(10.0)
        flooding.publish(Message("begin", b""))
        eventually(lambda: not intake.has_room)
        for _ in range(3000):
            flooding.publish(Message(TOPICS.event, bytes(500), qos=0))
        eventually(lambda: "mqtt=no_room qos=0" in caplog.text)
        for seq in range(5):
            board.publish(alarm(seq))
        received = list[Arrival]()

        def take() -> bool:
            received.extend(intake.pop(1 << 20, 0.1, 0.0))
            return sum(len(each.payload) != 500 for each in received) == 6

        eventually(take)
    assert sum(len(each.payload) == 500 for each in received) < 3000


def test_an_intake_counts_topics_too() -> None:
    intake = ReceiveQueue(most_bytes=60_000)
    intake.put([Arrival(b"t" * 65_535, b"")])
    assert not intake.has_room


def test_no_topics_length_or_number_fills_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet.collector.batch._MOST_KNOWN", 100)
    reader = Reader()
    tracemalloc.start()
    for number in range(1000):
        for topic in (
            b"tared/v1/fleet/board%d/cmd/" % number + b"x" * 60_000 + b"/result",
            b"tared/v1/f/%d/x" % number,
        ):
            assert reader.read([Arrival(topic, b"{}")]).refused
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1_000_000


def test_warnings_that_do_not_end_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = TurnedClock()
    warnings = Warnings(logging.getLogger("test"), "collector", clock)
    for number in range(1000):
        warnings.warn("refused", f"number={number}")
    warnings.warn("fleet.twin", "number=1")
    assert [each.message for each in caplog.records] == [
        *(f"collector=refused number={number}" for number in range(10)),
        "collector=fleet.twin number=1",
    ]
    caplog.clear()
    clock.turn(61.0)
    warnings.tick()
    warnings.warn("refused", "number=1000")
    assert [each.message for each in caplog.records] == [
        "collector=refused more=990 seconds=61",
        "collector=refused number=1000",
    ]
    caplog.clear()
    clock.turn(61.0)
    warnings.tick()
    assert caplog.records == []


@pytest.mark.broker
def test_a_database_that_a_newer_tared_has_taken_over_ends_the_collector(
    mosquitto: RealBroker, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "_RETRY_S", 0.05)
    where = postgres.new_database()
    collector = Collector(mosquitto.endpoint, open_store(where))
    with (
        ThreadPoolExecutor(1) as threads,
        Watcher(mosquitto.endpoint) as watcher,
        MqttClient(mosquitto.endpoint, "board") as board,
    ):
        ended = threads.submit(collector.run, lambda: False)
        online(board, watcher)
        with open_store(where) as store, store.transaction() as transaction:
            transaction.execute("UPDATE tared_schema SET version = 99")
            transaction.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid <> pg_backend_pid() AND datname = current_database()"
            )
        board.publish(ONLINE)
        with pytest.raises(AgentError, match=r"fleet\.schema: .* of schema 99"):
            ended.result(20.0)
