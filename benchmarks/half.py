"""What float16 costs real models: the float16 form of the FP32 and of the INT8 graph, beside the graphs themselves.

    python -m benchmarks.half [--models resnet20 fastestdet ...] [--markdown | --json]

Needs ../shared/data (or $TARED_SHARED/data). 64 images calibrate by the default method, every layer INT8; SQNR is the
worst output's, the median over 64 other images. All graphs run on ONNX Runtime's CPU, unoptimised, and every float16
tensor is rounded as it is made (`rounded`). Sums inside an operator are float32, as on tensor cores that accumulate in
float32. What DequantizeLinear gives is rounded too, where an INT8 kernel multiplies the integers themselves.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from rich.console import Console
from rich.progress import Progress

from agent.models.model import calibrate
from benchmarks.models import MODELS, observe
from benchmarks.report import Section, add_output_option, publish
from calibrate.noise import worst_sqnr_db
from engines.graph.topology import tensor_types
from engines.half.convert import HalfForm, half_precision
from engines.interface import Array, Backend
from engines.quantise.apply_plan import insert_qdq
from engines.registry import open_backend

Outputs = Mapping[str, Array]
COLUMNS = (
    "model",
    "FP16",
    "INT8",
    "INT8 in FP16 form",
    "INT8 in FP16 form, against INT8",
    "casts: FP16, INT8",
    "float32 nodes: FP16, INT8",
)
NOTE = "SQNR in dB against FP32 where nothing else is said."


@dataclass(frozen=True)
class Row:
    """SQNR in dB against FP32 (half_int8_to_int8: against the INT8 graph); casts added, and nodes left float32."""

    name: str
    half: float
    int8: float
    half_int8: float
    half_int8_to_int8: float
    casts: tuple[int, int]
    floats: tuple[int, int]

    def cells(self) -> Sequence[str]:
        figures = (self.half, self.int8, self.half_int8, self.half_int8_to_int8)
        pairs = (", ".join(map(str, pair)) for pair in (self.casts, self.floats))
        return (self.name, *(f"{figure:.1f}" for figure in figures), *pairs)


def rounded(model: ModelProto) -> ModelProto:
    """The graph with every float16 tensor passed through an Identity and made an output.

    ONNX Runtime computes most operators in float32 on the CPU, and leaves out what it can of casts to float16 and
    back, so that a chain of operators would be rounded only at its end. Outputs it has to round, and at optimisation
    level "disable all" it keeps the Identity, from which the next operator then reads.
    """
    types, copy = tensor_types(model), ModelProto()
    copy.CopyFrom(model)
    del copy.graph.node[:]
    for node in model.graph.node:
        copy.graph.node.append(node)
        written = copy.graph.node[-1]
        for index, name in enumerate(node.output):
            if name in types and types[name].elem_type == TensorProto.FLOAT16:
                written.output[index] = f"{name}.computed"
                copy.graph.node.append(helper.make_node("Identity", [f"{name}.computed"], [name]))
                copy.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT16, None))
    return copy


def run(model: ModelProto, batches: Iterable[NDArray[np.float32]]) -> list[dict[str, Array]]:
    """The outputs of each batch by name. Q/DQ runs as written: ONNX Runtime's fusions refuse float16 scales."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(rounded(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    names, (image, *_) = [output.name for output in model.graph.output], session.get_inputs()
    return [dict(zip(names, session.run(names, {image.name: batch}), strict=True)) for batch in batches]


def added_casts(form: HalfForm, graph: ModelProto) -> int:
    """The casts that the float16 form of a graph has beyond the graph's own."""
    return sum(node.op_type == "Cast" for node in form.model.graph.node) - sum(
        node.op_type == "Cast" for node in graph.graph.node
    )


def median_sqnr_db(found: Sequence[Outputs], reference: Sequence[Outputs]) -> float:
    """The median over the images of the worst output's SQNR."""
    return float(np.median([*map(worst_sqnr_db, reference, found)]))


def compare(name: str, backend: Backend, advance: Callable[[], object]) -> Row:
    """One model: both forms as TensorRT would be given them, from one calibration."""
    observed = observe(name, backend)
    master, images = observed.model.master, observed.held_out
    calibration = calibrate(observed.model, observed.histograms, "entropy", observed.frames, observed.source)
    quantised = insert_qdq(master, observed.model.placement, calibration.amax)
    half, half_int8 = half_precision(master, calibration.seen), half_precision(quantised, calibration.seen)
    outputs = []
    for graph in (master, half.model, quantised, half_int8.model):
        outputs.append(run(graph, images))
        advance()
    fp32, fp16, int8, mixed = outputs
    return Row(
        name,
        half=median_sqnr_db(fp16, fp32),
        int8=median_sqnr_db(int8, fp32),
        half_int8=median_sqnr_db(mixed, fp32),
        half_int8_to_int8=median_sqnr_db(mixed, int8),
        casts=(added_casts(half, master), added_casts(half_int8, quantised)),
        floats=(len(half.float32), len(half_int8.float32)),
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What float16 costs real models.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    add_output_option(parser)
    arguments = parser.parse_args()
    backend = open_backend("onnxruntime")
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("half", total=4 * len(arguments.models))
        rows = [compare(name, backend, lambda: progress.advance(task)) for name in arguments.models]
    publish([Section("The float16 form", COLUMNS, [row.cells() for row in rows], NOTE)], arguments)


if __name__ == "__main__":
    main()
