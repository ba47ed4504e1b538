"""The metrics of a daemon, as promtool judges them, and their counters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from brokers import RealBroker, Watcher
from prometheus_client.core import Metric
from prometheus_values import scrape
from promtool import Fixed, metrics_server, promtool
from raising_world import config_of, observer_state
from snapshots import a_board
from worlds import World

from agent.common.latency import LoopMeter
from agent.contract.topics import Topics
from agent.daemon import prometheus
from agent.daemon.prometheus import DaemonMetrics
from agent.uplink.reporter import EventCounts
from calibrate.statistics.evidence import Interval


@pytest.mark.trial
@pytest.mark.broker
def test_without_a_port_nothing_listens(calibrated_world: World, any_broker: RealBroker) -> None:
    calibrated_world.change(metrics={"port": None}, mqtt={"host": any_broker.host, "port": any_broker.port})
    with Watcher(any_broker.endpoint) as watcher, calibrated_world.running() as process:
        watcher.expect(Topics("default", "board").telemetry)
        listening = [each for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
    assert listening == []


def _samples(families: list[Metric], name: str) -> dict[tuple[str, ...], float]:
    """By the values of the labels."""
    return {
        tuple(each.labels.values()): each.value for family in families for each in family.samples if each.name == name
    }


def test_values_are_those_of_the_newest_snapshot() -> None:
    drift = observer_state(config_of(), drift="warning")
    state = replace(drift, fidelity=Interval(0.9, 0.75, 0.95, 40))
    boards = [a_board(gate=state, yard=replace(state, outage="observer.thread"))]
    metrics = DaemonMetrics()
    metrics.set_source(lambda: boards[-1], None)
    families = list(metrics.collect())
    assert _samples(families, "tared_mqtt_connected") == {(): 0.0}
    assert not _samples(families, "tared_mqtt_outbox_bytes")
    outbox = SimpleNamespace(oldest_s=1.5, size_bytes=2048)
    for connected in (False, True):
        link = SimpleNamespace(connected=connected, drops={"outbox": 2}, outbox=outbox)
        metrics.set_source(lambda: boards[-1], cast(Any, link))
        families = list(metrics.collect())
        assert _samples(families, "tared_mqtt_connected") == {(): float(connected)}
    assert _samples(families, "tared_mqtt_outbox_oldest_seconds") == {(): 1.5}
    assert _samples(families, "tared_mqtt_outbox_bytes") == {(): 2048.0}
    assert _samples(families, "tared_mqtt_dropped_messages_total") == {("outbox",): 2}
    assert _samples(families, "tared_engine_info") == {("3f9a2c71d0e4b586", "false"): 1.0}
    fidelity = {("gate", "estimate"): 0.9, ("gate", "low"): 0.75, ("gate", "high"): 0.95}
    assert _samples(families, "tared_fidelity_ratio") == fidelity, "nothing is known of a camera that is not observed"
    drifts = {("gate", "calm"): 0.0, ("gate", "warning"): 1.0, ("gate", "alarm"): 0.0}
    assert _samples(families, "tared_drift_state") == drifts
    assert _samples(families, "tared_observer_up") == {("gate",): 1.0, ("yard",): 0.0}
    boards.append(replace(boards[-1], is_degraded=True))
    assert _samples(list(metrics.collect()), "tared_engine_info") == {("3f9a2c71d0e4b586", "true"): 1.0}


def test_jobs_are_counted_by_trigger_end_and_code() -> None:
    counts = EventCounts()
    counts.note("job", {"trigger": "alarm", "step": "COLLECTING"})
    counts.note("job", {"trigger": "alarm", "step": "COMMITTED"})
    counts.note("job", {"trigger": "command", "step": "CANCELLED", "message": "the operator cancels it"})
    counts.note("alarm", {"camera": "street"})
    for trigger, step, code in [
        ("alarm", "FAILED", "recalibration.refused"),
        ("alarm", "FAILED", "recalibration.disk"),
        ("alarm", "ROLLED_BACK", "probation.latency"),
    ]:
        counts.note("error", {"trigger": trigger, "step": step, "code": code, "message": ""})
    counts.note("error", {"code": "state.write", "message": ""})
    families = list(prometheus._events(counts, ["street", "yard"]))
    jobs = _samples(families, "tared_jobs_total")
    assert {labels: count for labels, count in jobs.items() if count} == {
        ("alarm", "committed"): 1, ("alarm", "refused"): 1, ("alarm", "failed"): 1, ("alarm", "rolled_back"): 1,
        ("command", "cancelled"): 1,
    }  # fmt: skip
    assert jobs["schedule", "rolled_back"] == 0  # else an alert would miss the first one
    errors = _samples(families, "tared_job_errors_total")
    assert errors["rolled_back", "probation.latency"] == errors["failed", "recalibration.disk"] == 1
    assert errors["refused", "recalibration.refused"] == 1
    assert errors["rolled_back", "probation.fidelity"] == 0
    assert _samples(families, "tared_drift_alarms_total") == {("street",): 1, ("yard",): 0}
    assert _samples(families, "tared_errors_total")["state.write",] == 1
    with metrics_server(Fixed(*families)) as server:
        promtool("check", "metrics", content=scrape(server._address.port))


def test_counters_go_on_over_a_change_of_the_model() -> None:
    metrics = DaemonMetrics()
    for last in (False, False, True):
        run = a_board()
        metrics.set_source(partial(lambda board: board, run), None)
        run.counts.note("alarm", {"camera": "camera"})
        if last:
            run.counts.note("error", {"code": "state.write"})
    metrics.set_source(a_board, None)
    families = list(metrics.collect())
    assert _samples(families, "tared_drift_alarms_total") == {("camera",): 3}
    assert _samples(families, "tared_events_total")["alarm",] == 3
    assert _samples(families, "tared_errors_total") == {("state.write",): 1}  # counted in a run that has ended


def test_totals_do_not_begin_anew() -> None:
    meter = LoopMeter(lambda: {"stale": 3})
    for latency_ns in (1_000_000, 3_000_000, 100_000_000):
        meter.record(latency_ns)
    for _ in range(2):
        totals = meter.totals()
        assert (totals.frames, totals.dropped, totals.latency.sum_ns) == (3, {"stale": 3}, 104_000_000)
    bounds = dict(totals.latency.cumulative_counts())
    assert bounds[2.0**12 * 1e-6] == 2  # 4 ms
    assert list(bounds.values()) == sorted(bounds.values())
