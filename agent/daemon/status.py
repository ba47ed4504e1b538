"""Read the daemon's state for the progress display and for telemetry."""

from __future__ import annotations

from dataclasses import asdict

from pydantic import JsonValue

from agent.contract.messages import (
    Accuracy,
    Bounds,
    CameraTelemetry,
    FidelityReport,
    LabelledAccuracy,
    Latency,
    Observing,
)
from agent.control.executor import Executor
from agent.monitoring.accuracy import accuracy_bound
from agent.monitoring.camera_monitor import CameraState, CameraStates, least_faithful
from agent.monitoring.drift import DriftState
from agent.monitoring.history import HistoryRow
from agent.monitoring.observer import PREPARING
from agent.results.writer import ResultsWriter
from agent.serving.pipeline import Feed
from calibrate.statistics.evidence import Interval

# Fields of DriftState in telemetry: serving_db is the gain over the served engine, gain_db that over the best regime.
_DRIFT_KEYS = ("state", "e_value", "gain_db", "serving_db", "clipping_share")


class StatusReporter:
    """For the supervisor's thread."""

    def __init__(self, executor: Executor, results: ResultsWriter | None) -> None:
        self._executor = executor
        self._published = results.latency if results is not None else {}

    def progress_line(self, states: CameraStates, built_percent: int) -> str:
        """Return the state in a few words, for the progress display; of several cameras, that of the least faithful.

        built_percent: how much of the reference is built.
        """
        camera, service, job = least_faithful(states), self._executor.service, self._executor.state.job
        state, feed = states[camera], self._executor.pipeline.feeds[camera]
        words = [f"{feed.last_ts:6.1f} s"]
        words.append("reference" if service.is_degraded else f"INT8 {service.serving.id[:6]}")
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
        feeds = self._executor.pipeline.feeds
        return {camera: self._sample(feeds[camera], state) for camera, state in states.items()}

    def labelled(self) -> LabelledAccuracy | None:
        """Return what labels of drawn frames come to for the engine in service; None without any."""
        pipeline, service = self._executor.pipeline, self._executor.service
        measured = pipeline.observer.measured
        if measured is None:
            return None
        serving = None if service.is_degraded or measured.doubt else measured.regimes.get(service.serving.id)
        labelled = LabelledAccuracy(
            labels=measured.labels, waiting=measured.waiting, skipped=measured.skipped, doubt=measured.doubt or None
        )
        if serving is None:
            return labelled
        return labelled.model_copy(update={name: Bounds(**each) for name, each in asdict(serving).items()})

    def history(self, states: CameraStates) -> list[HistoryRow]:
        """Return what the history keeps of this moment, camera by camera."""
        service, pipeline = self._executor.service, self._executor.pipeline
        candidate = self._executor.state.candidate  # the figures are of it from its first answer on
        drifts = {camera: None if state.outage else state.drift for camera, state in states.items()}
        return [
            HistoryRow(
                round(pipeline.last_ts, 3),
                camera,
                candidate or service.serving.id,
                candidate is not None or not service.is_degraded,
                _rounded(state.fidelity) if state.fidelity.n and not state.outage else (),
                _rounded(accuracy) if (accuracy := pipeline.feeds[camera].accuracy.estimate.interval).n else (),
                drift.state if (drift := drifts[camera]) is not None else "",
                round(drift.gain_db, 3) if drift is not None else None,
                _rounded(drift.gain) if drift is not None and drift.gain is not None else (),
            )
            for camera, state in states.items()
        ]

    def _sample(self, feed: Feed, state: CameraState) -> CameraTelemetry:
        loop = feed.meter.sample()
        observed, reference = not state.outage, self._executor.config.model.reference_accuracy
        written = self._published[feed.name].sample() if feed.name in self._published else None
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
            published_ms=Latency(p50=written.p50_ms, p99=written.p99_ms) if written and written.frames else None,
            drift=self._drift(state.drift) if state.drift and observed else {},
            fidelity=FidelityReport(**asdict(fidelity), empty=state.empty_frames) if fidelity.n and observed else None,
            fidelity_hour=FidelityReport(**hour.as_dict()) if hour.interval.n and observed else None,
            accuracy=Accuracy(**accuracy.as_dict()) if accuracy.interval.n else None,
            accuracy_lower_bound_if_reference_accuracy_holds=least_accuracy,
            observer=state.outage or None,
            observing=Observing(**asdict(state.spending), state_bytes=state.nbytes + feed.accuracy.answers.nbytes),
        )

    def _drift(self, drift: DriftState) -> dict[str, JsonValue]:
        tolerance_db = self._executor.config.drift.tolerance_db
        shown = {key: getattr(drift, key) for key in _DRIFT_KEYS}
        return {**shown, "gain": asdict(drift.gain) if drift.gain is not None else None, "tolerance_db": tolerance_db}


def _rounded(interval: Interval) -> tuple[float, float, float]:
    return round(interval.estimate, 4), round(interval.low, 4), round(interval.high, 4)
