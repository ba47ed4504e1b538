"""Read the daemon's state for the progress display, for telemetry, and for a Prometheus scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agent.common.latency import LoopTotals
from agent.config import Config
from agent.contract.messages import Accuracy, CameraTelemetry, FidelityReport, Latency, Observing
from agent.jobs.job import JobState, JobTracker
from agent.models.engine_service import EngineService
from agent.monitoring.accuracy import accuracy_bound
from agent.monitoring.camera_monitor import CameraState, CameraStates, least_faithful
from agent.monitoring.drift import DriftState
from agent.monitoring.observer import PREPARING
from agent.results.writer import ResultsWriter
from agent.serving.pipeline import Feed, Pipeline
from agent.system.board import health
from agent.uplink.link import MqttLink
from calibrate.evidence import Interval

# Of DriftState, in telemetry: serving_db is the gain over the served engine, gain_db that over the best regime.
_DRIFT_KEYS = ("state", "e_value", "gain_db", "serving_db", "clipping_share")


@dataclass(frozen=True)
class CameraSnapshot:
    """One camera at one moment. None is unknown: nothing is observed now."""

    name: str
    up: bool
    loop: LoopTotals
    fidelity: Interval | None
    drift: DriftState | None
    observed: bool


@dataclass(frozen=True)
class DaemonSnapshot:
    """The daemon at one moment."""

    cameras: Sequence[CameraSnapshot]
    engine: str
    degraded: bool
    job: JobState | None
    mqtt_connected: bool
    mqtt_dropped: Mapping[str, int]
    health: Mapping[str, float | str | bool]


class StatusReporter:
    """For the supervisor's thread; `snapshot` may be called by any."""

    def __init__(
        self, config: Config, service: EngineService, pipeline: Pipeline, results: ResultsWriter | None
    ) -> None:
        self._config = config
        self._service = service
        self._pipeline = pipeline
        self._published = results.latency if results is not None else {}

    def progress_line(self, states: CameraStates, job: JobTracker | None, built_percent: int) -> str:
        """Return the state in a few words, for the progress display; of several cameras, that of the least faithful.

        built_percent: how much of the reference is built.
        """
        camera = least_faithful(states)
        state, feed = states[camera], self._pipeline.feeds[camera]
        words = [f"{feed.last_ts:6.1f} s"]
        words.append("reference" if self._service.is_degraded else f"INT8 {self._service.serving.id[:6]}")
        if len(states) > 1:
            words.append(camera)
        if state.drift is not None:
            words.append(f"drift {state.drift.state} {state.drift.gain_db:.1f} dB")
        if state.fidelity.n:
            words.append(f"fidelity {state.fidelity.estimate:.3f}")
        accuracy = feed.accuracy.estimate.interval
        if accuracy.n:
            words.append(f"accuracy {accuracy.estimate:.3f}")
        if state.outage:
            built = state.outage == PREPARING and built_percent
            words.append(f"observer {built_percent} %" if built else f"observer {state.outage}")
        if job is not None:
            words.append(job.description)
        return "  ".join(words)

    def telemetry(self, states: CameraStates) -> dict[str, CameraTelemetry]:
        """Return the telemetry of each camera."""
        return {camera: self._sample(self._pipeline.feeds[camera], state) for camera, state in states.items()}

    def _sample(self, feed: Feed, state: CameraState) -> CameraTelemetry:
        loop = feed.meter.sample()
        observed, reference = not state.outage, self._config.model.reference_accuracy
        fidelity, hour, accuracy = state.fidelity, state.fidelity_hour, feed.accuracy.estimate
        least_accuracy = None
        if observed and reference is not None and fidelity.n:
            least_accuracy = accuracy_bound(reference, fidelity)
        return CameraTelemetry(
            fps=loop.fps,
            up=feed.is_up,
            lost=feed.lost or None,
            dropped=dict(loop.dropped),
            latency_ms=Latency(p50=loop.p50_ms, p99=loop.p99_ms),
            published_ms=self._published_ms(feed.name),
            drift={key: getattr(state.drift, key) for key in _DRIFT_KEYS} if state.drift and observed else {},
            fidelity=FidelityReport(**asdict(fidelity), empty=state.empty_frames) if fidelity.n and observed else None,
            fidelity_hour=FidelityReport(**hour.as_dict()) if hour.interval.n and observed else None,
            accuracy=Accuracy(**accuracy.as_dict()) if accuracy.interval.n else None,
            accuracy_lower_bound_if_reference_accuracy_holds=least_accuracy,
            observer=state.outage or None,
            observing=Observing(**asdict(state.spending), state_bytes=state.nbytes + feed.accuracy.nbytes),
        )

    def _published_ms(self, camera: str) -> Latency | None:
        meter = self._published.get(camera)
        sample = meter.sample() if meter is not None else None
        return Latency(p50=sample.p50_ms, p99=sample.p99_ms) if sample is not None and sample.frames else None

    def snapshot(self, job: JobTracker | None, link: MqttLink | None) -> DaemonSnapshot:
        """Return the state for a scrape; any thread may call it, and no meter is reset by it."""
        cameras = []
        for name, state in self._pipeline.observer.states().items():
            feed, observed = self._pipeline.feeds[name], not state.outage
            fidelity = state.fidelity if state.fidelity.n and observed else None
            drift = state.drift if observed else None
            cameras.append(CameraSnapshot(name, feed.is_up, feed.run_meter.totals(), fidelity, drift, observed))
        return DaemonSnapshot(
            cameras=cameras,
            engine=self._service.serving.id,
            degraded=self._service.is_degraded,
            job=job.state if job is not None else None,
            mqtt_connected=link is not None and link.connected,
            mqtt_dropped=link.drops if link is not None else {},
            health=health(),
        )
