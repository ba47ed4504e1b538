from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, numpy_helper
from zoo import Net, by_name, image, residual_net, run

from calibrate.histogram import AbsHistogram, merge_into
from calibrate.noise import sqnr_db
from calibrate.plan import PrecisionPlan
from engines.calibration import calibrate_histograms
from engines.errors import EngineError
from engines.graph.load import load_model
from engines.graph.passes import prepare
from engines.interface import BuildRequest
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.integer_kernels import narrow_weights
from engines.quantise.placement import place

Images = list[NDArray[np.float32]]


def quantise(
    model: ModelProto, images: Images, method: str = "max", plan: PrecisionPlan | None = None, **numbers: Any
) -> ModelProto:
    """Calibrate on images and insert Q/DQ, as the product does."""
    placement = place(model)
    observer = OnnxRuntimeBackend().observer(BuildRequest(model), placement.taps)
    histograms: dict[str, AbsHistogram] = {}
    for each in images:
        merge_into(histograms, observer.observe(each).histograms)
    calibration = calibrate_histograms(
        histograms, placement.shared, model_sha256="", method=method, frames=len(images), source=""
    )
    quantised = insert_qdq(model, place(model, plan) if plan else placement, calibration.amax, **numbers)
    onnx.checker.check_model(quantised, full_check=True)
    return quantised


def outputs_at_default_optimisation(model: ModelProto, batch: NDArray[np.float32]) -> list[NDArray[Any]]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, {session.get_inputs()[0].name: batch}))


# ---- structure


def test_a_tensor_has_one_q_in_int8_with_an_explicit_zero_point() -> None:
    model = residual_net()
    before = model.SerializeToString()
    quantised = quantise(model, [image(model)])
    assert model.SerializeToString() == before
    constants = {tensor.name: tensor for tensor in quantised.graph.initializer}
    assert not any(each.data_type == TensorProto.FLOAT and len(each.dims) > 1 for each in constants.values())
    written = [node for node in quantised.graph.node if node.op_type == "QuantizeLinear"]
    assert [node.input[0] for node in written] == ["image", "t1", "t3", "t7", "t8"]
    for node in quantised.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            assert constants[node.input[2]].data_type == TensorProto.INT8
            assert not numpy_helper.to_array(constants[node.input[2]]).any()
            assert constants[node.input[1]].data_type == TensorProto.FLOAT
    nodes = by_name(quantised)
    assert nodes["Conv_t2"].input[0] == nodes["Add_t5"].input[1] == "t1.dequantised"
    assert nodes["Add_t5"].input[0] == "t4"
    bias = constants[nodes["Conv_t0"].input[2]]
    assert bias.data_type == TensorProto.FLOAT


def test_where_uint8_is_taken_what_is_never_negative_has_twice_the_steps() -> None:
    model = residual_net((1, 3, 32, 32))
    images = [image(model, seed) for seed in range(4)]
    signed, unsigned = (quantise(model, images, unsigned=each) for each in (False, True))
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in unsigned.graph.initializer}
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in signed.graph.initializer}
    written = {n.input[0]: n.input[1:] for n in unsigned.graph.node if n.op_type == "QuantizeLinear"}
    assert {tensor: constants[zero].dtype for tensor, (_, zero) in written.items()} == {
        "image": np.int8, "t1": np.uint8, "t3": np.uint8, "t7": np.uint8, "t8": np.uint8,
    }  # fmt: skip
    for tensor, (scale, zero) in written.items():
        range_ = 255 if constants[zero].dtype == np.uint8 else 127
        assert range_ * constants[scale] == pytest.approx(127 * before[f"{tensor}.scale"], rel=1e-6)
    batch = image(model, 9)
    (exact,), (found,) = (run(each, batch).values() for each in (model, unsigned))
    assert sqnr_db(exact, found) > 35.0


def test_weights_of_seven_bits_are_rounded_once() -> None:
    """Rounded to eight bits first, half of them would lie between two steps."""
    model = residual_net((1, 3, 32, 32))
    images = [image(model, seed) for seed in range(4)]
    eight, seven = (quantise(model, images, weight_bits=bits) for bits in (8, 7))
    weights = [numpy_helper.to_array(each) for each in seven.graph.initializer if each.data_type == TensorProto.INT8]
    assert max(np.abs(each.astype(int)).max(initial=0) for each in weights) == 64
    twice = ModelProto.FromString(eight.SerializeToString())
    assert narrow_weights(twice) > 0
    before = seven.SerializeToString()
    assert narrow_weights(seven) == 0
    assert seven.SerializeToString() == before

    def noise(narrowed: ModelProto) -> float:
        floats = {each.name: numpy_helper.to_array(each) for each in model.graph.initializer}
        constants = {each.name: numpy_helper.to_array(each) for each in narrowed.graph.initializer}
        dequantised = {node.input[0]: node for node in narrowed.graph.node if node.op_type == "DequantizeLinear"}
        total = 0.0
        for name, node in dequantised.items():
            if name in constants:
                steps, scales = constants[name], constants[node.input[1]]
                axis = node.attribute[0].i
                along = [-1 if index == axis else 1 for index in range(steps.ndim)]
                exact = floats[name.partition(".axis")[0]]
                total += float(np.square(steps * scales.reshape(along) - exact).sum())
        return total

    assert noise(seven) < 0.7 * noise(twice)


def test_tensors_under_one_scale_are_unsigned_together() -> None:
    net = Net()
    parts = [net.node("Relu", net.conv("image", 3, 4)), net.conv("image", 3, 4)]
    model = net.model(net.conv(net.node("Concat", *parts, axis=1), 8, 4))
    quantised = quantise(model, [image(model)], unsigned=True)
    types = {tensor.name: tensor.data_type for tensor in quantised.graph.initializer}
    assert {types[node.input[2]] for node in quantised.graph.node if node.op_type == "QuantizeLinear"} == {
        TensorProto.INT8
    }


def test_a_weight_that_two_layers_share_is_quantised_once() -> None:
    net = Net((1, 4, 4, 4))
    weight = net.weight(4, 4, 1, 1)
    model = net.model(net.node("Conv", net.node("Conv", "image", weight), weight))
    quantised = quantise(model, [image(model)])
    assert [t.data_type for t in quantised.graph.initializer].count(TensorProto.INT8) == 3  # and two zero points


def test_layers_that_a_plan_keeps_float_read_what_was_never_quantised() -> None:
    net = Net((1, 4, 8, 8))
    x = net.node("Relu", "image")
    model = net.model(net.node("Sub", net.conv(x, 4, 4), net.conv(x, 4, 4)))
    nodes = by_name(quantise(model, [image(model)], plan=PrecisionPlan({"Conv_t1": "too sensitive"})))
    assert nodes["Conv_t1"].input[:2] == ["t0", "c0"]
    assert nodes["Conv_t2"].input[0] == "t0.dequantised"


def test_a_dead_tensor_does_not_widen_the_scale_of_its_group() -> None:
    net = Net((1, 4, 8, 8))
    joined = net.node("Concat", net.node("Relu", "image"), net.node("Abs", "image"), axis=1)
    model = net.model(net.conv(joined, 8, 4))
    quantised = insert_qdq(model, place(model), {"t0": 0.0, "t1": 0.127})
    scales = {t.name: numpy_helper.to_array(t) for t in quantised.graph.initializer if t.name.startswith("t")}
    assert scales == {f"t{i}.scale": np.float32(0.001) for i in range(3)}


def test_refuses_a_calibration_with_gaps() -> None:
    model = residual_net()
    with pytest.raises(EngineError, match=r"calibration\.tap.*'t3'"):
        insert_qdq(model, place(model), {"image": 1.0, "t1": 1.0, "t7": 1.0})


# ---- numbers


def test_int8_concat_and_pooling_round_nothing_twice() -> None:
    net = Net((1, 4, 8, 8))
    parts = [net.node("Relu", "image"), net.node("Abs", "image")]
    pooled = net.node("MaxPool", net.node("Concat", *parts, axis=1), kernel_shape=[2, 2])
    model = net.model(net.conv(pooled, 8, 2))
    quantised = quantise(model, [image(model)])
    tensors = [f"{name}.dequantised" for name in (*parts, pooled)]
    for name in tensors:
        quantised.graph.output.append(onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    values = run(quantised, image(model))
    joined = np.concatenate([values[tensors[0]], values[tensors[1]]], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(joined, (2, 2), axis=(2, 3))
    np.testing.assert_array_equal(values[tensors[2]], windows.max(axis=(-2, -1)))


def test_dead_channels_and_dead_tensors_stay_exact() -> None:
    net = Net((1, 3, 4, 4))
    weight = net.rng.normal(size=(4, 3, 1, 1)).astype(np.float32)
    weight[1] = 0
    conv = net.node("Conv", "image", net.constant(weight), net.weight(4))
    silent = net.node("Mul", conv, net.constant(np.zeros(1, np.float32)))
    model = net.model(net.node("Conv", silent, net.weight(2, 4, 1, 1), net.weight(2)), conv)
    quantised = quantise(model, [image(model)])
    expected, found = run(model, image(model)), run(quantised, image(model))
    np.testing.assert_array_equal(expected["t2"], found["t2"])
    np.testing.assert_array_equal(expected["t0"][:, 1], found["t0"][:, 1])
    optimised = outputs_at_default_optimisation(quantised, image(model))
    np.testing.assert_allclose(expected["t0"][:, 1], optimised[1][:, 1], rtol=1e-6)


# ---- real models


def pictures(archive: Path) -> list[tuple[str, NDArray[np.uint8]]]:
    """(path inside the archive, BGR image), by path."""
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith((".png", ".jpg")))
        decoded = [cv2.imdecode(np.frombuffer(file.read(name), np.uint8), cv2.IMREAD_COLOR) for name in names]
    return list(zip(names, cast("list[NDArray[np.uint8]]", decoded), strict=True))


def test_ultraface_boxes_survive(shared_data: Path) -> None:
    model = prepare(load_model(shared_data / "face_ultraface_rfb_320_fp32.onnx"), run)
    photos = [
        ((cv2.resize(picture, (320, 240))[:, :, ::-1].astype(np.float32) - 127) / 128).transpose(2, 0, 1)[None]
        for _, picture in pictures(shared_data / "img_faces_dlib_9_labelled.zip")
    ]
    quantised = quantise(model, photos[:6], "mse")
    for photo in photos[6:]:
        expected, found = run(model, photo), run(quantised, photo)
        assert sqnr_db(expected["boxes"], found["boxes"]) > 40
        assert sqnr_db(expected["scores"], found["scores"]) > 30
