"""The recalibration child: calibrate, build and judge one candidate in a process of its own.

`python -m agent.candidate JOB_DIRECTORY` reads what the daemon collected and prints one JSON object per line:
progress `{"step", "percent"}`, and last `{"outcome": "accepted", "artefact", "verdict"}` or `{"outcome": "refused" |
"failed", "error": {"code", "found", "expected", "remedy"}}`. A builder that crashes or eats the memory takes this
process down, never the video.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.build import Model, build_artefact, open_model
from agent.errors import AgentError
from agent.fidelity import fidelity
from agent.model_spec import ModelSpec
from agent.telemetry import LatencyHistogram
from agent.vision import VisionTask
from calibrate.errors import CalibrationError, TaredError
from calibrate.histogram import AbsHistogram
from engines.backend import Backend, Engine, open_backend
from engines.calibration import calibrate_histograms, load_histograms, save_histograms
from engines.store import Store, read_artefact

Emit = Callable[[Mapping[str, Any]], None]
HeldOut = Sequence[NDArray[np.float32]]


@dataclass(frozen=True)
class JobRequest:
    """What the daemon asks of the child; the collected data lies beside it.

    serving: directory of the artefact in service, None while the reference engine serves.
    max_loss: largest 1 - mean fidelity at which a candidate is good whatever serves now.
    """

    spec: dict[str, Any]
    model_sha256: str
    backend: str
    threads: int
    method: str
    frames: int
    source: str
    state_dir: str
    serving: str | None
    max_loss: float
    nice: int


@dataclass(frozen=True)
class Verdict:
    """How a candidate did on the held-out frames beside the engine in service and the reference.

    frames: held-out frames; on empty_frames of them nobody detected anything, so they agree without telling anything.
    fidelity: mean over all frames, in [0, 1]. gain_low, gain_high: what it gains over the engine in service, two
    standard errors either way. Latencies are medians in ms, interleaved in one process.
    """

    accepted: bool
    reason: str
    frames: int
    empty_frames: int
    fidelity: float
    fidelity_serving: float | None
    gain_low: float
    gain_high: float
    latency_ms: float
    latency_serving_ms: float | None


class CandidateRefused(AgentError):
    """The candidate is not good enough; carries its verdict."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(
            "recalibration.refused",
            verdict.reason,
            "frames with something on them, and a loss within recalibration.max_loss or clearly below today's",
            "the engine in service serves on; a model that plain INT8 does not suit needs layers kept float",
        )
        self.verdict = verdict


def write_job(directory: Path, request: JobRequest, histograms: Mapping[str, AbsHistogram], held_out: HeldOut) -> None:
    """Lay down a job for the child; `directory` must not exist yet."""
    directory.mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps(asdict(request)), encoding="utf-8")
    save_histograms(histograms, directory / "histograms.npz")
    np.save(directory / "held_out.npy", np.concatenate(held_out))


def run_job(directory: Path, emit: Emit) -> dict[str, Any]:
    """Do the job; returns the accepted artefact's path and verdict. Raises TaredError, CandidateRefused."""
    request = JobRequest(**json.loads((directory / "job.json").read_text(encoding="utf-8")))
    emit({"step": "CALIBRATING", "percent": 0})
    backend = open_backend(request.backend, request.threads)
    model = open_model(ModelSpec.model_validate(request.spec), backend)
    if model.sha256 != request.model_sha256:
        raise CalibrationError(
            "calibration.model",
            f"{model.spec.path} has changed since the daemon started",
            "the model that was observed",
            "restart the daemon",
        )
    calibration = calibrate_histograms(
        load_histograms(directory / "histograms.npz"),
        model.placement.shared,
        model_sha256=model.sha256,
        method=request.method,
        frames=request.frames,
        source=request.source,
    )
    held_out = np.split(images := np.load(directory / "held_out.npy", allow_pickle=False), len(images))
    verdicts: list[Verdict] = []

    def judge_engine(engine: Engine) -> Mapping[str, Any]:
        emit({"step": "VALIDATING", "percent": 70})
        verdict = judge(model, backend, engine, request.serving, held_out, request.max_loss)
        if not verdict.accepted:
            raise CandidateRefused(verdict)
        verdicts.append(verdict)
        return {"verdict": asdict(verdict)}

    emit({"step": "BUILDING", "percent": 30})
    artefact = build_artefact(
        model,
        backend,
        Store(Path(request.state_dir)).place,
        lambda fraction, _: emit({"step": "BUILDING", "percent": 30 + round(40 * fraction)}),
        calibration=calibration,
        judge=judge_engine,
    )
    return {"artefact": str(artefact.path), "verdict": asdict(verdicts[0])}


def judge(
    model: Model, backend: Backend, candidate: Engine, serving: str | None, held_out: HeldOut, max_loss: float
) -> Verdict:
    """Run reference, engine in service and candidate frame by frame in turn, and compare.

    held_out: network inputs (1, C, H, W). With no engine in service the candidate must keep max_loss; with one, it
    must not be worse than it beyond two standard errors, and must keep max_loss or be better beyond two. Where all
    frames are empty nothing speaks for a candidate, and it is refused.
    """
    reference = backend.observer(model.master, ())
    task = VisionTask(model.spec, reference.inputs, reference.outputs)
    engines = [candidate]
    if serving is not None:
        artefact = read_artefact(Path(serving))
        engines.append(backend.load(artefact.engine_path))
    scores: list[list[float]] = []
    empty_frames = 0
    latencies = [LatencyHistogram() for _ in engines]
    try:
        for tensor in held_out:
            truth = task.decode(reference.observe(tensor).outputs)
            row = []
            is_empty = True
            for engine, latency in zip(engines, latencies, strict=True):
                started = time.perf_counter_ns()
                outputs = engine.infer(tensor)
                latency.add(time.perf_counter_ns() - started)
                agreement = fidelity(task.decode(outputs), truth, model.spec.min_sqnr_db)
                finite = all(np.isfinite(output).all() for output in outputs.values())
                row.append(agreement.value if finite else 0.0)
                is_empty &= agreement.is_empty
            scores.append(row)
            empty_frames += is_empty
    finally:
        reference.close()
        for engine in engines[1:]:
            engine.close()
    return _verdict(np.array(scores), empty_frames, [latency.percentile_ms(50.0) for latency in latencies], max_loss)


def _verdict(scores: NDArray[np.float64], empty_frames: int, latencies_ms: list[float], max_loss: float) -> Verdict:
    """From fidelities (frames, engines), the candidate in column 0."""
    frames = len(scores)
    mean = float(scores[:, 0].mean())
    keeps = 1.0 - mean <= max_loss
    told = f"on {frames} held-out frames, {empty_frames} of them empty"
    telling = empty_frames < frames
    if scores.shape[1] == 1:
        reason = f"loss {1.0 - mean:.3f} {told}, at most {max_loss} is asked"
        return Verdict(keeps and telling, reason, frames, empty_frames, mean, None, 0.0, 0.0, latencies_ms[0], None)
    gains = scores[:, 0] - scores[:, 1]
    margin = 2.0 * float(gains.std(ddof=1)) / math.sqrt(frames) if frames > 1 else 1.0
    low, high = float(gains.mean()) - margin, float(gains.mean()) + margin
    serving = float(scores[:, 1].mean())
    accepted = telling and high >= 0.0 and (keeps or low > 0.0)
    reason = f"fidelity {mean:.3f} against {serving:.3f} in service {told}"
    return Verdict(accepted, reason, frames, empty_frames, mean, serving, low, high, latencies_ms[0], latencies_ms[1])


def main() -> int:
    """Entry point of the child process."""

    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever a library prints must not tear the channel

    def emit(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=channel, flush=True)

    directory = Path(sys.argv[1])
    try:
        os.nice(json.loads((directory / "job.json").read_text(encoding="utf-8"))["nice"])
        emit({"outcome": "accepted", **run_job(directory, emit)})
    except CandidateRefused as refusal:
        emit({"outcome": "refused", "error": _parts(refusal), "verdict": asdict(refusal.verdict)})
    except TaredError as error:
        emit({"outcome": "failed", "error": _parts(error)})
    return 0


def _parts(error: TaredError) -> dict[str, str]:
    return {key: getattr(error, key) for key in ("code", "found", "expected", "remedy")}


if __name__ == "__main__":
    raise SystemExit(main())
