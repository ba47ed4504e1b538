"""Models that take channels last, or bytes: calibrated, built and served as the float ones with channels first.

Preprocessing turns and scales like a front of nodes in the graph: every tensor behind is the same to the last bit.
"""

from __future__ import annotations

import json
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from image_fronts import fronted
from lab import CIFAR_TEST, COCO, FACES, SPECS, tared
from onnx import ModelProto, TensorProto
from trt_world import fake, int8  # noqa: F401  # a fixture, which pytest finds by its name here
from zoo import Net, residual_net, run

from agent.models.model import open_model
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.histogram import to_bytes
from engines.calibration import load_calibration
from engines.graph.load import trial_image
from engines.graph.passes import cast_image_first, prepare
from engines.interface import BackendOptions, BuildRequest, ImageEngine
from engines.preprocessing import Layout, PixelType
from engines.quantise.placement import place
from engines.registry import open_backend
from engines.trt.backend import TensorRtBackend

LAYOUTS: list[tuple[Layout, PixelType]] = [("NHWC", "float32"), ("NCHW", "uint8"), ("NHWC", "uint8")]
FRAME = np.random.default_rng(0).integers(0, 256, (13, 21, 3), dtype=np.uint8)


def numbers(given: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Gain and bias of a spec's input, as preprocessing has them."""
    std = np.array(given.get("std", [1.0]), np.float64)
    gain = (given.get("scale", 1.0) / std).astype(np.float32)
    bias = (-np.array(given.get("mean", [0.0])) / std).astype(np.float32)
    return gain.tolist(), bias.tolist() if bias.any() else []


def specs(name: str, layout: Layout, dtype: PixelType, moves_bytes: bool, data: Path, folder: Path) -> tuple[Path, ...]:
    """MODEL.yaml of a shared model as it is, and of the same behind another image."""
    truth = SPECS[name]
    content = {key: value for key, value in truth.items() if key != "labels"}
    gain, bias = numbers(truth["input"]) if dtype == "uint8" else ([], [])
    onnx.save(fronted(onnx.load(data / truth["path"]), layout, dtype, gain, bias, moves_bytes), folder / "front.onnx")
    given = {key: value for key, value in truth["input"].items() if not (gain and key in ("scale", "mean", "std"))}
    contents = {
        "plain": {**content, "path": str(data / truth["path"])},
        "front": {**content, "path": "front.onnx", "input": given},
    }
    for title, each in contents.items():
        (folder / f"{title}.yaml").write_text(yaml.safe_dump(each))
    return tuple(folder / f"{title}.yaml" for title in contents)


@pytest.mark.parametrize(
    ("name", "frames", "layout", "dtype", "moves_bytes"),
    [
        pytest.param("fastestdet", COCO, "NHWC", "uint8", True, marks=pytest.mark.trial),
        pytest.param("ultraface", FACES, "NCHW", "uint8", False, marks=pytest.mark.trial),
        pytest.param("resnet20", CIFAR_TEST, "NHWC", "float32", False, marks=pytest.mark.trial),
        ("resnet20", CIFAR_TEST, "NHWC", "uint8", False),
    ],
)
def test_real_models_are_calibrated_built_and_served_alike(
    name: str, frames: str, layout: Layout, dtype: PixelType, moves_bytes: bool, shared_data: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few"
    with zipfile.ZipFile(shared_data / frames) as archive:
        images = [member for member in archive.namelist() if member.endswith((".jpg", ".png"))]
        archive.extractall(few, images[:3])
    answers, histograms, quantised = [], [], []
    for path in specs(name, layout, dtype, moves_bytes, shared_data, tmp_path):
        calibration, artefact = path.with_suffix(".json"), path.with_suffix("")
        tared("calibrate", path, "--frames", few, "-o", calibration)
        built = tared("build", path, "--calibration", calibration, "-o", artefact)
        assert (built["precision"], built["int8_macs_share"]) == ("int8", 1.0)
        tared("infer", artefact, "--frames", few, "-o", path.with_suffix(".jsonl"))
        answers.append(path.with_suffix(".jsonl").read_text())
        found = load_calibration(calibration)
        histograms.append([(to_bytes(seen), found.amax[tap]) for tap, seen in found.histograms.items()])
        quantised.append(set(open_model(load(path)).placement.quantised))
    assert answers[0] == answers[1]
    assert json.loads(answers[0].splitlines()[0])
    assert histograms[0] == histograms[1]
    assert quantised[1] - quantised[0] <= ({"front/Transpose"} if dtype == "float32" else set())
    assert quantised[0] <= quantised[1]


def load(path: Path) -> ModelSpec:
    content = yaml.safe_load(path.read_text())
    return ModelSpec.model_validate({**content, "path": path.parent / content["path"]})


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_bytes_are_never_quantised_and_floats_are_where_they_come_in(layout: Layout, dtype: PixelType) -> None:
    plain = residual_net()
    master = prepare(fronted(plain, layout, dtype, [0.5]), run)
    placement = place(master)
    assert "image" not in placement.taps
    assert len(placement.taps) == len(place(prepare(plain, run)).taps)
    straight = place(prepare(fronted(plain, layout, dtype), run))
    assert ("image" in straight.taps) == (dtype == "float32")


def test_a_transpose_of_bytes_is_one_of_floats_instead() -> None:
    model = fronted(residual_net(), "NHWC", "uint8", [0.5], moves_bytes=True)
    before = [node.op_type for node in model.graph.node]
    expected = run(model, trial_image(model))
    moved = cast_image_first(model)
    assert before[:2] == ["Transpose", "Cast"]
    assert [node.op_type for node in moved.graph.node][:2] == ["Cast", "Transpose"]
    onnx.checker.check_model(moved, full_check=True)
    found = run(moved, trial_image(moved))
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    again = moved.SerializeToString()
    assert cast_image_first(moved).SerializeToString() == again


def test_bytes_that_others_read_too_stay_as_they_are() -> None:
    net = Net((1, 8, 8, 3))
    turned = net.node("Transpose", "image", perm=[0, 3, 1, 2])
    first = net.conv(net.node("Cast", turned, to=TensorProto.FLOAT), 3, 4)
    second = net.node("Cast", net.node("ReduceMax", turned, keepdims=1), to=TensorProto.FLOAT)
    model = net.model(net.node("Add", first, second))
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.UINT8
    before = model.SerializeToString()
    assert cast_image_first(model).SerializeToString() == before


def small_spec(folder: Path, model: ModelProto, **given: object) -> ModelSpec:
    onnx.save(model, folder / "model.onnx")
    return ModelSpec.model_validate({"path": folder / "model.onnx", "task": "raw", "input": {"color": "rgb", **given}})


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_the_device_answers_as_the_cpu(layout: Layout, dtype: PixelType, tmp_path: Path) -> None:
    """Observed, and served with the frame preprocessed where the input lies."""
    spec = small_spec(tmp_path, fronted(residual_net((1, 3, 16, 24)), layout, dtype, [1 / 255]))
    model = open_model(spec)
    answers, seen = [], []
    for backend in (open_backend("onnxruntime"), TensorRtBackend()):
        with closing(backend.load(backend.build(model.reference).engine)) as engine:
            assert isinstance(engine, ImageEngine) == (backend.name == "tensorrt")
            task = VisionTask(spec, engine.inputs, engine.outputs)
            prediction, _ = task.infer(engine, FRAME)
            assert isinstance(prediction, dict)
            answers.append(prediction)
            tensor, _ = task.preprocess(FRAME)
            assert (tensor.dtype.name, tensor.shape) == (dtype, (1, 3, 16, 24) if layout == "NCHW" else (1, 16, 24, 3))
        with closing(backend.observer(model.reference, model.placement.taps)) as observer:
            seen.append(observer.observe(tensor).histograms)
    for name, values in answers[0].items():
        np.testing.assert_allclose(answers[1][name], values, rtol=1e-4, atol=1e-5)
    cpu, device = seen
    assert list(cpu) == list(device) == list(model.placement.taps)
    image = model.placement.taps[0]  # what no kernel has summed: equal to the last bit
    assert to_bytes(cpu[image]) == to_bytes(device[image])
    assert all(cpu[tap].amax == pytest.approx(device[tap].amax, rel=1e-5) for tap in cpu)


@pytest.mark.parametrize(
    ("precision", "layout", "dtype", "moves_bytes"),
    [
        *(("int8", *each, False) for each in LAYOUTS),
        ("int8", "NHWC", "uint8", True),
        ("fp16", "NHWC", "uint8", True),
        ("fp16", "NCHW", "uint8", False),
        ("fp32", "NHWC", "uint8", False),
    ],
)
def test_nvidia_s_builder_takes_them(
    precision: str, layout: Layout, dtype: PixelType, moves_bytes: bool, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    plain = residual_net((1, 3, 16, 24))
    model = open_model(small_spec(tmp_path, fronted(plain, layout, dtype, [1 / 255], [-0.5], moves_bytes)))
    request = int8(model.master) if precision == "int8" else BuildRequest(model.master, precision)
    built = open_backend("tensorrt", BackendOptions(target="sm86")).build(request)
    assert built.engine
    assert not built.without_int8
