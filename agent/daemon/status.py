"""Show a snapshot of the board: the answer to `status`, telemetry, a row of the history, the line of the display."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from agent.contract.board_status import BoardStatus, CameraStatus, DriftStatus, JobStatus, PreviewStatus
from agent.contract.messages import (
    Accuracy,
    Bounds,
    CameraTelemetry,
    FidelityReport,
    LabelledAccuracy,
    Latency,
    Observing,
)
from agent.control.reasons import explain
from agent.control.snapshot import BoardSnapshot, CameraSnapshot
from agent.control.summary import CameraSummary, RunSummary
from agent.core.state import Job
from agent.monitoring.accuracy import accuracy_bound
from agent.monitoring.drift import DriftState
from agent.monitoring.history import HistoryRow
from agent.monitoring.observer import PREPARING
from calibrate.statistics.evidence import Interval


def status_of(board: BoardSnapshot) -> BoardStatus:
    """Return the answer to `status`."""
    reasons, worst, job = explain(board), board.least_faithful, board.state.job
    cameras = {name: _camera(name, camera) for name, camera in board.cameras.items()}
    return BoardStatus(
        engine=board.engine,
        backend=board.backend,
        degraded=board.is_degraded,
        degraded_reason=reasons.degraded or None,
        held_back=reasons.held_back or None,
        held_back_code=reasons.code or None,
        raised=board.is_raised,
        frames=board.totals.frames,
        **dict(cameras[worst]),
        **_given(cameras=cameras if len(cameras) > 1 else None),
        regimes=len(board.regimes),
        regime_artefacts=[*board.regimes],
        policy=board.policies.get(board.serving),
        policies={**board.policies},
        observer=board.cameras[worst].state.outage or "observing",
        automatic=not board.stopped_by,
        stopped_by=board.stopped_by,
        job=_job(job) if job is not None else None,
        preview=PreviewStatus.model_validate(board.preview) if board.preview is not None else None,
    )


def progress_line(board: BoardSnapshot, built_percent: int) -> str:
    """Return the state in a few words, for the progress display; of several cameras, that of the least faithful.

    built_percent: How much of the reference is built.
    """
    name, job = board.least_faithful, board.state.job
    camera = board.cameras[name]
    state, accuracy = camera.state, camera.accuracy.interval
    words = [f"{camera.last_ts:6.1f} s"]
    words.append("reference" if board.is_degraded else f"INT8 {board.engine[:6]}")
    if len(board.cameras) > 1:
        words.append(name)
    if state.drift is not None:
        words.append(f"drift {state.drift.state} {state.drift.gain_db:.1f} dB")
    if state.fidelity.n:
        words.append(f"fidelity {state.fidelity.estimate:.3f}")
    if accuracy.n:
        words.append(f"accuracy {accuracy.estimate:.3f}")
    if state.outage:
        built = state.outage == PREPARING and built_percent
        words.append(f"observer {built_percent} %" if built else f"observer {state.outage}")
    if job is not None:
        words.append(job.description)
    return "  ".join(words)


def telemetry_of(board: BoardSnapshot) -> dict[str, CameraTelemetry]:
    """Return the telemetry of each camera. The snapshot was taken for telemetry."""
    return {name: _sample(board, camera) for name, camera in board.cameras.items()}


def labelled_accuracy(board: BoardSnapshot) -> LabelledAccuracy | None:
    """Return what labels of drawn frames come to for the engine in service; None without any."""
    measured = board.measured
    if measured is None:
        return None
    serving = None if board.is_degraded or measured.doubt else measured.regimes.get(board.engine)
    labelled = LabelledAccuracy(
        labels=measured.labels, waiting=measured.waiting, skipped=measured.skipped, doubt=measured.doubt or None
    )
    if serving is None:
        return labelled
    return labelled.model_copy(update={name: Bounds(**each) for name, each in asdict(serving).items()})


def history_rows(board: BoardSnapshot) -> list[HistoryRow]:
    """Return what the history keeps of this moment, camera by camera; the figures are of the engine that answers."""
    ts, is_int8 = round(board.last_ts, 3), board.state.candidate is not None or not board.is_degraded
    return [_history_row(ts, name, board.serving, is_int8, camera) for name, camera in board.cameras.items()]


def complete(summary: RunSummary, board: BoardSnapshot) -> None:
    """Add what the frames have shown; with several cameras, fidelity is that of the least faithful one."""
    cameras = {
        name: CameraSummary(
            camera.totals.sample(), camera.state.fidelity, camera.accuracy if camera.accuracy.interval.n else None
        )
        for name, camera in board.cameras.items()
    }
    worst, reasons = board.least_faithful, explain(board)
    summary.loop, summary.last_ts = board.totals.sample(), board.last_ts
    summary.fidelity, summary.fidelity_since = cameras[worst].fidelity, board.cameras[worst].state.fidelity_since
    summary.live_accuracy = cameras[worst].live_accuracy
    summary.cameras = cameras if len(cameras) > 1 else {}
    summary.degraded, summary.held_back = reasons.degraded, reasons.held_back
    summary.results_dropped = board.results_dropped


def _given(**fields: object) -> dict[str, Any]:
    """Return the fields that have a value; the others are absent from the document."""
    return {name: value for name, value in fields.items() if value}


def _camera(name: str, camera: CameraSnapshot) -> CameraStatus:
    state = camera.state
    return CameraStatus(
        camera=name,
        up=camera.is_up,
        lost=camera.lost or None,
        fidelity=Bounds(**asdict(state.fidelity)),
        fidelity_hour=FidelityReport(**state.fidelity_hour.as_dict()),
        accuracy=Accuracy(**camera.accuracy.as_dict()),
        drift=_drift(state.drift) if state.drift is not None else None,
        view=(state.view.trouble or "good") if camera.is_up else None,  # unknown while there are no frames
    )


def _job(job: Job) -> JobStatus:
    trigger, step = job.kind.trigger.value, job.state.value
    return JobStatus(id=job.id, trigger=trigger, state=step, percent=job.percent, **_given(waits=job.waits))


def _history_row(ts: float, name: str, engine: str, is_int8: bool, camera: CameraSnapshot) -> HistoryRow:
    state, accuracy = camera.state, camera.accuracy.interval
    drift = None if state.outage else state.drift
    return HistoryRow(
        ts,
        name,
        engine,
        is_int8,
        _rounded(state.fidelity) if state.fidelity.n and not state.outage else (),
        _rounded(accuracy) if accuracy.n else (),
        drift.state if drift is not None else "",
        round(drift.gain_db, 3) if drift is not None else None,
        _rounded(drift.gain) if drift is not None and drift.gain is not None else (),
    )


def _sample(board: BoardSnapshot, camera: CameraSnapshot) -> CameraTelemetry:
    state, served, published = camera.state, camera.served, camera.published
    assert served is not None
    observed, reference = not state.outage, board.reference_accuracy
    fidelity, hour, accuracy = state.fidelity, state.fidelity_hour, camera.accuracy
    least_accuracy = None
    if observed and reference is not None and fidelity.n:
        least_accuracy = accuracy_bound(reference, fidelity)
    return CameraTelemetry(
        fps=served.fps,
        up=camera.is_up,
        lost=camera.lost or None,
        dropped=dict(served.dropped),
        latency_ms=Latency(p50=served.p50_ms, p99=served.p99_ms),
        published_ms=Latency(p50=published.p50_ms, p99=published.p99_ms) if published and published.frames else None,
        drift=_drift(state.drift).in_telemetry(board.tolerance_db) if state.drift and observed else {},
        fidelity=FidelityReport(**asdict(fidelity), empty=state.empty_frames) if fidelity.n and observed else None,
        fidelity_hour=FidelityReport(**hour.as_dict()) if hour.interval.n and observed else None,
        accuracy=Accuracy(**accuracy.as_dict()) if accuracy.interval.n else None,
        accuracy_lower_bound_if_reference_accuracy_holds=least_accuracy,
        observer=state.outage or None,
        observing=Observing(**asdict(state.spending), state_bytes=state.nbytes + camera.answers_bytes),
    )


def _drift(drift: DriftState) -> DriftStatus:
    return DriftStatus(**asdict(drift))


def _rounded(interval: Interval) -> tuple[float, float, float]:
    return round(interval.estimate, 4), round(interval.low, 4), round(interval.high, 4)
