"""What NVIDIA's builder makes of real models without a GPU: layers, INT8 coverage, engine sizes.

    python -m benchmarks.offline [--models resnet20 fastestdet ...] [--target sm86] [--markdown | --json]

Needs ../shared/data (or $TARED_SHARED/data) and tensorrt_rtx_cu12 1.7 (x86-64). 64 images calibrate by the default
method, every layer INT8. TensorRT-RTX chooses kernels on the GPU that runs the engine: its listing says what is INT8,
not what that brings.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from agent.models.model import Model, calibrate
from benchmarks.models import MODELS, observe
from benchmarks.report import Section, add_output_option, publish
from engines.interface import Backend, BackendOptions, BuildRequest, Built
from engines.quantise.apply_plan import insert_qdq
from engines.registry import open_backend
from engines.trt.layers import LAYERS_FILE, Layer, layers_from_json

PRECISIONS = ("int8", "fp16", "fp32")
COLUMNS = (
    "model",
    "layers: INT8, FP16, FP32",
    "convolutions and products that read INT8",
    "FP32 nodes in the INT8 form",
    "engine, MiB: INT8, FP16, FP32",
)
_PRODUCTS = ("correlation", "gemm")  # what the listing calls them


@dataclass(frozen=True)
class Row:
    """One model's builds, by precision."""

    name: str
    built: dict[str, Built]

    def cells(self) -> Sequence[str]:
        listings = {precision: layers(built) for precision, built in self.built.items()}
        products = [layer for layer in listings["int8"] if layer.kind in _PRODUCTS]
        quantised = sum("Int8" in (*layer.inputs, *layer.constants) for layer in products)
        return (
            self.name,
            ", ".join(str(len(listing)) for listing in listings.values()),
            f"{quantised} of {len(products)}",
            str(len(self.built["int8"].facts["float32"])),
            ", ".join(f"{len(built.engine) / 2**20:.1f}" for built in self.built.values()),
        )


def layers(built: Built) -> list[Layer]:
    """The layers of a built engine."""
    return layers_from_json(built.files[LAYERS_FILE])


def requests(name: str) -> dict[str, BuildRequest]:
    """What is built of a model, by precision."""
    observed = observe(name, open_backend("onnxruntime"))
    model: Model = observed.model
    calibration = calibrate(model, observed.histograms, "entropy", observed.frames, observed.source)
    int8 = insert_qdq(model.master, model.placement, calibration.amax)
    graphs = {"int8": int8, "fp16": model.master, "fp32": model.master}
    return {precision: model.build_request(graphs[precision], precision, calibration.seen) for precision in PRECISIONS}


def build(name: str, backend: Backend) -> Row:
    """Build one model in every precision."""
    return Row(name, {precision: backend.build(request) for precision, request in requests(name).items()})


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What NVIDIA's builder makes of real models without a GPU.")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--target", default="sm86")
    add_output_option(parser)
    arguments = parser.parse_args()
    backend = open_backend("tensorrt", BackendOptions(target=arguments.target))
    with Progress(console=Console(stderr=True)) as progress:
        rows = [build(name, backend) for name in progress.track(arguments.models, description="offline")]
    described = backend.describe()
    note = f"{described['runtime']} {described['version']} for {described['target']}"
    publish([Section("Built without a GPU", COLUMNS, [row.cells() for row in rows], note)], arguments)


if __name__ == "__main__":
    main()
