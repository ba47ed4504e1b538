"""The metrics of the control room's processes: what they count, and that Prometheus can read it."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from collector_bench import a_process, alarm, online
from prometheus_client.core import Metric
from prometheus_values import scrape, value
from promtool import promtool
from rollout_room import Room, accepted, failed
from turned_clock import TurnedClock
from warm_start import WarmProcess

from agent.mqtt.client import MqttClient
from agent.mqtt.message import Message
from fleet.metrics.processes import controller_metrics
from fleet.metrics.store import StoreMetrics, device_metrics, rollout_metrics
from fleet.rollout.rows import RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore


def values(families: list[Metric], name: str) -> dict[tuple[str, ...], float]:
    """Return the samples of a metric, by the values of their labels."""
    samples = [each for family in families for each in family.samples if each.name == name]
    return {tuple(each.labels.values()): each.value for each in samples}


@pytest.mark.broker
def test_a_collector_counts_what_it_takes_and_what_it_refuses(tmp_path: Path, any_broker: RealBroker) -> None:
    where, port = str(tmp_path / "fleet.sqlite"), free_port()
    with (
        Watcher(any_broker.endpoint) as watcher,
        MqttClient(any_broker.endpoint, "board") as board,
        a_process(any_broker, where, "--metrics", f"127.0.0.1:{port}"),
    ):
        eventually(lambda: _answers(port))
        before = time.time()
        online(board, watcher)
        for message in (alarm(1), alarm(2), Message("tared/v1/fleet/board/event", b"{}")):
            board.publish(message)
        eventually(lambda: value(port, "tared_collector_documents_total", kind="report") == 2.0)
        eventually(lambda: value(port, "tared_collector_refused_documents_total", code="message.invalid") == 1.0)
        eventually(lambda: value(port, "tared_collector_waiting_messages", connection="reports") == 0.0)
        assert (value(port, "tared_collector_last_write_timestamp_seconds") or 0.0) >= before
        assert (value(port, "tared_collector_batches_total") or 0.0) >= 1.0
        assert value(port, "tared_collector_connected", connection="results") == 1.0
        assert value(port, "tared_build_info", program="collect") == 1.0
        promtool("check", "metrics", content=scrape(port))


@pytest.mark.broker
def test_a_controller_serves_its_metrics(tmp_path: Path, any_broker: RealBroker) -> None:
    where, port = tmp_path / "fleet.sqlite", free_port()
    with open_store(where) as store, store.transaction("write"):
        pass  # it exists
    arguments = ["fleet", "rollout", "run", "--db", str(where), "--port", str(any_broker.port)]
    process = WarmProcess([*arguments, "--metrics", f"127.0.0.1:{port}"])
    try:
        eventually(lambda: _answers(port) and value(port, "tared_controller_connected") == 1.0)
        text = scrape(port)
        assert "tared_rollouts{" in text
        promtool("check", "metrics", content=text)
    finally:
        process.kill()
        process.wait()


def test_devices_are_counted_by_fleet_and_state(store: FleetStore) -> None:
    room = Room(store, RolloutSpec(op="recalibrate"), boards=3)
    room.serves({7: "e0"})
    with store.transaction("write") as transaction:
        transaction.execute("UPDATE devices SET last_seen = ? WHERE name = 'b7'", (room.clock.wall_s() - 3600.0,))
        transaction.execute("INSERT INTO devices (fleet, name, first_seen, last_seen) VALUES ('g', 'x', 1.0, 0.0)")
    families = device_metrics(store, room.clock.wall_s())
    assert values(families, "tared_fleet_devices") == {("f", "online"): 4.0, ("g", "unknown"): 1.0}
    assert values(families, "tared_fleet_heard_devices") == {("f", "online"): 3.0, ("g", "unknown"): 0.0}


def test_rollouts_are_counted_by_state_and_their_boards_by_step(store: FleetStore) -> None:
    spec = RolloutSpec(op="recalibrate", waves="1,100%", gates="failures<=2%", soak_s=0.0)
    room = Room(store, spec, boards=3)
    room.step()
    room.step()
    (order,) = room.open().values()
    room.step(accepted(order))
    families = rollout_metrics(store, room.clock.wall_s())
    assert values(families, "tared_rollouts")["RUNNING",] == 1.0
    assert values(families, "tared_rollouts")["ROLLED_BACK",] == 0.0
    assert values(families, "tared_rollout_wave") == {("f", room.id, "recalibrate"): 1.0}
    assert values(families, "tared_rollout_waves") == {("f", room.id, "recalibrate"): 2.0}
    steps = values(families, "tared_rollout_boards")
    assert (steps["f", room.id, "SENT"], steps["f", room.id, "WAITING"]) == (1.0, 2.0)
    assert values(families, "tared_rollout_gate_failures_total") == {(): 0.0}
    assert values(families, "tared_rollouts_unheld") == {(): 0.0}
    room.step(failed(order, "recalibration.refused"))
    room.until(RolloutState.ROLLED_BACK)
    families = rollout_metrics(store, room.clock.wall_s())
    assert values(families, "tared_rollout_gate_failures_total") == {(): 1.0}
    assert values(families, "tared_rollouts")["ROLLED_BACK",] == 1.0
    assert values(families, "tared_rollout_boards") == {}


def test_a_store_that_cannot_be_read_is_a_metric_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = TurnedClock()
    metrics = StoreMetrics(str(tmp_path / "none.sqlite"), device_metrics, clock)
    for _ in range(3):
        clock.turn(10.0)
        assert [(each.name, each.samples[0].value) for each in metrics.collect()] == [("tared_fleet_store_up", 0.0)]
    assert caplog.text.count("store=unreadable") == 1


def test_a_reading_of_the_store_is_shared_by_scrapes(where: str) -> None:
    with open_store(where) as store, store.transaction("write"):
        pass  # it exists
    read = list[FleetStore]()

    def once(opened: FleetStore, now: float) -> list[Metric]:
        read.append(opened)
        return device_metrics(opened, now)

    clock = TurnedClock()
    metrics = StoreMetrics(where, once, clock)
    for readings in (1, 1, 2):
        assert values(list(metrics.collect()), "tared_fleet_store_up") == {(): 1.0}
        assert len(read) == readings
        clock.turn(5.0)


def test_a_controller_counts_what_it_has_ended() -> None:
    ended = [
        SimpleNamespace(state=state) for state in (RolloutState.COMPLETED, RolloutState.COMPLETED, RolloutState.ABORTED)
    ]
    controller = cast(Any, SimpleNamespace(connected=False, rollouts={"r1": None}, ended=ended))
    families = list(controller_metrics(controller))
    counts = values(families, "tared_controller_ended_rollouts_total")
    assert counts == {("COMPLETED",): 2.0, ("ROLLED_BACK",): 0.0, ("ABORTED",): 1.0}
    assert values(families, "tared_controller_connected") == {(): 0.0}


def _answers(port: int) -> bool:
    try:
        return bool(scrape(port))
    except OSError:
        return False
