"""A frame becomes the same prediction, on the host or on a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from overlapping_engine import OverlappingDeviceEngine
from zoo import Net

from agent.common.errors import ConfigError
from agent.vision.fidelity import fidelity
from agent.vision.preprocess import Geometry
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.raw import RawOutputs
from engines.interface import BuildRequest, Engine, OverlappingEngine, TensorSpec
from engines.registry import open_backend

SPEC: dict[str, Any] = {
    "path": Path("model.onnx"),
    "task": "raw",
    "input": {"color": "rgb", "anchor": "center", "mean": [123.7, 116.3, 103.5], "std": [58.4, 57.1, 57.4]},
}
PROFILES = [{"image": {"min": [1, 3, 8, 8], "opt": [1, 3, 24, 32], "max": [1, 3, 40, 48]}}]

ONE_SIZE, ANY_SIZE = (1, 3, 24, 32), (1, 3, "height", "width")
ONE_MAP = (1, 24, 32)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine of a model of this input shape."""
    net = Net(request.param)
    graph = net.model(net.node("Relu", net.conv("image", 3, 4)))
    backend = open_backend("onnxruntime")
    with closing(backend.load(backend.build(BuildRequest(graph, input_shape=(1, 3, 24, 32))).engine)) as opened:
        yield opened


@pytest.mark.parametrize(
    ("engine", "resize"),
    [
        *((ONE_SIZE, resize) for resize in ("letterbox", "stretch", "pad")),
        *((ANY_SIZE, resize) for resize in ("letterbox", "native", "nearest", "rect")),
    ],
    indirect=["engine"],
)
def test_an_engine_that_preprocesses_answers_the_same(engine: Engine, resize: str) -> None:
    content = {**SPEC, "input": {**SPEC["input"], "resize": resize}, "profiles": PROFILES}
    spec = ModelSpec.model_validate(content)
    device = OverlappingDeviceEngine(engine)
    task = VisionTask(spec, engine.inputs, engine.outputs)
    assert isinstance(device, OverlappingEngine)
    assert not isinstance(engine, OverlappingEngine)
    for height, width in ((24, 32), (17, 51), (60, 9), (17, 51)):
        frame = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        expected, where = task.infer(engine, frame)
        found, geometry = task.infer(device, frame)
        assert geometry == where
        assert isinstance(expected, RawOutputs)
        assert isinstance(found, RawOutputs)
        assert all(np.array_equal(found.outputs[name], output) for name, output in expected.outputs.items())


@pytest.mark.parametrize("engine", [ONE_SIZE, ANY_SIZE], indirect=True)
def test_a_spec_that_does_not_fit_is_refused_before_the_first_frame(engine: Engine) -> None:
    gray = ModelSpec.model_validate({**SPEC, "input": {"color": "gray"}, "profiles": PROFILES})
    with pytest.raises(ConfigError, match="for color 'gray'"):
        VisionTask(gray, engine.inputs, engine.outputs)


@pytest.mark.parametrize("engine", [ONE_SIZE], indirect=True)
@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_frames_overlap_and_come_out_in_order(engine: Engine, count: int) -> None:
    overlapping = OverlappingDeviceEngine(engine)
    task = VisionTask(ModelSpec.model_validate(SPEC), engine.inputs, engine.outputs)
    frames = [np.random.default_rng(seed).integers(0, 256, (20, 30, 3), dtype=np.uint8) for seed in range(count)]
    found = [prediction for prediction, _ in task.infer_each(overlapping, iter(frames))]
    alone = [prediction for prediction, _ in task.infer_each(engine, iter(frames))]
    assert len(found) == len(alone) == count
    for one, other in zip(found, alone, strict=True):
        assert isinstance(one, RawOutputs)
        assert isinstance(other, RawOutputs)
        assert all(np.allclose(output, other.outputs[name], atol=1e-5) for name, output in one.outputs.items())
    assert overlapping.most == min(count, 2)
    assert overlapping.under_way == {}


@pytest.mark.parametrize("task", ["segment", "depth"])
def test_maps_are_compared_where_the_frame_is(task: str) -> None:
    """A frame of 12 rows and 32 columns, in the middle of an input of 24 rows."""
    keys = {"depth": "metric"} if task == "depth" else {"labels": ["near", "far"]}
    spec = ModelSpec.model_validate({"path": "m.onnx", "task": task, "input": {"anchor": "center"}, **keys})
    image, depths = (TensorSpec(name, np.dtype(np.float32), shape) for name, shape in (("x", ONE_SIZE), ("y", ONE_MAP)))
    vision = VisionTask(spec, [image], [depths])
    tensor, geometry = vision.preprocess(np.full((12, 32, 3), 7, np.uint8))
    reference, padding, margin = (np.ones(ONE_MAP, np.float32) for _ in range(3))
    padding[:, :6], padding[:, 18:] = 0.0, 0.0
    margin[:, 6:12] = 0.0

    def agreement(served: np.ndarray, geometry: Geometry | None) -> float:
        answers = (vision.answer({"y": output}, tensor, geometry) for output in (served, reference))
        return fidelity(*answers).value

    for known in (geometry, None):
        assert agreement(padding, known) == 1.0
        assert agreement(margin, known) == pytest.approx(0.25 if task == "segment" else 0.5)
