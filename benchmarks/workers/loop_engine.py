"""The bare engine of a model, in a tight loop on tensors of a clip: what the frame path is measured against."""

from __future__ import annotations

import time
from contextlib import closing
from itertools import islice
from typing import Any

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import open_model
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from engines.registry import open_backend

_TENSORS = 32  # frames spread over the clip: the engine finds none in a cache, as with a camera
_APART = 40  # frames

_state: dict[str, Any] = {}


def prepare(spec: dict[str, object], clip: str) -> None:
    """Load the float engine, as the daemon does, and preprocess some of the clip."""
    model = open_model(ModelSpec.model_validate(spec))
    backend = open_backend("onnxruntime")
    engine = _state["engine"] = backend.load(backend.build(model.reference).engine)
    task = VisionTask(model.spec, engine.inputs, engine.outputs)
    frames: Any = read_images(parse_source(clip))  # a generator
    with closing(frames) as images:
        chosen = islice(images, 0, _TENSORS * _APART, _APART)
        _state["tensors"] = [task.preprocess(image)[0].copy() for _, image in chosen]
    inferences_per_s(1.0)


def inferences_per_s(seconds: float) -> float:
    """Over so many seconds from now."""
    engine, tensors = _state["engine"], _state["tensors"]
    count, began_s = 0, time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        engine.infer(tensors[count % len(tensors)])
        count += 1
    return count / elapsed_s
