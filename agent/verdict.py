"""Whether a candidate may serve: judged on held-out frames beside the engine in service and the reference."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.fidelity import Fidelity, fidelity
from agent.model import Model
from agent.telemetry import LatencyHistogram
from agent.vision import VisionTask
from engines.backend import Backend, Engine, Progress, silent
from engines.seal import find_key
from engines.store import read_artefact

HeldOut = Sequence[NDArray[np.float32]]

MIN_TELLING = 4  # held-out frames with something on them, without which nothing speaks for a candidate
NO_WORSE = 0.01  # of fidelity: a candidate may be this much below the engine in service, by chance


@dataclass(frozen=True)
class Verdict:
    """How a candidate did on the held-out frames beside the engine in service and the reference.

    frames: held-out frames; on empty_frames of them nobody detected anything, so they agree without telling anything.
    fidelity: mean over the other frames, in [0, 1]. gain_low, gain_high: what it gains over the engine in service, two
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


def judge(
    model: Model,
    backend: Backend,
    candidate: Engine,
    serving: str | None,
    held_out: HeldOut,
    max_loss: float,
    progress: Progress = silent,
) -> Verdict:
    """Run reference, engine in service and candidate frame by frame in turn, and compare.

    held_out: network inputs (1, C, H, W), of any sizes. With no engine in service the candidate must keep max_loss;
    with one, it must not be worse, and must keep max_loss or be better beyond two standard errors. Frames on which
    neither engine nor reference found anything agree without telling anything: they are counted apart, and MIN_TELLING
    others asked. progress: of the reference engine, where that has to be built.
    """
    reference = backend.observer(model.reference, model.placement.taps, progress)
    task = VisionTask(model.spec, reference.inputs, reference.outputs)
    engines = [candidate]
    if serving is not None:
        artefact = read_artefact(Path(serving), find_key())
        engines.append(backend.load(artefact.read_engine()))
    scores: list[list[float]] = []
    latencies = [LatencyHistogram() for _ in engines]
    try:
        for tensor in held_out:
            truth = task.decode(reference.infer(tensor), tensor.shape)
            row = []
            for engine, latency in zip(engines, latencies, strict=True):
                started = time.perf_counter_ns()
                outputs = engine.infer(tensor)
                latency.add(time.perf_counter_ns() - started)
                finite = all(np.isfinite(output).all() for output in outputs.values())
                agreement = fidelity(task.decode(outputs, tensor.shape), truth, model.spec.min_sqnr_db)
                row.append(Fidelity(agreement.value if finite else 0.0, agreement.is_empty and finite))
            if not all(agreement.is_empty for agreement in row):
                scores.append([agreement.value for agreement in row])
    finally:
        reference.close()
        for engine in engines[1:]:
            engine.close()
    medians_ms = [latency.percentile_ms(50.0) for latency in latencies]
    return _verdict(np.array(scores).reshape(-1, len(engines)), len(held_out), medians_ms, max_loss)


def _verdict(scores: NDArray[np.float64], frames: int, latencies_ms: list[float], max_loss: float) -> Verdict:
    """From fidelities (telling frames, engines), the candidate in column 0."""
    telling, engines = scores.shape
    means = scores.mean(axis=0).tolist() if telling else [0.0] * engines
    keeps = telling >= MIN_TELLING and 1.0 - means[0] <= max_loss
    told = f"on {telling} held-out frames, {frames - telling} others empty"
    if engines == 1:
        reason = f"loss {1.0 - means[0]:.3f} {told}, at most {max_loss} is asked"
        return Verdict(keeps, reason, frames, frames - telling, means[0], None, 0.0, 0.0, latencies_ms[0], None)
    gains = scores[:, 0] - scores[:, 1]
    gain = means[0] - means[1]
    margin = 2.0 * float(gains.std(ddof=1)) / math.sqrt(telling) if telling > 1 else 1.0
    better = telling >= MIN_TELLING and gain - margin > 0.0
    reason = f"fidelity {means[0]:.3f} against {means[1]:.3f} in service {told}"
    return Verdict(
        better or (keeps and gain >= -NO_WORSE),
        reason,
        frames,
        frames - telling,
        means[0],
        means[1],
        gain - margin,
        gain + margin,
        latencies_ms[0],
        latencies_ms[1],
    )
