"""What a frame costs on its way to the network input: as the daemon makes it, beside other calls of OpenCV."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from agent.camera.reader import read_images
from agent.camera.source import parse_source
from agent.models.model import open_model
from agent.mqtt.client import Endpoint
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from benchmarks.loop_daemon import endless, spec
from benchmarks.report import Bar, Section
from engines.interface import Engine
from engines.registry import open_backend

_FRAMES, _APART = 30, 10  # spread over the clip, more than the caches near the processor hold
_WARM_S = 0.5

Frame = NDArray[np.uint8]


def preprocessing(
    folder: Path, _endpoint: Endpoint, models: list[str], rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """CPU time per frame, of each way in turn; the engine's beside it."""
    clip = endless(folder)
    images = read_images(parse_source(str(clip)))
    frames = [image for _, image in islice(images, 0, _FRAMES * _APART, _APART)]
    sections = []
    for name in models:
        model, backend = open_model(ModelSpec.model_validate(spec(name))), open_backend("onnxruntime")
        with closing(backend.load(backend.build(model.reference).engine)) as engine:
            ways = _ways(VisionTask(model.spec, engine.inputs, engine.outputs), engine, frames[0])
            for way in ways.values():
                _cpu_ms(way, frames, _WARM_S)
            found: dict[str, list[float]] = {what: [] for what in ways}
            for _ in progress.track(range(rounds), description=f"{name}: preprocessing"):
                for what, way in ways.items():
                    found[what].append(_cpu_ms(way, frames))
        height, width = frames[0].shape[:2]
        table = Section(
            f"{name}: a frame of {width}x{height}, median of {rounds}", ("what", "ms of CPU", "of the engine's")
        )
        engine_ms = statistics.median(found["engine"])
        for what, times_ms in found.items():
            ms = statistics.median(times_ms)
            table.rows.append((what, f"{ms:.3f}", f"{ms / engine_ms:.1%}"))
        sections.append(table)
    return sections, []


def _ways(task: VisionTask, engine: Engine, frame: Frame) -> dict[str, Callable[[Frame], object]]:
    """What is timed, by name."""
    tensor, _ = task.preprocess(frame)
    size = tensor.shape[3], tensor.shape[2]
    scaled = np.empty((size[1], size[0], 3), np.uint8)
    planes = [np.empty(scaled.shape[:2], np.uint8) for _ in range(3)]
    given, painted = tensor.copy(), np.empty_like(tensor[0])
    table = np.arange(256, dtype=np.float32)[np.newaxis] / np.float32(255.0)

    def passes(image: Frame) -> None:
        cv2.resize(image, size, scaled)
        cv2.split(scaled, planes)
        for plane, out in zip(planes, painted, strict=True):
            cv2.LUT(plane, table, out)

    return {
        "engine": lambda _: engine.infer(given),
        "as the daemon does": task.preprocess,
        "the same, always one frame": lambda _: task.preprocess(frame),
        "by OpenCV: resize, split, three LUT": passes,
        "cv2.dnn.blobFromImage, other bits": lambda image: cv2.dnn.blobFromImage(image, 1.0 / 255.0, size),
        "cv2.resize alone": lambda image: cv2.resize(image, size, scaled),
        "cv2.split alone": lambda _: cv2.split(scaled, planes),
    }


def _cpu_ms(way: Callable[[Frame], object], frames: list[Frame], least_s: float = 0.0) -> float:
    """Per frame, of this thread."""
    count, began_s, began = 0, time.thread_time(), time.monotonic()
    while not count or time.monotonic() - began < least_s:
        for frame in frames:
            way(frame)
        count += len(frames)
    return 1000.0 * (time.thread_time() - began_s) / count
