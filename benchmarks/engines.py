"""INT8 beside FP32 on this machine's CPU: time, size and agreement, per model.

    python -m benchmarks.engines [--rounds 200]

Needs ../shared/data (or $TARED_SHARED/data). Each model is calibrated on its own images with the default method;
engines take turns on the same inputs, one thread each, and the median of each is compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agent.models.model import calibrate
from agent.vision.fidelity import fidelity
from benchmarks.models import MODELS, observe
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.fusion import int8_macs_share
from engines.registry import open_backend


@dataclass(frozen=True)
class Row:
    """int8_time, default_time: as multiples of the FP32 engine's; size: of its file."""

    name: str
    int8_share: float
    fidelity: float
    size: float
    int8_time: float
    default_time: float


def compare(name: str, rounds: int) -> Row:
    """Calibrate, build both engines, and let them take turns."""
    backend = open_backend("onnxruntime")
    observed = observe(name, backend)
    model, task, held_out = observed.model, observed.task, observed.held_out
    calibration = calibrate(model, observed.histograms, "entropy", observed.frames, observed.source)
    fp32 = backend.build(model.reference).engine
    int8 = backend.build(
        model.build_request(insert_qdq(model.master, model.placement, calibration.amax), "int8")
    ).engine
    with closing(backend.load(fp32)) as reference, closing(backend.load(int8)) as engine:
        pairs = [[task.decode(each.infer(x), x.shape) for each in (engine, reference)] for x in held_out]
        agreement = [fidelity(served, right).value for served, right in pairs]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(int8, options, providers=["CPUExecutionProvider"])
        input_name = session.get_inputs()[0].name
        medians = take_turns(
            [reference.infer, engine.infer, lambda x: session.run(None, {input_name: x})], held_out, rounds
        )
    size = len(int8) / len(fp32)
    share = int8_macs_share(model.master, model.placement)
    return Row(name, share, float(np.mean(agreement)), size, medians[1] / medians[0], medians[2] / medians[0])


def take_turns(
    runs: list[Callable[[NDArray[np.float32]], object]], inputs: list[NDArray[np.float32]], rounds: int
) -> list[float]:
    """Median seconds of each run; one after the other on each input, so that load falls on all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for run, taken in zip(runs, times, strict=True):
            started = time.perf_counter()
            run(inputs[number % len(inputs)])
            taken.append(time.perf_counter() - started)
    return [float(np.median(taken)) for taken in times]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="INT8 beside FP32 on this CPU.")
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    table = Table(title="INT8 beside FP32, ONNX Runtime, one thread")
    for column in ("model", "MACs in INT8", "fidelity", "file size", "time", "time, ORT's integer kernels"):
        table.add_column(column)
    for name in MODELS:
        row = compare(name, arguments.rounds)
        table.add_row(
            row.name,
            f"{row.int8_share:.0%}",
            f"{row.fidelity:.3f}",
            f"{row.size:.2f}x",
            f"{row.int8_time:.2f}x",
            f"{row.default_time:.2f}x",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
