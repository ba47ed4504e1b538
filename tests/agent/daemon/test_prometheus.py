"""The metrics of a daemon, as promtool judges them, and their counters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_values import scrape, value
from promtool import Fixed, metrics_server, promtool
from worlds import World

from agent.common.latency import LatencyHistogram, LoopMeter
from agent.contract.topics import Topics
from agent.daemon import prometheus
from agent.daemon.prometheus import DaemonMetrics
from agent.uplink.reporter import EventCounts


@pytest.fixture
def scraped(calibrated_world: World) -> World:
    calibrated_world.change(metrics={"port": free_port()}, mqtt={"host": "127.0.0.1", "port": 1})
    return calibrated_world


@pytest.mark.slow
def test_a_running_daemon_is_scraped(scraped: World) -> None:
    port = scraped.config["metrics"]["port"]

    def scraped_once() -> bool:
        try:
            return value(port, "tared_frames_total", camera="camera") is not None
        except OSError:
            return False

    with scraped.running():
        eventually(scraped_once, 60.0)
        frames = value(port, "tared_frames_total", camera="camera")
        assert frames is not None
        eventually(lambda: (value(port, "tared_frames_total") or 0.0) > frames)
        eventually(lambda: value(port, "tared_engine_info", degraded="false") == 1.0, 60.0)
        eventually(lambda: value(port, "tared_fidelity_ratio", bound="estimate") is not None, 60.0)
        text = scrape(port)
        families = list(text_string_to_metric_families(text))
    promtool("check", "metrics", content=text)
    names = {family.name for family in families}
    assert names >= {
        "tared_frames", "tared_dropped_frames", "tared_frame_latency_seconds", "tared_fidelity_ratio",
        "tared_drift_predicted_gain_db", "tared_drift_state", "tared_engine_info", "tared_job_state",
        "tared_camera_up", "tared_observer_up", "tared_mqtt_connected", "tared_board_memory_available_bytes",
        "process_cpu_seconds", "tared_build_info", "tared_jobs", "tared_job_errors", "tared_events",
        "tared_drift_alarms", "tared_mqtt_outbox_bytes", "tared_mqtt_outbox_oldest_seconds",
        "tared_observing_time_ratio", "tared_view_trouble",
    }  # fmt: skip
    by_name = {family.name: family for family in families}
    for state in ("tared_job_state", "tared_drift_state"):
        assert sum(sample.value for sample in by_name[state].samples) == 1.0
    latency = by_name["tared_frame_latency_seconds"].samples
    counts = [sample.value for sample in latency if sample.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == next(sample.value for sample in latency if sample.name.endswith("_count"))
    assert next(sample.value for sample in latency if sample.name.endswith("_sum")) > 0.0


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
    counts.note("error", {"code": "history.write", "message": ""})
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
    assert _samples(families, "tared_errors_total")["history.write",] == 1
    with metrics_server(Fixed(*families)) as server:
        promtool("check", "metrics", content=scrape(server._address.port))


def test_counters_go_on_over_a_change_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "_of_run", lambda run: prometheus._events(run.counts, ["camera"]))
    metrics = DaemonMetrics()
    for _ in range(3):
        run = SimpleNamespace(counts=EventCounts())
        metrics.set_source(cast(Any, run), None)
        run.counts.note("alarm", {"camera": "camera"})
    run.counts.note("error", {"code": "history.write"})
    metrics.set_source(cast(Any, SimpleNamespace(counts=EventCounts())), None)
    families = list(metrics.collect())
    assert _samples(families, "tared_drift_alarms_total") == {("camera",): 3}
    assert _samples(families, "tared_events_total")["alarm",] == 3
    assert _samples(families, "tared_errors_total") == {("history.write",): 1}  # counted in a run that has ended


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


@pytest.mark.parametrize("octave", [10, 17])
def test_a_bucket_holds_what_is_below_its_bound(octave: int) -> None:
    histogram = LatencyHistogram()
    histogram.add(int(1000 * 2**octave) - 100)
    histogram.add(int(1000 * 2**octave) + 100)
    assert dict(histogram.cumulative_counts())[2.0**octave * 1e-6] == 1
