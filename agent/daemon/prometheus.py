"""The daemon's metrics for Prometheus, of its newest snapshot at the moment of the scrape.

Names follow https://prometheus.io/docs/practices/naming/: base units, `_total` for counters, `_info` for
metrics without a value. Counters whose labels are known begin at 0: the first increase is seen, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import (
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
    StateSetMetricFamily,
)
from prometheus_client.registry import Collector

from agent.common.metrics import MetricsAddress, MetricsServer, counters, gauges
from agent.config import Config
from agent.control.reasons import explain
from agent.control.snapshot import BoardSnapshot, CameraSnapshot
from agent.core.causes import REFUSED
from agent.core.kinds import Trigger
from agent.core.state import JobState
from agent.monitoring.camera_monitor import CameraStates
from agent.system.board import health
from agent.uplink.link import MqttLink
from agent.uplink.reporter import EventCounts
from calibrate.statistics.evidence import Interval

_DRIFT = ("calm", "warning", "alarm")
_KINDS = ("alarm", "camera", "commit", "drift", "error", "fidelity", "regime", "rollback", "swap", "view")
_ENDS = {state.value: state.value.lower() for state in JobState if state.is_finished}  # by the last step of a job
_REFUSED, _FAILED, _ROLLED_BACK = "refused", "failed", "rolled_back"  # the first for a job that failed by its verdict
_BOUNDS = ("estimate", "low", "high")  # fields of an Interval

_Counts = dict[tuple[str, ...], int]  # by the values of labels
_Key = tuple[str, tuple[tuple[str, str], ...]]  # a sample's name and labels


class DaemonMetrics(Collector):
    """The daemon's metrics; there are none before `set_source`. Collected in the thread of the metrics' server.

    A run of the daemon counts from its own start. Over a change of the model, which begins another run, the counters of
    the run before are carried on.
    """

    def __init__(self) -> None:
        self._source: tuple[Callable[[], BoardSnapshot], MqttLink | None, Mapping[_Key, float]] | None = None

    def set_source(self, newest: Callable[[], BoardSnapshot], link: MqttLink | None) -> None:
        """Take all further metrics from this run of the daemon; the run before has ended.

        newest: Returns the run's newest snapshot, in any thread.
        """
        carried: dict[_Key, float] = {}
        if self._source is not None:
            before, _, carried_before = self._source
            for family in _continued(_of_run(before()), carried_before):
                if _is_counted(family):
                    carried.update({_key(name, labels): value for name, labels, value, *_ in family.samples})
        self._source = newest, link, carried

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        if self._source is None:
            return
        newest, link, carried = self._source
        yield from _continued(_of_run(newest()), carried)
        yield from _mqtt(link)
        yield from _board(health())


def serve_metrics(config: Config, metrics: DaemonMetrics) -> MetricsServer:
    """Return the server of a configuration with `metrics.port`. Raises ConfigError (`metrics.port`)."""
    settings = config.metrics
    assert settings.port is not None
    address = MetricsAddress(settings.host, settings.port, settings.names)
    return MetricsServer(address, {"program": "run", "backend": config.backend}, metrics)


def _of_run(board: BoardSnapshot) -> Iterator[Metric]:
    yield from _frames(board.cameras)
    yield from _quality({camera: state for camera, state in board.states.items() if not state.outage})
    yield from _view(board.states)
    yield from _work(board)
    yield from _events(board.counts, board.cameras)


def _continued(families: Iterable[Metric], carried: Mapping[_Key, float]) -> Iterator[Metric]:
    """Yield the families; counters go on from what is carried. Of other cameras nothing is carried: none comes back."""
    for family in families:
        if carried and _is_counted(family):
            samples = list(family.samples)
            own = {_key(each.name, each.labels) for each in samples}
            names = {each.name for each in samples} or {f"{family.name}_total"}
            family.samples = [
                each._replace(value=each.value + carried.get(_key(each.name, each.labels), 0.0)) for each in samples
            ]
            for (name, labels), value in carried.items():
                if name in names and (name, labels) not in own:
                    family.add_sample(name, dict(labels), value)
        yield family


def _is_counted(family: Metric) -> bool:
    return family.type in ("counter", "histogram")


def _key(name: str, labels: Mapping[str, str]) -> _Key:
    return name, tuple(sorted(labels.items()))


def _frames(cameras: Mapping[str, CameraSnapshot]) -> Iterator[Metric]:
    loops = {name: camera.totals for name, camera in cameras.items()}
    there = {(name,): camera.is_up for name, camera in cameras.items()}
    yield gauges("tared_camera_up", "Whether the camera delivers frames now.", ("camera",), there)
    served = {(camera,): loop.frames for camera, loop in loops.items()}
    yield counters("tared_frames", "Frames served since the daemon began.", ("camera",), served)
    dropped = {(camera, cause): count for camera, loop in loops.items() for cause, count in loop.dropped.items()}
    yield counters("tared_dropped_frames", "Frames that were not served, by cause.", ("camera", "cause"), dropped)
    latency = HistogramMetricFamily(
        "tared_frame_latency_seconds", "From a frame's arrival to its decoded result.", labels=["camera"]
    )
    for camera, loop in loops.items():
        buckets = [(f"{bound_s:.7g}", count) for bound_s, count in loop.latency.cumulative_counts()]
        latency.add_metric([camera], [*buckets, ("+Inf", loop.frames)], loop.latency.sum_ns / 1e9)
    yield latency


def _quality(observed: CameraStates) -> Iterator[Metric]:
    agreement = "Estimated fidelity: agreement with the float reference, and its bounds."
    fidelity = _bounds({camera: state.fidelity for camera, state in observed.items() if state.fidelity.n})
    yield gauges("tared_fidelity_ratio", agreement, ("camera", "bound"), fidelity)
    drifts = {camera: state.drift for camera, state in observed.items() if state.drift is not None}
    gains_db = {(camera,): drift.gain_db for camera, drift in drifts.items()}
    noise = "Noise that a recalibration would save now, in dB."
    yield gauges("tared_drift_predicted_gain_db", noise, ("camera",), gains_db)
    gains = _bounds({camera: drift.gain for camera, drift in drifts.items() if drift.gain is not None})
    worth = "Fidelity that a recalibration would gain now."
    yield gauges("tared_drift_expected_gain_ratio", worth, ("camera", "bound"), gains)
    states = StateSetMetricFamily("tared_drift_state", "Whether the scene has left the calibration.", labels=["camera"])
    for camera, drift in drifts.items():
        states.add_metric([camera], {name: name == drift.state for name in _DRIFT})
    yield states


def _bounds(intervals: Mapping[str, Interval]) -> dict[tuple[str, ...], float]:
    """Return estimates and bounds, by camera and bound."""
    return {(camera, bound): getattr(each, bound) for camera, each in intervals.items() for bound in _BOUNDS}


def _view(states: CameraStates) -> Iterator[Metric]:
    text = "Trouble with the view that no recalibration cures; absent while there is none."
    trouble = {(camera, state.view.trouble): 1.0 for camera, state in states.items() if state.view.trouble}
    yield gauges("tared_view_trouble", text, ("camera", "trouble"), trouble)
    up = {(camera,): not state.outage for camera, state in states.items()}
    yield gauges("tared_observer_up", "Whether frames are observed now.", ("camera",), up)
    shares = [state.spending.share for state in states.values()]  # each state has that of all cameras together
    share = "Time spent on observing, relative to the time of inference, since the start."
    yield GaugeMetricFamily("tared_observing_time_ratio", share, value=max(shares, default=0.0))


def _work(board: BoardSnapshot) -> Iterator[Metric]:
    job, reasons = board.state.job, explain(board)
    engine = {"artefact": board.engine, "degraded": str(board.is_degraded).lower()}
    yield InfoMetricFamily("tared_engine", "The engine in service.", engine)
    degraded = {"reason": reasons.degraded} if reasons.degraded else None
    serves = "Why the float reference serves; absent while an INT8 engine does."
    yield InfoMetricFamily("tared_degraded", serves, degraded)
    held_back = {"code": reasons.code, "reason": reasons.held_back} if reasons.held_back else None
    waits = "Why a job that is due does not start; absent while none is."
    yield InfoMetricFamily("tared_job_held_back", waits, held_back)
    here = job.state.value if job is not None else "none"
    steps = ("none", *(each.value for each in JobState if not each.is_finished))
    here_only = {step: step == here for step in steps}
    yield StateSetMetricFamily("tared_job_state", "Step of the running job; none is 1 while no job runs.", here_only)


def _events(counts: EventCounts, cameras: Iterable[str]) -> Iterator[Metric]:
    """Yield what was reported."""
    ends: _Counts = {(trigger.value, end): 0 for trigger in Trigger for end in (*_ENDS.values(), _REFUSED)}
    codes: _Counts = {(_ROLLED_BACK if code.startswith("probation.") else _REFUSED, code): 0 for code in REFUSED}
    for (trigger, step, code), count in counts.jobs.items():
        if step not in _ENDS:
            continue
        end = _REFUSED if _ENDS[step] == _FAILED and code in REFUSED else _ENDS[step]
        ends[trigger, end] = ends.get((trigger, end), 0) + count
        if code:
            codes[end, code] = codes.get((end, code), 0) + count
    yield counters("tared_jobs", "Jobs that have ended.", ("trigger", "end"), ends)
    yield counters("tared_job_errors", "Jobs that ended without a new engine, by error.", ("end", "code"), codes)
    alarms = dict.fromkeys(cameras, 0) | counts.alarms
    yield counters("tared_drift_alarms", "Drift alarms that have risen, by camera.", ("camera",), _by_one(alarms))
    kinds = dict.fromkeys(_KINDS, 0) | counts.events
    yield counters("tared_events", "Events that were reported, by kind.", ("kind",), _by_one(kinds))
    yield counters("tared_errors", "Errors that the daemon has survived, by code.", ("code",), _by_one(counts.errors))


def _by_one(counts: Mapping[str, int]) -> _Counts:
    return {(label,): count for label, count in counts.items()}


def _mqtt(link: MqttLink | None) -> Iterator[Metric]:
    lost = _by_one(link.drops) if link is not None else {}
    yield counters("tared_mqtt_dropped_messages", "Messages that fell out of a full queue.", ("cause",), lost)
    connected = float(link is not None and link.connected)
    yield GaugeMetricFamily("tared_mqtt_connected", "Whether the broker has admitted this device.", value=connected)
    if link is not None:
        waits = "Age of the oldest telemetry or event that has not arrived; 0 while none waits."
        yield GaugeMetricFamily("tared_mqtt_outbox_oldest_seconds", waits, value=link.outbox.oldest_s)
        takes = "Bytes in the outbox that wait for the broker or a collector."
        yield GaugeMetricFamily("tared_mqtt_outbox_bytes", takes, value=link.outbox.size_bytes)


def _board(health: Mapping[str, float | str | bool]) -> Iterator[Metric]:
    heat = {
        (name.removeprefix("temperature_").removesuffix("_c"),): float(value)
        for name, value in health.items()
        if name.startswith("temperature_")
    }
    yield gauges("tared_board_temperature_celsius", "Temperature of a sensor of the board.", ("sensor",), heat)
    yield from _gauge(health, "power_w", "tared_board_power_watts", "Power that the board takes.")
    available = "Memory that is still available."
    yield from _gauge(health, "memory_available_bytes", "tared_board_memory_available_bytes", available)
    yield from _gauge(health, "throttling", "tared_board_throttling", "Whether heat slows the board down.")


def _gauge(health: Mapping[str, float | str | bool], key: str, name: str, text: str) -> Iterator[Metric]:
    if key in health:
        yield GaugeMetricFamily(name, text, value=float(health[key]))
