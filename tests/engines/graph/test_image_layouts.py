"""Models that take channels last, or bytes: calibrated, built and served as the float ones with channels first.

Preprocessing turns and scales like a front of nodes in the graph: every tensor behind is the same to the last bit.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from image_fronts import fronted
from onnx import ModelProto, TensorProto
from trt_world import fake, int8  # noqa: F401  # a fixture, which pytest finds by its name here
from zoo import Net, residual_net, run

from agent.models.model import open_model
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.raw import RawOutputs
from calibrate.histogram import to_bytes
from engines.graph.load import trial_image
from engines.graph.passes import cast_image_first, prepare
from engines.interface import BackendOptions, BuildRequest, OverlappingEngine
from engines.preprocessing import Layout, PixelType
from engines.quantise.placement import place
from engines.registry import open_backend
from engines.trt.backend import TensorRtBackend

LAYOUTS: list[tuple[Layout, PixelType]] = [("NHWC", "float32"), ("NCHW", "uint8"), ("NHWC", "uint8")]
FRAME = np.random.default_rng(0).integers(0, 256, (13, 21, 3), dtype=np.uint8)


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


@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_every_tensor_behind_the_image_is_the_same_to_the_last_bit(
    layout: Layout, dtype: PixelType, tmp_path: Path
) -> None:
    plain, numbers = residual_net((1, 3, 16, 24)), {"scale": 1 / 255, "mean": [0.5], "std": [0.25]}
    scales = dtype == "uint8"  # the graph, in place of preprocessing
    front = fronted(plain, layout, dtype, *(([4 / 255], [-2.0]) if scales else ()))
    histograms, answers, backend = [], [], open_backend("onnxruntime")
    for graph, given in ((plain, numbers), (front, {} if scales else numbers)):
        spec = small_spec(tmp_path, graph, **given)
        model = open_model(spec)
        with closing(backend.observer(model.reference, model.placement.taps)) as observer:
            tensor, _ = VisionTask(spec, observer.inputs, observer.outputs).preprocess(FRAME)
            observed = observer.observe(tensor)
        histograms.append([to_bytes(histogram) for histogram in observed.histograms.values()])
        answers.append(observed.outputs["t9"].tobytes())
    assert len(histograms[0]) > 3
    assert histograms[0] == histograms[1]
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(("layout", "dtype"), LAYOUTS)
def test_the_device_answers_as_the_cpu(layout: Layout, dtype: PixelType, tmp_path: Path) -> None:
    """Observed, and served with the frame preprocessed where the input lies."""
    spec = small_spec(tmp_path, fronted(residual_net((1, 3, 16, 24)), layout, dtype, [1 / 255]))
    model = open_model(spec)
    answers, seen = [], []
    for backend in (open_backend("onnxruntime"), TensorRtBackend()):
        with closing(backend.load(backend.build(model.reference).engine)) as engine:
            assert isinstance(engine, OverlappingEngine) == (backend.name == "tensorrt")
            task = VisionTask(spec, engine.inputs, engine.outputs)
            prediction, _ = task.infer(engine, FRAME)
            assert isinstance(prediction, RawOutputs)
            answers.append(prediction.outputs)
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
