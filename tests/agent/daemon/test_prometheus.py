"""The metrics of a daemon, as promtool judges them, and their counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from brokers import RealBroker, Watcher
from executor_bench import Desk, desk
from prometheus_client.core import Metric
from prometheus_values import scrape
from promtool import Fixed, metrics_server, promtool
from worlds import World

from agent.common.latency import LoopMeter
from agent.contract.topics import Topics
from agent.daemon import prometheus
from agent.daemon.prometheus import DaemonMetrics
from agent.uplink.reporter import EventCounts
from calibrate.statistics.evidence import Interval

__all__ = ["desk"]  # the fixture


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


def test_values_are_those_of_the_state(desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    at = desk()
    assert at.state.drift is not None
    state = replace(at.state, drift=replace(at.state.drift, state="warning"), fidelity=Interval(0.9, 0.75, 0.95, 40))
    states, metrics = {"gate": state, "yard": replace(state, outage="observer.thread")}, DaemonMetrics()
    monkeypatch.setattr(at.executor.pipeline.observer, "states", lambda: states)
    monkeypatch.setattr(at.executor.pipeline, "feeds", {}, raising=False)
    metrics.set_source(at.executor, None)
    families = list(metrics.collect())
    assert _samples(families, "tared_mqtt_connected") == {(): 0.0}
    assert not _samples(families, "tared_mqtt_outbox_bytes")
    outbox = SimpleNamespace(oldest_s=1.5, size_bytes=2048)
    for connected in (False, True):
        link = SimpleNamespace(connected=connected, drops={"outbox": 2}, outbox=outbox)
        metrics.set_source(at.executor, cast(Any, link))
        families = list(metrics.collect())
        assert _samples(families, "tared_mqtt_connected") == {(): float(connected)}
    assert _samples(families, "tared_mqtt_outbox_oldest_seconds") == {(): 1.5}
    assert _samples(families, "tared_mqtt_outbox_bytes") == {(): 2048.0}
    assert _samples(families, "tared_mqtt_dropped_messages_total") == {("outbox",): 2}
    assert _samples(families, "tared_engine_info") == {(at.int8.id, "false"): 1.0}
    fidelity = {("gate", "estimate"): 0.9, ("gate", "low"): 0.75, ("gate", "high"): 0.95}
    assert _samples(families, "tared_fidelity_ratio") == fidelity, "nothing is known of a camera that is not observed"
    drift = {("gate", "calm"): 0.0, ("gate", "warning"): 1.0, ("gate", "alarm"): 0.0}
    assert _samples(families, "tared_drift_state") == drift
    assert _samples(families, "tared_observer_up") == {("gate",): 1.0, ("yard",): 0.0}
    at.service.calibration = None
    assert _samples(list(metrics.collect()), "tared_engine_info") == {(at.int8.id, "true"): 1.0}


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


def test_counters_go_on_over_a_change_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_of_run", lambda run: prometheus._events(run.counts, ["camera"]))
    metrics = DaemonMetrics()
    for _ in range(3):
        run = SimpleNamespace(counts=EventCounts())
        metrics.set_source(cast(Any, run), None)
        run.counts.note("alarm", {"camera": "camera"})
    run.counts.note("error", {"code": "state.write"})
    metrics.set_source(cast(Any, SimpleNamespace(counts=EventCounts())), None)
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
        assert (totals.frames, totals.dropped, totals.latency_sum_s) == (3, {"stale": 3}, 0.104)
    bounds = dict(totals.latency_buckets)
    assert bounds[2.0**12 * 1e-6] == 2  # 4 ms
    assert list(bounds.values()) == sorted(bounds.values())
