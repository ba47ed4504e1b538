"""The real models that benchmarks run, each observed on images of its own.

They lie in ../shared/data (or $TARED_SHARED/data), which is not part of the project.
"""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.collection.collection import CalibrationSet
from agent.models.model import Model, open_model
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.histogram import AbsHistogram
from engines.interface import Backend

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
class Observed:
    """A model, the histograms of every second of its images by tap, and the others, ready for the engine."""

    model: Model
    task: VisionTask
    histograms: dict[str, AbsHistogram]
    frames: int
    held_out: list[NDArray[np.float32]]
    source: str


def observe(name: str, backend: Backend) -> Observed:
    """Run the reference engine of MODELS[name] over 2 * IMAGES images: even ones calibrate, odd ones compare."""
    keys, images = MODELS[name]
    spec = ModelSpec.model_validate({**keys, "path": DATA / str(keys["path"])})
    model = open_model(spec)
    collection, held_out = CalibrationSet(held_out_size=0), list[NDArray[np.float32]]()
    with closing(backend.observer(model.reference, model.placement.taps)) as observer:
        task = VisionTask(spec, observer.inputs, observer.outputs)
        for number, (_, image) in enumerate(islice(read_images(parse_source(str(DATA / images))), 2 * IMAGES)):
            tensor, _ = task.preprocess(image)
            if number % 2:
                held_out.append(tensor.copy())
            else:
                collection.add(tensor, observer.observe(tensor))
    return Observed(model, task, dict(collection.histograms), collection.frames, held_out, images)
