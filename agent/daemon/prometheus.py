"""Serve the daemon's metrics to a Prometheus server, read at the moment of the scrape.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters, `_info` for
metrics without a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from agent.daemon.status import DaemonSnapshot
from agent.jobs.job import JobState

_DRIFT = ("calm", "warning", "alarm")


class PrometheusExporter(Collector):
    """The daemon's metrics; there are none before `set_source`.

    A scrape runs in a thread of its own. Nothing is counted for it: it reads what the daemon counts anyway.
    """

    def __init__(self) -> None:
        self._snapshot: Callable[[], DaemonSnapshot] | None = None

    def set_source(self, snapshot: Callable[[], DaemonSnapshot]) -> None:
        """Take all further metrics from this function."""
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        if self._snapshot is None:
            return
        now = self._snapshot()
        yield from _frames(now)
        yield from _quality(now)
        yield from _work(now)
        yield from _board(now)


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


def _frames(now: DaemonSnapshot) -> Iterator[Metric]:
    there = GaugeMetricFamily("tared_camera_up", "Whether the camera gives frames now.", labels=["camera"])
    for camera in now.cameras:
        there.add_metric([camera.name], float(camera.up))
    yield there
    served = CounterMetricFamily("tared_frames", "Frames served since the daemon began.", labels=["camera"])
    for camera in now.cameras:
        served.add_metric([camera.name], camera.loop.frames)
    yield served
    dropped = CounterMetricFamily(
        "tared_dropped_frames", "Frames that nobody was served, by cause.", labels=["camera", "cause"]
    )
    for camera in now.cameras:
        for cause, count in sorted(camera.loop.dropped.items()):
            dropped.add_metric([camera.name, cause], count)
    yield dropped
    latency = HistogramMetricFamily(
        "tared_frame_latency_seconds", "From a frame's arrival to its decoded result.", labels=["camera"]
    )
    for camera in now.cameras:
        buckets = [(f"{bound_s:.7g}", count) for bound_s, count in camera.loop.latency_buckets]
        latency.add_metric([camera.name], [*buckets, ("+Inf", camera.loop.frames)], camera.loop.latency_sum_s)
    yield latency


def _quality(now: DaemonSnapshot) -> Iterator[Metric]:
    """Yield the metrics of observed cameras only."""
    fidelity = GaugeMetricFamily(
        "tared_fidelity_ratio", "Estimated agreement with the float reference.", labels=["camera", "bound"]
    )
    for camera in now.cameras:
        for bound in ("estimate", "low", "high") if camera.fidelity is not None else ():
            fidelity.add_metric([camera.name, bound], getattr(camera.fidelity, bound))
    yield fidelity
    gain = GaugeMetricFamily(
        "tared_drift_predicted_gain_db", "Noise that a recalibration would save now.", labels=["camera"]
    )
    drift = StateSetMetricFamily("tared_drift_state", "Whether the scene has left the calibration.", labels=["camera"])
    for camera in now.cameras:
        if camera.drift is not None:
            gain.add_metric([camera.name], camera.drift.gain_db)
            drift.add_metric([camera.name], {state: state == camera.drift.state for state in _DRIFT})
    yield gain
    yield drift


def _work(now: DaemonSnapshot) -> Iterator[Metric]:
    engine = InfoMetricFamily("tared_engine", "The engine in service.")
    engine.add_metric([], {"artefact": now.engine, "degraded": str(now.degraded).lower()})
    yield engine
    job = StateSetMetricFamily("tared_job_state", "Where the running job is; none is 1 while there is none.")
    here = now.job.value if now.job is not None else "none"
    states = ["none", *(state.value for state in JobState if not state.is_finished)]
    job.add_metric([], {state: state == here for state in states})
    yield job
    observed = GaugeMetricFamily("tared_observer_up", "Whether frames are observed now.", labels=["camera"])
    for camera in now.cameras:
        observed.add_metric([camera.name], float(camera.observed))
    yield observed
    lost = CounterMetricFamily(
        "tared_mqtt_dropped_messages", "Messages that fell out of a full queue.", labels=["cause"]
    )
    for cause, count in sorted(now.mqtt_dropped.items()):
        lost.add_metric([cause], count)
    yield lost
    connected = GaugeMetricFamily("tared_mqtt_connected", "Whether the broker has admitted this device.")
    connected.add_metric([], float(now.mqtt_connected))
    yield connected


def _board(now: DaemonSnapshot) -> Iterator[Metric]:
    heat = GaugeMetricFamily("tared_board_temperature_celsius", "Of a sensor of the board.", labels=["sensor"])
    for name, value in sorted(now.health.items()):
        if name.startswith("temperature_"):
            heat.add_metric([name.removeprefix("temperature_").removesuffix("_c")], float(value))
    yield heat
    gauges = {
        "power_w": ("tared_board_power_watts", "What the board takes."),
        "memory_available_bytes": ("tared_board_memory_available_bytes", "Memory that can still be had."),
        "throttling": ("tared_board_throttling", "Whether heat slows the board down."),
    }
    for key, (name, text) in gauges.items():
        if key in now.health:
            yield GaugeMetricFamily(name, text, value=float(now.health[key]))
