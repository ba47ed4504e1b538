"""INT8 beside FP32 on this machine's CPU: time, size and agreement, per model.

    python -m benchmarks.engines [--rounds 200]

Needs ../shared/data (or $TARED_SHARED/data). Each model is calibrated on its own images with the default method;
engines take turns on the same inputs, one thread each, and the median of each is compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agent.build import open_model
from agent.camera import parse_source, read_images
from agent.fidelity import fidelity
from agent.model_spec import ModelSpec
from agent.sampling import Collection
from agent.vision import VisionTask
from engines.backend import open_backend
from engines.calibration import calibrate_histograms
from engines.macs import int8_macs_share
from engines.qdq import insert_qdq

DATA = Path(os.environ.get("TARED_SHARED") or Path(__file__).resolve().parents[2] / "shared") / "data"
IMAGES = 64
UNIT = 1.0 / 255.0
CIFAR = {
    "color": "rgb",
    "resize": "stretch",
    "scale": UNIT,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
}

# name: (spec, images to calibrate and to compare on; even ones calibrate, odd ones compare)
MODELS: dict[str, tuple[dict[str, object], str]] = {
    "resnet20": (
        {"path": "cls_resnet20_cifar10_fp32.onnx", "task": "classify", "input": CIFAR},
        "img_cifar10_train_calib_500.zip",
    ),
    "fastestdet": (
        {
            "path": "det_fastestdet_352_coco80_fp32.onnx",
            "task": "detect",
            "decoder": "fastestdet",
            "input": {"resize": "stretch", "scale": UNIT},
            "score_threshold": 0.5,
        },
        "img_coco_train2017_first128_labelled.zip",
    ),
    "yolox_nano": (
        {"path": "det_yolox_nano_416_coco80_fp32.onnx", "task": "detect", "decoder": "yolox"},
        "img_coco_train2017_first128_labelled.zip",
    ),
    "ultraface": (
        {
            "path": "face_ultraface_rfb_320_fp32.onnx",
            "task": "detect",
            "decoder": "ssd",
            "input": {"color": "rgb", "resize": "stretch", "mean": (127,), "std": (128,)},
            "score_threshold": 0.6,
            "iou_threshold": 0.3,
        },
        "vid_face_asl_walk_640x480.mkv",
    ),
}


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
    keys, images = MODELS[name]
    spec = ModelSpec.model_validate({**keys, "path": DATA / str(keys["path"])})
    backend = open_backend("onnxruntime")
    model = open_model(spec, backend)
    collection, held_out = Collection(held_out_size=0), list[NDArray[np.float32]]()
    with closing(backend.observer(model.master, model.placement.taps)) as observer:
        task = VisionTask(spec, observer.inputs, observer.outputs)
        for number, (_, image) in enumerate(islice(read_images(parse_source(str(DATA / images))), 2 * IMAGES)):
            tensor, _ = task.preprocess(image)
            if number % 2:
                held_out.append(tensor.copy())
            else:
                collection.add(tensor, observer.observe(tensor).histograms)
    calibration = calibrate_histograms(
        collection.histograms,
        model.placement.shared,
        model_sha256=model.sha256,
        method="entropy",
        frames=collection.frames,
        source=images,
    )
    with tempfile.TemporaryDirectory() as folder:
        fp32, int8 = Path(folder) / "fp32.onnx", Path(folder) / "int8.onnx"
        backend.build(model.master, fp32, lambda *_: None)
        backend.build(insert_qdq(model.master, model.placement, calibration.amax), int8, lambda *_: None)
        with closing(backend.load(fp32)) as reference, closing(backend.load(int8)) as engine:
            agreement = [
                fidelity(task.decode(engine.infer(x)), task.decode(reference.infer(x))).value for x in held_out
            ]
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            session = ort.InferenceSession(str(int8), options, providers=["CPUExecutionProvider"])
            input_name = session.get_inputs()[0].name
            medians = take_turns(
                [reference.infer, engine.infer, lambda x: session.run(None, {input_name: x})], held_out, rounds
            )
        size = int8.stat().st_size / fp32.stat().st_size
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
