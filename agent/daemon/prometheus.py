"""Serve the daemon's metrics to a Prometheus server, read at the moment of the scrape.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters, `_info` for
metrics without a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from agent.common.errors import ConfigError
from agent.control.operations import Operations
from agent.control.reasons import explain
from agent.jobs.job import JobState
from agent.monitoring.camera_monitor import CameraStates
from agent.serving.pipeline import Feed
from agent.system.board import health
from agent.uplink.link import MqttLink

_DRIFT = ("calm", "warning", "alarm")


class PrometheusExporter(Collector):
    """The daemon's metrics; there are none before `set_source`.

    A scrape runs in a thread of its own. Nothing is counted for it: it reads what the daemon counts anyway.
    """

    def __init__(self) -> None:
        self._source: tuple[Operations, MqttLink | None] | None = None

    def set_source(self, operations: Operations, link: MqttLink | None) -> None:
        """Take all further metrics from this run of the daemon."""
        self._source = operations, link

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        if self._source is None:
            return
        operations, link = self._source
        states = operations.pipeline.observer.states()
        yield from _frames(operations.pipeline.feeds)
        yield from _quality({camera: state for camera, state in states.items() if not state.outage})
        yield from _work(operations, states)
        yield from _mqtt(link)
        yield from _board(health())


@contextmanager
def serve_metrics(host: str, port: int) -> Iterator[PrometheusExporter]:
    """Serve `/metrics` while the block runs. Raises ConfigError (`metrics.port`)."""
    exporter = PrometheusExporter()
    registry = CollectorRegistry()
    registry.register(exporter)
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        found = f"{host} port {port}: {error.strerror or error}"
        raise ConfigError("metrics.port", found, "a free port of this machine", "choose another") from None
    try:
        yield exporter
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _frames(feeds: Mapping[str, Feed]) -> Iterator[Metric]:
    loops = {camera: feed.run_meter.totals() for camera, feed in feeds.items()}
    there = GaugeMetricFamily("tared_camera_up", "Whether the camera gives frames now.", labels=["camera"])
    for camera, feed in feeds.items():
        there.add_metric([camera], float(feed.is_up))
    yield there
    served = CounterMetricFamily("tared_frames", "Frames served since the daemon began.", labels=["camera"])
    for camera, loop in loops.items():
        served.add_metric([camera], loop.frames)
    yield served
    dropped = CounterMetricFamily(
        "tared_dropped_frames", "Frames that nobody was served, by cause.", labels=["camera", "cause"]
    )
    for camera, loop in loops.items():
        for cause, count in sorted(loop.dropped.items()):
            dropped.add_metric([camera, cause], count)
    yield dropped
    latency = HistogramMetricFamily(
        "tared_frame_latency_seconds", "From a frame's arrival to its decoded result.", labels=["camera"]
    )
    for camera, loop in loops.items():
        buckets = [(f"{bound_s:.7g}", count) for bound_s, count in loop.latency_buckets]
        latency.add_metric([camera], [*buckets, ("+Inf", loop.frames)], loop.latency_sum_s)
    yield latency


def _quality(observed: CameraStates) -> Iterator[Metric]:
    fidelity = GaugeMetricFamily(
        "tared_fidelity_ratio", "Estimated agreement with the float reference.", labels=["camera", "bound"]
    )
    for camera, state in observed.items():
        for bound in ("estimate", "low", "high") if state.fidelity.n else ():
            fidelity.add_metric([camera, bound], getattr(state.fidelity, bound))
    yield fidelity
    gain = GaugeMetricFamily(
        "tared_drift_predicted_gain_db", "Noise that a recalibration would save now.", labels=["camera"]
    )
    drift = StateSetMetricFamily("tared_drift_state", "Whether the scene has left the calibration.", labels=["camera"])
    for camera, state in observed.items():
        if state.drift is not None:
            gain.add_metric([camera], state.drift.gain_db)
            drift.add_metric([camera], {name: name == state.drift.state for name in _DRIFT})
    yield gain
    yield drift


def _work(operations: Operations, states: CameraStates) -> Iterator[Metric]:
    service, job = operations.service, operations.job
    engine = InfoMetricFamily("tared_engine", "The engine in service.")
    engine.add_metric([], {"artefact": service.serving.id, "degraded": str(service.is_degraded).lower()})
    yield engine
    reasons = explain(operations, states)
    degraded = InfoMetricFamily("tared_degraded", "Why the float reference serves; absent while an INT8 engine does.")
    if reasons.degraded:
        degraded.add_metric([], {"reason": reasons.degraded})
    yield degraded
    held_back = InfoMetricFamily("tared_job_held_back", "Why a job that is due does not start; absent while none is.")
    if reasons.held_back:
        held_back.add_metric([], {"code": reasons.code, "reason": reasons.held_back})
    yield held_back
    steps = StateSetMetricFamily("tared_job_state", "Where the running job is; none is 1 while there is none.")
    here = job.state.value if job is not None else "none"
    steps.add_metric(
        [], {step: step == here for step in ("none", *(each.value for each in JobState if not each.is_finished))}
    )
    yield steps
    up = GaugeMetricFamily("tared_observer_up", "Whether frames are observed now.", labels=["camera"])
    for camera, state in states.items():
        up.add_metric([camera], float(not state.outage))
    yield up


def _mqtt(link: MqttLink | None) -> Iterator[Metric]:
    lost = CounterMetricFamily(
        "tared_mqtt_dropped_messages", "Messages that fell out of a full queue.", labels=["cause"]
    )
    for cause, count in sorted(link.drops.items() if link is not None else ()):
        lost.add_metric([cause], count)
    yield lost
    connected = GaugeMetricFamily("tared_mqtt_connected", "Whether the broker has admitted this device.")
    connected.add_metric([], float(link is not None and link.connected))
    yield connected


def _board(health: Mapping[str, float | str | bool]) -> Iterator[Metric]:
    heat = GaugeMetricFamily("tared_board_temperature_celsius", "Of a sensor of the board.", labels=["sensor"])
    for name, value in sorted(health.items()):
        if name.startswith("temperature_"):
            heat.add_metric([name.removeprefix("temperature_").removesuffix("_c")], float(value))
    yield heat
    gauges = {
        "power_w": ("tared_board_power_watts", "What the board takes."),
        "memory_available_bytes": ("tared_board_memory_available_bytes", "Memory that can still be had."),
        "throttling": ("tared_board_throttling", "Whether heat slows the board down."),
    }
    for key, (name, text) in gauges.items():
        if key in health:
            yield GaugeMetricFamily(name, text, value=float(health[key]))
