"""What is told of the moment: on the progress display, in telemetry, and to a scrape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pydantic import JsonValue

from agent.common.latency import LoopTotals
from agent.config import Config
from agent.contract.messages import Accuracy, CameraTelemetry, FidelityReport, Latency, Observing
from agent.jobs.job import JobState
from agent.jobs.report import JobTracker
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


@dataclass(frozen=True)
class CameraSnapshot:
    """One camera at one moment; None is unknown: what nobody observes now."""

    name: str
    up: bool
    loop: LoopTotals
    fidelity: Interval | None
    drift: DriftState | None
    observed: bool


@dataclass(frozen=True)
class DaemonSnapshot:
    """The daemon at one moment, as a scrape tells it."""

    cameras: Sequence[CameraSnapshot]
    engine: str
    degraded: bool
    job: JobState | None
    mqtt_connected: bool
    mqtt_dropped: Mapping[str, int]
    health: Mapping[str, float | str | bool]


class StatusReporter:
    """The supervisor's thread asks, and for a `moment` any."""

    def __init__(
        self, config: Config, service: EngineService, pipeline: Pipeline, results: ResultsWriter | None
    ) -> None:
        self._config = config
        self._service = service
        self._pipeline = pipeline
        self._published = results.latency if results is not None else {}

    def note(self, states: CameraStates, job: JobTracker | None, built_percent: int) -> str:
        """The state in a few words, for the progress display; of several cameras, that of the least faithful.

        built_percent: of the reference, where that is built.
        """
        camera = least_faithful(states)
        state, feed = states[camera], self._pipeline.feeds[camera]
        words = [f"{feed.last_ts:6.1f} s"]
        words.append("reference" if self._service.degraded else f"INT8 {self._service.serving.id[:6]}")
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
            words.append(job.words)
        return "  ".join(words)

    def samples(self, states: CameraStates) -> dict[str, CameraTelemetry]:
        """What telemetry tells of each camera."""
        return {camera: self._sample(self._pipeline.feeds[camera], state) for camera, state in states.items()}

    def _sample(self, feed: Feed, state: CameraState) -> CameraTelemetry:
        loop = feed.meter.sample()
        drift = state.drift if not state.outage else None  # what nobody observes now is not known now
        fidelity, hour, accuracy = state.fidelity, state.fidelity_hour, feed.accuracy.estimate
        observed = not state.outage
        return CameraTelemetry(
            fps=loop.fps,
            up=feed.up,
            lost=feed.lost or None,
            dropped=dict(loop.dropped),
            latency_ms=Latency(p50=loop.p50_ms, p99=loop.p99_ms),
            published_ms=self._published_ms(feed.name),
            drift=_drift(drift) if drift else {},
            fidelity=FidelityReport(**asdict(fidelity), empty=state.empty_frames) if fidelity.n and observed else None,
            fidelity_hour=FidelityReport(**hour.as_dict()) if hour.interval.n and observed else None,
            accuracy=Accuracy(**accuracy.as_dict()) if accuracy.interval.n else None,
            accuracy_lower_bound_if_reference_accuracy_holds=self._accuracy_bound(fidelity) if observed else None,
            observer=state.outage or None,
            observing=Observing(**asdict(state.spending), state_bytes=state.nbytes + feed.accuracy.nbytes),
        )

    def _published_ms(self, camera: str) -> Latency | None:
        meter = self._published.get(camera)
        found = meter.sample() if meter is not None else None
        return Latency(p50=found[0], p99=found[1]) if found is not None else None

    def moment(self, job: JobTracker | None, link: MqttLink | None) -> DaemonSnapshot:
        """What there is to tell to a scrape; any thread may ask, and nothing begins anew by it."""
        states = self._pipeline.observer.states()
        return DaemonSnapshot(
            cameras=[_camera_moment(self._pipeline.feeds[camera], state) for camera, state in states.items()],
            engine=self._service.serving.id,
            degraded=self._service.degraded,
            job=job.state if job is not None else None,
            mqtt_connected=link is not None and link.connected,
            mqtt_dropped=link.drops if link is not None else {},
            health=health(),
        )

    def _accuracy_bound(self, fidelity: Interval) -> float | None:
        """What top-1 accuracy is at least, by the owner's word on the reference: see `accuracy_bound`."""
        reference = self._config.model.reference_accuracy
        return accuracy_bound(reference, fidelity) if reference is not None and fidelity.n else None


def _camera_moment(feed: Feed, state: CameraState) -> CameraSnapshot:
    observed = not state.outage
    return CameraSnapshot(
        name=feed.name,
        up=feed.up,
        loop=feed.run_meter.totals(),
        fidelity=state.fidelity if state.fidelity.n and observed else None,
        drift=state.drift if observed else None,
        observed=observed,
    )


def _drift(drift: DriftState) -> dict[str, JsonValue]:
    """What telemetry tells of it; serving_db is the gain over the engine in service, gain_db over the best regime."""
    keys = ("state", "e_value", "gain_db", "serving_db", "clipping_share")
    return {key: getattr(drift, key) for key in keys}
