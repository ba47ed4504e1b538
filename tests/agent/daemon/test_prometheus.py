"""What a Prometheus server scrapes from a daemon that runs, by the rules of `promtool check metrics`.

The rules: https://github.com/prometheus/client_golang, prometheus/testutil/promlint, and
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import re

import psutil
import pytest
from brokers import RealBroker, Watcher, eventually, free_port
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_values import scrape, value
from worlds import World

from agent.common.errors import ConfigError
from agent.common.latency import LatencyHistogram, LoopMeter
from agent.contract.topics import Topics
from agent.daemon.prometheus import serve_metrics

_NO_BASE_UNIT = re.compile(r"_(milliseconds|ms|microseconds|us|minutes|hours|kilobytes|kb|mb|percent|fahrenheit)(_|$)")
_TYPE_IN_NAME = re.compile(r"_(gauge|counter|histogram|summary)(_|$)")


def problems(families: list[Metric], text: str) -> list[str]:
    """What promtool would say."""
    found = []
    for family in families:
        name = family.name
        sample_names = {sample.name for sample in family.samples}
        if not family.documentation:
            found.append(f"{name}: no help text")
        if family.type == "counter" and not all(each.endswith(("_total", "_created")) for each in sample_names):
            found.append(f"{name}: a counter without _total")
        if family.type != "counter" and name.endswith("_total"):
            found.append(f"{name}: _total is for counters")
        if family.type not in ("histogram", "summary") and re.search(r"_(count|sum|bucket)$", name):
            found.append(f"{name}: a suffix of histograms")
        if _NO_BASE_UNIT.search(name) or _TYPE_IN_NAME.search(name) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            found.append(f"{name}: no name by the conventions")
        if f"# TYPE {name} " not in text and f"# TYPE {name}_total " not in text:
            found.append(f"{name}: no TYPE")
        labels = {label for sample in family.samples for label in sample.labels}
        found += [f"{name}: label {label}" for label in labels if not re.fullmatch(r"[a-z_]+", label) and label != name]
    return found


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
    assert problems(families, text) == []
    names = {family.name for family in families}
    assert names >= {
        "tared_frames", "tared_dropped_frames", "tared_frame_latency_seconds", "tared_fidelity_ratio",
        "tared_drift_predicted_gain_db", "tared_drift_state", "tared_engine_info", "tared_job_state",
        "tared_camera_up", "tared_observer_up", "tared_mqtt_connected", "tared_board_memory_available_bytes",
        "process_cpu_seconds",
    }  # fmt: skip
    by_name = {family.name: family for family in families}
    for state in ("tared_job_state", "tared_drift_state"):
        assert sum(sample.value for sample in by_name[state].samples) == 1.0
    latency = by_name["tared_frame_latency_seconds"].samples
    counts = [sample.value for sample in latency if sample.name.endswith("_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == next(sample.value for sample in latency if sample.name.endswith("_count"))
    assert next(sample.value for sample in latency if sample.name.endswith("_sum")) > 0.0


@pytest.mark.slow
@pytest.mark.broker
def test_without_a_port_nothing_listens(calibrated_world: World, any_broker: RealBroker) -> None:
    calibrated_world.change(metrics={"port": None}, mqtt={"host": any_broker.host, "port": any_broker.port})
    with Watcher(any_broker.endpoint) as watcher, calibrated_world.running() as process:
        watcher.expect(Topics("default", "board").telemetry)
        listening = [each for each in psutil.Process(process.pid).net_connections() if each.status == "LISTEN"]
    assert listening == []


def test_the_rules_notice_bad_names() -> None:
    bad = GaugeMetricFamily("tared_latency_ms", "", value=1.0)
    assert len(problems([bad], "")) == 3


def test_a_port_that_is_taken_is_named(any_broker: RealBroker) -> None:
    with (
        pytest.raises(ConfigError, match=r"metrics\.port.*choose another"),
        serve_metrics("127.0.0.1", any_broker.port),
    ):
        pass


def test_nobody_is_asked_before_there_is_a_daemon() -> None:
    port = free_port()
    with serve_metrics("127.0.0.1", port):
        assert value(port, "tared_frames_total") is None
        assert value(port, "process_cpu_seconds_total") is not None


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
