"""Frames of any size, observed as they are: a model of open height and width, from its calibration to its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
import yaml
from brokers import eventually
from lab import tared
from numpy.typing import NDArray
from zoo import Net

from agent.camera.capture import Frame
from agent.collection.collection import Collected
from agent.common.schema import validate
from agent.config import Config
from agent.jobs.child_process import JobOutcome
from agent.jobs.request import JobRequest, write_job
from agent.models.model import Model, open_model
from agent.monitoring.observer import ObserverThread
from agent.vision.detections import Detections
from agent.vision.spec import load_model_spec
from agent.vision.task import ServedFrame, VisionTask
from agent.vision.tasks.opening import open_task
from agent.vision.tasks.raw import RawOutputs
from calibrate.histogram import AbsHistogram, merge, to_bytes
from engines.calibration import load_calibration
from engines.registry import open_backend

CELL = 8  # pixels; the stride of the model
SIZES = {(16, 24): (16, 24), (24, 16): (24, 16), (40, 32): (40, 32), (12, 21): (16, 24), (80, 90): (64, 64)}
"""(height, width) of five frames, and of the network inputs they become."""


def cell_detector() -> onnx.ModelProto:
    """Fully convolutional, in YOLOX's form: an object where an 8x8 cell is bright, as large as the cell."""
    net = Net((1, 3, "height", "width"))
    weight = np.zeros((6, 3, CELL, CELL), np.float32)
    weight[4] = 1.0 / weight[4].size
    bias = np.array([0.5, 0.5, 0.0, 0.0, 0.0, 1.0], np.float32)
    cells = net.node("Conv", "image", net.constant(weight), net.constant(bias), strides=[CELL, CELL])
    listed = net.node("Reshape", cells, net.constant(np.array([0, 6, -1])))
    return net.model(net.node("Transpose", listed, perm=[0, 2, 1]))


@pytest.fixture
def spec_path(tmp_path: Path) -> Path:
    onnx.save(cell_detector(), tmp_path / "cells.onnx")
    shapes = {"min": [1, 3, 16, 16], "opt": [1, 3, 32, 32], "max": [1, 3, 64, 64]}
    content = {
        "path": "cells.onnx",
        "task": "detect",
        "decoder": "yolox",
        "input": {"resize": "native", "multiple": CELL, "scale": 1 / 255},
        "profiles": [{"image": shapes}],
        "score_threshold": 0.6,
    }
    (tmp_path / "cells.yaml").write_text(yaml.safe_dump(content))
    return tmp_path / "cells.yaml"


@pytest.fixture
def model(spec_path: Path) -> Model:
    return open_model(load_model_spec(spec_path))


def frame_of(height: int, width: int, row: int = 1, column: int = 0) -> NDArray[np.uint8]:
    """Darkness, never the same, with one bright cell."""
    frame = np.random.default_rng(height * width).integers(0, 60, (height, width, 3), dtype=np.uint8)
    frame[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL] = 250
    return frame


def network_input(frame: NDArray[np.uint8], height: int, width: int) -> NDArray[np.float32]:
    canvas = np.full((height, width, 3), 114, np.uint8)
    part = frame[:height, :width]
    canvas[: part.shape[0], : part.shape[1]] = part
    scaled: NDArray[np.float32] = canvas.transpose(2, 0, 1)[np.newaxis] * np.float32(1 / 255)
    return scaled


def folder_of_frames(folder: Path) -> Path:
    folder.mkdir()
    for number, (height, width) in enumerate(SIZES):
        cv2.imwrite(str(folder / f"{number}.png"), frame_of(height, width))
    return folder


def observed_one_by_one(model: Model) -> dict[str, AbsHistogram]:
    merged: dict[str, AbsHistogram] = {}
    with closing(open_backend("onnxruntime").observer(model.reference, model.placement.taps)) as observer:
        for frame_size, input_size in SIZES.items():
            tensor = network_input(frame_of(*frame_size), *input_size)
            for name, histogram in observer.observe(tensor).histograms.items():
                merged[name] = merge(merged[name], histogram) if name in merged else histogram
    return merged


def test_a_calibration_on_five_sizes_is_that_of_its_frames(spec_path: Path, model: Model, tmp_path: Path) -> None:
    output = tmp_path / "calibration.json"
    summary = tared("calibrate", spec_path, "--frames", folder_of_frames(tmp_path / "frames"), "-o", output)
    found = load_calibration(output).histograms
    assert summary["frames"] == len(SIZES)
    expected = observed_one_by_one(model)
    assert found.keys() == expected.keys()
    assert all(to_bytes(found[name]) == to_bytes(expected[name]) for name in expected)
    assert found["image"].total == sum(3 * height * width for height, width in SIZES.values())


def test_boxes_lie_in_the_frame_at_any_size(spec_path: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    tared("infer", spec_path, "--frames", folder_of_frames(tmp_path / "frames"), "-o", results)
    found = [json.loads(line)["detections"] for line in results.read_text().splitlines()]
    boxes = [[detection["box"] for detection in detections] for detections in found]
    assert boxes == [[[0.0, 8.0, 8.0, 12.0 if size == (12, 21) else 16.0]] for size in SIZES]


def test_outputs_of_any_size_are_decoded_with_its_own_grid(model: Model) -> None:
    """Frames of other sizes have been preprocessed since, as when a candidate is judged."""
    backend = open_backend("onnxruntime")
    with closing(backend.load(backend.build(model.reference).engine)) as engine:
        task = VisionTask(model.spec, engine.inputs, engine.outputs)
        tensors = [task.preprocess(frame_of(*size, row=0, column=1))[0].copy() for size in SIZES]
        assert [tensor.shape[2:] for tensor in tensors] == list(SIZES.values())
        for tensor in reversed(tensors):
            outputs = engine.infer(tensor)
            found = task.decode(outputs, tensor.shape)
            expected = open_task(model.spec).open_decoder(tensor.shape[2:], engine.outputs)(outputs)
            assert isinstance(found, Detections)
            assert isinstance(expected, Detections)
            assert np.array_equal(found.boxes, expected.boxes)
            assert found.boxes.tolist() == [[8.0, 0.0, 16.0, 8.0]]


def config_of(model: Model) -> Config:
    content: dict[str, Any] = {
        "model": model.spec.model_dump(mode="json"),
        "camera": {"source": "clip.avi"},
        "observe": {"held_out": 16, "period_s": 0.1, "budget": None},
    }
    return validate(Config, content, "test")


def observed_in_turn(model: Model, frames: int) -> Collected:
    """Return the collection of an ObserverThread after so many frames of sizes that take turns."""
    reference = partial(open_backend("onnxruntime").observer, model.reference, model.placement.taps)
    thread = ObserverThread(reference, model.spec, config_of(model), lambda error: pytest.fail(f"{error}"))
    thread.start()
    sizes = list(SIZES)
    for number in range(frames):
        before = thread.collection.counts
        image = frame_of(*sizes[number % len(sizes)])
        served = ServedFrame(Frame(number, float(number), 0, image), "", RawOutputs({}), 0, 0.0)

        def is_collected(served: ServedFrame = served, before: tuple[int, int] = before) -> bool:
            thread.offer(served)
            return thread.collection.counts != before

        eventually(is_collected)
    thread.stop()
    thread.join(60.0)
    assert thread.error is None
    return thread.collection.collected()


def job_of(model: Model, folder: Path) -> JobRequest:
    return JobRequest(
        spec=model.spec.model_dump(mode="json"), model_sha256=model.sha256, backend="onnxruntime", threads=1,
        method="max", frames=24, source="test", state_dir=str(folder / "state"), serving=None, max_loss=0.1,
    )  # fmt: skip


def test_a_candidate_is_judged_on_held_out_frames_of_many_sizes(model: Model, tmp_path: Path) -> None:
    collected = observed_in_turn(model, 32)
    assert (collected.frames, len(collected.held_out), len(collected.sample)) == (24, 8, 16)
    assert {tensor.shape[2:] for tensor in collected.held_out} == set(SIZES.values())
    write_job(tmp_path / "job", job_of(model, tmp_path), collected)
    command = [sys.executable, "-m", "agent.jobs.candidate", str(tmp_path / "job")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    outcome = JobOutcome.from_message(json.loads(done.stdout.splitlines()[-1]))
    assert outcome.error is None, outcome.error
    assert outcome.verdict is not None
    verdict = outcome.verdict
    assert (verdict.accepted, verdict.frames, verdict.empty_frames, verdict.fidelity) == (True, 7, 0, 1.0)
