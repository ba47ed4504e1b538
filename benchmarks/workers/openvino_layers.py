"""python -m benchmarks.workers.openvino_layers INT8 FLOAT TENSORS: where an engine on OpenVINO spends its time.

INT8, FLOAT: ONNX files of one network, with Q/DQ and without. TENSORS: a .npy file of inputs, (images, 1, C, H, W).
Prints one JSON object: `ms`, by engine the median of an inference, all in turn, one thread, FLOAT on ONNX Runtime, too;
`shares`, of the two on OpenVINO, the parts of an inference by kind of kernel, as the profiler has them, and what
is left for the call.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from statistics import mean, median

import numpy as np
import openvino as ov
from onnx import ModelProto

from engines.interface import Array, BuildRequest
from engines.openvino_backend import SETTINGS, OpenVinoBackend, kernel_times_ms, undisturbed
from engines.registry import open_backend

KINDS = ("int8", "float", "others", "copies", "conversions")
_ROUNDS = 25  # rounds over all images
_MULTIPLY = ("Convolution", "GroupConvolution", "FullyConnected", "MatMul")
_MOVE = ("Concat", "Split", "VariadicSplit", "Pad", "Slice", "StridedSlice", "Transpose", "Gather", "Reshape")
_CONVERT = ("Reorder", "Convert", "FakeQuantize")


def kind(node_type: str, kernel: str) -> str:
    """Sort a kernel by its type, and by the type of its numbers, with which the name of a kernel ends."""
    if node_type.startswith(_MULTIPLY):
        return "int8" if kernel.endswith(("I8", "U8", "i8", "u8")) else "float"
    if node_type in _MOVE:
        return "copies"
    return "conversions" if node_type in _CONVERT else "others"


def shares(graph: bytes, images: Array) -> dict[str, float]:
    """Return the shares of an inference's time, the mean of runs that other work did not disturb."""
    settings = {**SETTINGS, "INFERENCE_NUM_THREADS": 1, "PERF_COUNT": True}
    core = ov.Core()
    request = core.compile_model(core.read_model(graph), "CPU", settings).create_infer_request()
    averages_ms, runs_ms = list[dict[str, float]](), list[float]()
    for image in list(images) * _ROUNDS:
        request.set_input_tensor(ov.Tensor(image))
        started = time.perf_counter()
        request.infer()
        runs_ms.append(1000.0 * (time.perf_counter() - started))
        kernels = request.get_profiling_info()
        averages_ms.append({each.node_name: 1000.0 * each.real_time.total_seconds() for each in kernels})
    counted = undisturbed(runs_ms)
    parts: defaultdict[str, float] = defaultdict(float)
    kinds = {each.node_name: kind(each.node_type, each.exec_type) for each in kernels}
    for name, ms in kernel_times_ms(averages_ms, counted).items():
        parts[kinds[name]] += ms / mean(runs_ms[run] for run in counted)
    return {**dict.fromkeys(KINDS, 0.0), **parts, "call": 1.0 - sum(parts.values())}


def times_ms(int8: bytes, in_float: bytes, graph: bytes, images: Array) -> dict[str, float]:
    """Return the median time of an inference on each engine, in turn."""
    backend, embedded = OpenVinoBackend(), open_backend("onnxruntime")
    taken: dict[str, list[float]] = {"int8": [], "float": [], "onnxruntime": []}
    with (
        closing(backend.load(int8)) as first,
        closing(backend.load(in_float)) as second,
        closing(embedded.load(graph)) as third,
    ):
        for image in list(images) * _ROUNDS:
            for name, engine in zip(taken, (first, second, third), strict=True):
                started = time.perf_counter()
                engine.infer(image)
                taken[name].append(1000.0 * (time.perf_counter() - started))
    return {name: median(values) for name, values in taken.items()}


def _built(paths: Iterator[str], shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the engines of the two graphs, as tared gives them to OpenVINO."""
    graphs = (ModelProto.FromString(Path(next(paths)).read_bytes()) for _ in range(2))
    int8, in_float = (OpenVinoBackend().build(BuildRequest(graph, "int8", shape)).engine for graph in graphs)
    return int8, in_float


def main() -> None:
    images = np.load(sys.argv[3])
    int8, in_float = _built(iter(sys.argv[1:3]), images[0].shape)
    print(
        json.dumps(
            {
                "ms": times_ms(int8, in_float, Path(sys.argv[2]).read_bytes(), images),
                "shares": {"int8": shares(int8, images), "float": shares(in_float, images)},
            }
        )
    )


if __name__ == "__main__":
    main()
