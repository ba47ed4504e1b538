"""How soon an audit proves a wrong reference, how rarely it accuses a right one, and what it takes.

`python -m benchmarks.audit`

The noise of a right reference is measured on real frames of each model, over the noise that the audit allows: of a
runtime whose products keep ten bits, one fewer than the audit reckons with, as where bits are cut off instead of
rounded. Streams of audited frames are drawn from these, and faults are planted in them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from agent.monitoring.audit import AuditedFrame, AuditEvidence, FrameAuditor
from agent.state.store import StateStore
from benchmarks.models import MODELS, observe
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish
from calibrate.statistics.evidence import NoiseDetector
from engines.graph.rounding import round_products
from engines.interface import Array
from engines.onnxruntime_backend import OnnxRuntimeEngine
from engines.registry import open_backend

_BITS = 11  # that the audit reckons with: TF32
_PERIOD_S = 300.0
_MONTH_FRAMES = round(30 * 86_400 / _PERIOD_S)
_RUNS, _MOST_FRAMES, _MONTHS = 200, 500, 30

Floats = NDArray[np.float64]
Fault = Callable[[Floats, np.random.Generator], Floats]  # from the noise of right frames to that of audited ones


def _louder(right: Floats, _: np.random.Generator) -> Floats:
    louder: Floats = right * (10.0**0.1 / right.mean())
    return louder


def _now_and_then(share: float) -> Fault:
    return lambda right, chance: np.where(chance.random(right.size) < share, _GARBAGE, right)


_GARBAGE = 1e3  # the loudest model is allowed 34 dB, so an answer to another frame is 30 dB beyond
FAULTS: dict[str, Fault] = {
    "1 dB beyond the allowed noise, each frame": _louder,
    "one frame in a hundred": _now_and_then(0.01),
    "one row of four": _now_and_then(0.25),
    "one shape of ten": _now_and_then(0.1),
}


def measure(name: str) -> tuple[Floats, float]:
    """Return the noise of right frames over the allowed one (n,), and the CPU seconds that one audit takes."""
    observed = observe(name, open_backend("onnxruntime"))
    auditor = FrameAuditor(observed.model, _BITS)
    coarser = round_products(observed.model.observed, _BITS - 1)
    noise: list[float] = []
    spent_s = time.process_time()
    with closing(OnnxRuntimeEngine(coarser.SerializeToString(), threads=1)) as engine:
        for number, tensor in enumerate(observed.held_out):
            outputs: dict[str, Array] = engine.infer(tensor)
            noise.append(auditor.audit(AuditedFrame("camera", number, 0.0, tensor, outputs, {})).noise)
    return np.array(noise), (time.process_time() - spent_s) / len(noise)


def frames_to_proof(right: Floats, fault: Fault, run: int) -> int | None:
    """Return after how many audited frames the fault is proven; None if it is not within the allowed number."""
    chance, detector = np.random.default_rng(run), _detector()
    drawn = fault(chance.choice(right, _MOST_FRAMES), chance)
    for number, noise in enumerate(drawn.tolist(), 1):
        detector.update(noise)
        if detector.drift_detected:
            return number
    return None


def false_alarms(right: Floats, month: int) -> bool:
    """Return whether a device-month of right frames raises an alarm."""
    detector = _detector()
    for noise in np.random.default_rng(month).choice(right, _MONTH_FRAMES).tolist():
        detector.update(noise)
    return detector.drift_detected


def _detector() -> NoiseDetector:
    return AuditEvidence(StateStore(None), "", _PERIOD_S).detector


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The audit of a reference: proof, false alarms, time.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add_output_option(parser)
    options = parser.parse_args()
    noise = Section("A right reference", ("model", "noise over the allowed", "its largest", "CPU of an audit"))
    proofs = Section("Frames to the proof", ("fault", *options.models), note=f"median of {_RUNS} runs, share proven")
    rows: dict[str, list[str]] = {fault: [] for fault in FAULTS}
    bars: list[Bar] = []
    for name in track(options.models, "models", console=Console(stderr=True)):
        right, spent_s = measure(name)
        noise.rows.append((name, f"{right.mean():.2f}", f"{right.max():.2f}", f"{1e3 * spent_s:.0f} ms"))
        for title, fault in FAULTS.items():
            found = [frames_to_proof(right, fault, run) for run in range(_RUNS)]
            proven = [frames for frames in found if frames is not None]
            share = len(proven) / _RUNS
            rows[title].append(f"{np.median(proven):.0f}, {share:.3g}" if proven else "-")
            bars.append(at_least(f"{name}, {title}: proven within {_MOST_FRAMES} frames", 0.95, share, ""))
        alarms = sum(false_alarms(right, month) for month in range(_MONTHS))
        bars.append(at_most(f"{name}: alarms in {_MONTHS} device-months", 0, float(alarms), ""))
        bars.append(at_most(f"{name}: share of a core", 0.01, spent_s / _PERIOD_S, ""))
    proofs.rows = [(title, *cells) for title, cells in rows.items()]
    publish([noise, proofs, bars_section(bars)], options)


if __name__ == "__main__":
    main()
