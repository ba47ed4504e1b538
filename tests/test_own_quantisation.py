"""Models that bring Q/DQ of their own: what is refused, that the rest is kept, and what is added around it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from bench import Bench, calibrate, picture
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static
from worlds import SPEC
from zoo import Net, by_name, image, residual_net, run

from agent.cli import main
from agent.model import open_model
from agent.model_spec import load_model_spec
from calibrate.plan import PrecisionPlan
from engines.backend import BackendOptions, BuildRequest, EngineError
from engines.graph import canonical_hash, load_model
from engines.half import half_precision
from engines.macs import int8_macs_share
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.passes import prepare
from engines.placement import COMPUTE_OPS, place
from engines.qdq import insert_qdq
from engines.tensorrt_backend import TensorRtBackend
from engines.topology import Topology
from engines.trt.layers import LAYERS_FILE, layers_from_json

QDQ = ("QuantizeLinear", "DequantizeLinear")


class QuantisedNet(Net):
    """A net whose builder quantises."""

    def int8(self, x: str, scale: float | NDArray[np.float32] = 0.03, zero: int = 0, **attributes: int) -> str:
        """Q and DQ, each with constants of its own, as PyTorch exports them."""
        q = self.node("QuantizeLinear", x, *self._scale(scale, zero), **attributes)
        return self.node("DequantizeLinear", q, *self._scale(scale, zero), **attributes)

    def stored(self, shape: tuple[int, ...], axis: int = 0) -> str:
        """Weights as INT8, a scale per channel."""
        weight = self.constant(self.rng.integers(-127, 128, shape).astype(np.int8))
        scale = self.rng.uniform(0.001, 0.01, shape[axis]).astype(np.float32)
        return self.node("DequantizeLinear", weight, *self._scale(scale, 0), axis=axis)

    def int8_conv(self, x: str, inputs: int, outputs: int) -> str:
        """A convolution of what has been quantised already."""
        weight = self.stored((outputs, inputs, 3, 3))
        return self.node("Conv", x, weight, self.weight(outputs), pads=[1, 1, 1, 1])

    def _scale(self, scale: float | NDArray[np.float32], zero: int) -> tuple[str, str]:
        values = np.asarray(scale, np.float32)
        return self.constant(values), self.constant(np.full(values.shape, zero, np.int8))


def net(channels: int = 4) -> QuantisedNet:
    return QuantisedNet((1, channels, 8, 8))


def quantised(model: ModelProto, amax: float = 4.0) -> ModelProto:
    placement = place(model)
    graph = insert_qdq(model, placement, dict.fromkeys(placement.taps, amax))
    onnx.checker.check_model(graph, full_check=True)
    return graph


def sqnr_db(reference: NDArray[np.generic], found: NDArray[np.generic]) -> float:
    signal, noise = reference.astype(np.float64), found.astype(np.float64) - reference
    return float(10 * np.log10(np.square(signal).sum() / np.square(noise).sum()))


# ---- what is refused


def with_zero_point(value: NDArray[np.generic] | None) -> ModelProto:
    n = net()
    inputs = [n.constant(np.array(0.1, np.float32)), *([] if value is None else [n.constant(value)])]
    return n.model(n.node("DequantizeLinear", n.node("QuantizeLinear", "image", *inputs), *inputs))


@pytest.mark.parametrize(
    ("zero_point", "found"),
    [
        (None, "without a zero point, which stands for uint8"),
        (np.array(0, np.uint8), "with a zero point of type uint8"),
        (np.array(3, np.int8), "with zero point 3"),
    ],
)
def test_refuses_what_is_not_symmetric_int8(zero_point: NDArray[np.generic] | None, found: str) -> None:
    with pytest.raises(EngineError, match=rf"model\.quantised: QuantizeLinear 'QuantizeLinear_t0' {found}.*QInt8"):
        prepare(with_zero_point(zero_point), run)


@pytest.mark.parametrize("scale", [0.0, -0.1, np.nan, np.inf, 1e-40])
def test_refuses_scales_that_are_none(scale: float) -> None:
    n = net()
    with pytest.raises(EngineError, match=rf"model\.quantised: QuantizeLinear .* with scale {scale:.3g}"):
        prepare(n.model(n.int8("image", scale)), run)


def computed_scale(n: QuantisedNet) -> str:
    scale = n.node("GlobalMaxPool", "image")
    zero = n.constant(np.array(0, np.int8))
    return n.node("DequantizeLinear", n.node("QuantizeLinear", "image", scale, zero), scale, zero)


def integer_pooling(n: QuantisedNet) -> str:
    scale, zero = n.constant(np.array(0.1, np.float32)), n.constant(np.array(0, np.int8))
    pooled = n.node("MaxPool", n.node("QuantizeLinear", "image", scale, zero), kernel_shape=[2, 2])
    return n.node("DequantizeLinear", pooled, scale, zero)


def two_scales(n: QuantisedNet) -> str:
    zero = n.constant(np.array(0, np.int8))
    scales = [n.constant(np.array(value, np.float32)) for value in (0.1, 0.2)]
    return n.node("DequantizeLinear", n.node("QuantizeLinear", "image", scales[0], zero), scales[1], zero)


def wrong_axis(n: QuantisedNet) -> str:
    return n.node("Conv", n.int8("image"), n.stored((4, 4, 3, 3), axis=1))


def wrong_axis_behind_a_transpose(n: QuantisedNet) -> str:
    weight = n.node("Transpose", n.stored((8, 8), axis=1), perm=[1, 0])
    return n.node("MatMul", n.int8("image"), weight)


def two_axes(n: QuantisedNet) -> str:
    constants = n._scale(np.full(4, 0.1, np.float32), 0)
    q = n.node("QuantizeLinear", n.weight(4, 4, 1, 1), *constants, axis=0)
    return n.node("Conv", n.int8("image"), n.node("DequantizeLinear", q, *constants, axis=1))


def no_such_axis(n: QuantisedNet) -> str:
    constants = n._scale(np.full(4, 0.1, np.float32), 0)
    bias = n.node("DequantizeLinear", n.constant(np.ones(4, np.int8)), *constants)  # ONNX's default is axis 1
    return n.node("Conv", n.int8("image"), n.stored((4, 4, 3, 3)), bias)


def no_q(n: QuantisedNet) -> str:
    return n.node("DequantizeLinear", n.node("Cast", "image", to=TensorProto.INT8), *n._scale(0.1, 0))


def wrong_count(n: QuantisedNet) -> str:
    weight = n.int8(n.weight(4, 4, 3, 3), np.full(3, 0.1, np.float32), axis=0)
    return n.node("Conv", n.int8("image"), weight)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (computed_scale, "QuantizeLinear 'QuantizeLinear_t1' with a computed scale"),
        (integer_pooling, "QuantizeLinear 'QuantizeLinear_t0' read by MaxPool"),
        (no_q, "DequantizeLinear 'DequantizeLinear_t1' that reads Cast"),
        (two_axes, "read by 'DequantizeLinear_t3' under another scale"),
        (no_such_axis, r"with 4 scales along axis 1 of a weight of shape \[4\]"),
        (lambda n: n.int8("image", np.full((1, 1), 0.1, np.float32)), r"with a float scale of shape \[1, 1\]"),
        (two_scales, "read by 'DequantizeLinear_t1' under another scale"),
        (lambda n: n.int8("image", np.full(4, 0.1, np.float32), axis=1), "with a vector of scales for an activation"),
        (wrong_axis, "along axis 1 of the weight of Conv 'Conv_t3'.*axis 0"),
        (wrong_axis_behind_a_transpose, "along axis 0 of the weight of MatMul"),
        (wrong_count, r"with 3 scales along axis 0 of a weight of shape \[4, 4, 3, 3\]"),
        (lambda n: n.node("Add", "image", n.stored((4, 8, 8))), "with scales per channel, read by Add"),
    ],
)
def test_refuses_what_runtimes_read_differently(make: Callable[[QuantisedNet], str], found: str) -> None:
    n = net()
    with pytest.raises(EngineError, match=rf"model\.quantised: .*{found}"):
        prepare(n.model(make(n)), run)


def test_refuses_integers_as_a_result() -> None:
    n = net()
    model = n.model(n.int8("image"))
    model.graph.output.append(helper.make_tensor_value_info("t0", TensorProto.INT8, [1, 4, 8, 8]))
    with pytest.raises(EngineError, match=r"model\.quantised.*read by others than nodes"):
        prepare(model, run)


def test_refuses_integers_that_are_no_bias() -> None:
    n = net()
    constants = n.constant(np.array(0.1, np.float32)), n.constant(np.array(0, np.int32))
    table = n.node("DequantizeLinear", n.constant(np.ones(4, np.int32)), *constants)
    with pytest.raises(EngineError, match=r"model\.quantised: DequantizeLinear .* zero point of type int32"):
        prepare(n.model(n.node("Relu", "image"), table), run)


def test_refuses_q_dq_in_control_flow() -> None:
    n = net()
    scale, zero = n._scale(0.1, 0)
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    q = helper.make_node("QuantizeLinear", ["image", scale, zero], ["q"], name="inner")
    body = helper.make_graph([q, helper.make_node("DequantizeLinear", ["q", scale, zero], ["y"])], "body", [], [result])
    chosen = n.node("If", n.constant(np.array(True)), then_branch=body, else_branch=body)
    model = n.model(n.node("Relu", chosen))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("t1", TensorProto.FLOAT, [1, 4, 8, 8]))
    with pytest.raises(
        EngineError, match=r"model\.quantised: QuantizeLinear 'inner' in the body of a control-flow node"
    ):
        prepare(model, run)


# ---- what is kept


def qat_net() -> ModelProto:
    """Two layers of the model's own, the second with float weights behind Q/DQ; then a float one."""
    n = QuantisedNet((1, 3, 8, 8))
    x = n.node("Relu", n.int8_conv(n.int8("image"), 3, 4))
    weight = n.int8(n.weight(4, 4, 3, 3), n.rng.uniform(0.01, 0.03, 4).astype(np.float32), axis=-4)
    x = n.node("Relu", n.node("Conv", n.int8(x, 0.3), weight, n.weight(4), pads=[1, 1, 1, 1]))
    return n.model(n.conv(x, 4, 2))


def test_q_dq_is_kept_byte_for_byte(tmp_path: Path) -> None:
    onnx.save(qat_net(), tmp_path / "model.onnx")
    model = load_model(tmp_path / "model.onnx")
    master = prepare(model, run)
    graph = quantised(master)
    for later in (master, graph):
        nodes, constants = by_name(later), {tensor.name: tensor for tensor in later.graph.initializer}
        for node in model.graph.node:
            if node.op_type in QDQ:
                assert nodes[node.name] == node
                assert all(constants[t.name] == t for t in model.graph.initializer if t.name in node.input)
    assert canonical_hash(prepare(master, run)) == canonical_hash(master)


def test_scales_may_be_constant_nodes_of_an_old_opset() -> None:
    n = net()
    scale = n.node("Constant", value_float=0.03)
    zero = n.node("Constant", value=onnx.numpy_helper.from_array(np.array(0, np.int8)))
    x = n.node("DequantizeLinear", n.node("QuantizeLinear", "image", scale, zero), scale, zero)
    model = n.model(n.conv(x, 4, 2), opset=12)
    master = prepare(model, run)
    np.testing.assert_array_equal(*(run(m, image(model))["t4"] for m in (model, master)))
    assert (place(master).quantised, place(master).taps) == (("Conv_t4",), ())


@pytest.mark.parametrize(
    ("scale", "zero"),
    [
        (np.array(0.0123, np.float32), 0),
        (np.array([0.0123], np.float32), 0),
        (np.array([1e-9, 0.3, 7, 0.1], np.float32), 0),
        (np.array([1e-9, 0.3, 7, 0.1], np.float32), 5),
    ],
)
def test_an_int32_bias_becomes_the_same_float(scale: NDArray[np.float32], zero: int) -> None:
    n = net()
    integers = n.constant(n.rng.integers(-(2**31), 2**31, 4).astype(np.int32))
    zeros = n.constant(np.full(np.shape(scale), zero, np.int32))
    bias = n.node("DequantizeLinear", integers, n.constant(scale), zeros, axis=0)
    model = n.model(n.node("Conv", n.int8("image"), n.stored((4, 4, 3, 3)), bias))
    master = prepare(model, run)
    np.testing.assert_array_equal(*(run(m, image(model))["t4"] for m in (model, master)))
    assert {t.data_type for t in master.graph.initializer} == {TensorProto.FLOAT, TensorProto.INT8}
    assert Counter(n.op_type for n in master.graph.node) == {"QuantizeLinear": 1, "DequantizeLinear": 2, "Conv": 1}


# ---- what is added


def test_only_the_float_part_is_quantised() -> None:
    master = prepare(qat_net(), run)
    placement = place(master)
    assert placement.own == ("Conv_t3", "Conv_t9")
    assert placement.quantised == ("Conv_t11",)
    assert placement.taps == ("t10",)
    nodes = {node.name for node in master.graph.node if node.op_type not in QDQ}
    assert nodes == {*placement.own, *placement.quantised, *placement.floats}
    assert int8_macs_share(master, placement) == 1.0
    assert int8_macs_share(master, place(master, PrecisionPlan({"Conv_t11": "planned"}))) < 1.0
    graph = quantised(master, 60.0)
    assert Counter(node.op_type for node in graph.graph.node)["QuantizeLinear"] == 4
    expected, found = (run(m, image(master))["t11"] for m in (master, graph))
    assert sqnr_db(expected, found) > 30


@pytest.mark.parametrize("name", ["Conv_t3", "QuantizeLinear_t0"])
def test_a_plan_cannot_have_the_models_own_int8(name: str) -> None:
    with pytest.raises(EngineError, match=rf"plan\.node: node '{name}'.*the model itself has in INT8.*kept as it is"):
        place(prepare(qat_net(), run), PrecisionPlan({name: "too sensitive"}))


def test_who_reads_dequantised_values_needs_weights_alone() -> None:
    n = net()
    x = n.int8("image")
    pooled = n.node("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])
    joined = n.node("Concat", pooled, pooled, axis=1)
    outputs = n.conv(x, 4, 2), n.conv(joined, 8, 2), n.int8_conv(joined, 8, 2)
    placement = place(n.model(*outputs))
    assert placement.reads == {"Conv_t4": (), "Conv_t5": ()}
    assert set(placement.weights) == {"Conv_t4", "Conv_t5"}
    assert placement.own == ("Conv_t7",)
    assert placement.groups == ()
    assert "itself" in placement.floats["Concat_t3"]


def test_a_tensor_that_the_model_quantises_is_read_under_its_scale() -> None:
    n = net()
    x = n.node("Relu", "image")
    ours = n.conv(x, 4, 2)  # before the model's Q in the graph
    quiet = n.node("Conv", x, n.weight(2, 4, 1, 1))
    model = n.model(ours, quiet, n.int8_conv(n.int8(x), 4, 2))
    plan = PrecisionPlan({"Conv_t2": "planned"})
    placement = place(model, plan)
    assert (placement.own, placement.taps) == (("Conv_t6",), ())
    graph = insert_qdq(model, placement, {})
    onnx.checker.check_model(graph, full_check=True)
    nodes = by_name(graph)
    assert (nodes["Conv_t1"].input[0], nodes["Conv_t2"].input[0]) == ("t4", "t0")
    assert Counter(node.op_type for node in graph.graph.node)["QuantizeLinear"] == 1
    expected, found = (run(m, image(model)) for m in (model, graph))
    np.testing.assert_array_equal(expected["t6"], found["t6"])
    np.testing.assert_array_equal(expected["t2"], found["t2"])
    assert 20 < sqnr_db(expected["t1"], found["t1"]) < 60


def test_of_several_scales_of_the_models_the_first_is_taken() -> None:
    n = net()
    x = n.node("Relu", "image")
    first, second = n.int8(x), n.int8(x, 0.05)
    model = n.model(n.conv(x, 4, 2), n.int8_conv(first, 4, 2), n.int8_conv(second, 4, 2))
    graph = insert_qdq(model, place(model), {})
    onnx.checker.check_model(graph, full_check=True)
    assert by_name(graph)["Conv_t5"].input[0] == first


@pytest.mark.parametrize("moved", ["dequantised", "to be quantised"])
def test_values_under_several_scales_are_joined_in_float(moved: str) -> None:
    n = net()
    x = n.node("Relu", "image")
    own = n.int8(x)
    joined = n.node("Concat", own if moved == "dequantised" else x, n.node("Abs", "image"), axis=1)
    model = n.model(n.conv(joined, 8, 2), n.int8_conv(own, 4, 2))
    placement = place(model)
    assert placement.taps == (joined,)
    assert "the model's own" in placement.floats[f"Concat_{joined}"]
    graph = quantised(model)
    assert by_name(graph)[f"Concat_{joined}"].input[:] == by_name(model)[f"Concat_{joined}"].input[:]
    np.testing.assert_array_equal(*(run(m, image(model))["t7"] for m in (model, graph)))


def test_what_is_added_to_a_layer_of_the_models_own_is_its_affair() -> None:
    n = net()
    x = n.node("Relu", "image")
    own = n.node("Add", n.int8_conv(n.int8(x), 4, 4), n.node("Abs", "image"))
    ours = n.node("Add", n.conv(own, 4, 4), n.int8("image", 0.1))
    placement = place(n.model(n.int8_conv(n.int8(ours), 4, 2)))
    assert placement.floats[f"Add_{own}"] == "the layer that it completes is the model's own INT8"
    assert placement.reads[f"Add_{ours}"] == ()  # its skip connection is dequantised as it comes
    assert placement.taps == (own,)


def test_int8_weights_with_a_float_input_stay_so() -> None:
    n = net()
    model = n.model(n.int8_conv("image", 4, 2))
    placement = place(model)
    assert placement.floats["Conv_t1"] == "the model has its weights in INT8, and its input float"
    assert (placement.own, placement.quantised, int8_macs_share(model, placement)) == ((), (), 0.0)


def test_products_of_dequantised_activations_and_transposed_weights_are_the_models_own() -> None:
    n = net(8)
    x = n.int8("image")
    product = n.node("MatMul", x, n.node("Transpose", x, perm=[0, 1, 3, 2]))
    linear = n.node("MatMul", n.int8(product), n.node("Transpose", n.stored((6, 8)), perm=[1, 0]))
    model = prepare(n.model(linear), run)
    placement = place(model)
    assert placement.own == ("MatMul_t3", "MatMul_t8")
    assert int8_macs_share(model, placement) == 1.0


def test_what_we_quantised_is_kept_when_it_comes_back() -> None:
    """The names that we give are taken then."""
    model = residual_net()
    placement = place(model, PrecisionPlan({"Conv_t2": "too sensitive"}))
    first = insert_qdq(model, placement, dict.fromkeys(placement.taps, 4.0))
    master = prepare(first, run)
    again = place(master)
    assert again.own == ("Conv_t0", "Conv_t4", "Gemm_t9")
    assert (again.quantised, again.taps) == (("Conv_t2",), ())
    graph = insert_qdq(master, again, {})
    onnx.checker.check_model(graph, full_check=True)
    whole = insert_qdq(model, place(model), dict.fromkeys(placement.taps, 4.0))
    np.testing.assert_array_equal(*(run(m, image(model))["t9"] for m in (whole, graph)))
    assert canonical_hash(insert_qdq(graph, place(graph), {})) == canonical_hash(graph)


# ---- what other tools write


class Images(CalibrationDataReader):
    def __init__(self, model: ModelProto) -> None:
        name = model.graph.input[0].name
        self.images: Iterator[dict[str, NDArray[np.float32]]] = iter([{name: image(model, seed)} for seed in range(4)])

    def get_next(self) -> dict[str, NDArray[np.float32]] | None:
        return next(self.images, None)


def by_onnxruntime(
    model: ModelProto, folder: Path, per_channel: bool, floats: tuple[str, ...], symmetric: bool = True
) -> Path:
    """What ONNX Runtime's own static quantisation makes of a model."""
    onnx.save(model, folder / "float.onnx")
    quantize_static(
        folder / "float.onnx",
        folder / "model.onnx",
        Images(model),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QInt8,
        weight_type=QuantType.QInt8,
        per_channel=per_channel,
        nodes_to_exclude=list(floats),
        extra_options={"ActivationSymmetric": symmetric, "WeightSymmetric": symmetric},
    )
    return folder / "model.onnx"


def check_kept(model: ModelProto, master: ModelProto, output: str) -> None:
    """The same results to the bit, from the same graph without the DQs of int32 biases."""
    np.testing.assert_array_equal(*(run(m, image(model, 9))[output] for m in (model, master)))
    integers = {tensor.name for tensor in model.graph.initializer if tensor.data_type == TensorProto.INT32}
    biases = sum(node.op_type == "DequantizeLinear" and node.input[0] in integers for node in model.graph.node)
    before, after = (Counter(node.op_type for node in m.graph.node) for m in (model, master))
    assert before - after == ({"DequantizeLinear": biases} if biases else {})
    assert not after - before


@pytest.mark.parametrize("floats", [(), ("Conv_t2", "Gemm_t9")])
@pytest.mark.parametrize("per_channel", [True, False])
def test_what_onnxruntime_quantised(per_channel: bool, floats: tuple[str, ...], tmp_path: Path) -> None:
    model = load_model(by_onnxruntime(residual_net(), tmp_path, per_channel, floats))
    master = prepare(model, run)
    check_kept(model, master, "t9")
    placement = place(master)
    assert (placement.quantised, placement.taps) == (floats, ())  # what those read is dequantised already
    assert set(placement.own) == {"Conv_t0", "Conv_t2", "Conv_t4", "Gemm_t9"} - set(floats)
    graph = insert_qdq(master, placement, {})
    assert (graph == master) == (not floats)
    assert sqnr_db(run(residual_net(), image(model, 9))["t9"], run(graph, image(model, 9))["t9"]) > 20


def test_asymmetric_models_of_onnxruntime_are_refused(tmp_path: Path) -> None:
    model = load_model(by_onnxruntime(residual_net(), tmp_path, per_channel=False, floats=(), symmetric=False))
    with pytest.raises(EngineError, match=r"model\.quantised.*with zero point -?\d+.*ActivationSymmetric"):
        prepare(model, run)


@pytest.mark.parametrize("per_channel", [True, False])
def test_resnet20_quantised_by_onnxruntime(per_channel: bool, shared_data: Path, tmp_path: Path) -> None:
    whole = onnx.load(shared_data / "cls_resnet20_cifar10_fp32.onnx")
    layers = [node.name for node in whole.graph.node if node.op_type == "Conv"]
    for floats in ((), tuple(layers[1::2])):
        model = load_model(by_onnxruntime(whole, tmp_path, per_channel, floats))
        master = prepare(model, run)
        check_kept(model, master, "logits")
        placement = place(master)
        assert len(placement.own) == 20 - len(floats)
        assert placement.quantised == floats
        assert int8_macs_share(master, placement) == 1.0
        expected = run(whole, image(model, 9))["logits"]
        assert sqnr_db(expected, run(quantised(master), image(model, 9))["logits"]) > 20


# ---- the whole way


def test_a_quantised_model_needs_no_calibration(tmp_path: Path) -> None:
    by_onnxruntime(residual_net(), tmp_path, per_channel=True, floats=())
    (tmp_path / "model.yaml").write_text(yaml.safe_dump(SPEC))
    model = open_model(load_model_spec(tmp_path / "model.yaml"))
    assert model.placement.taps == ()
    backend = OnnxRuntimeBackend()
    observation = backend.observer(model.reference, model.placement.taps).observe(image(model.master))
    assert observation.histograms == {}
    built = backend.build(model.request(insert_qdq(model.master, model.placement, {}), "int8"))
    found = backend.load(built.engine).infer(image(model.master))
    np.testing.assert_array_equal(found["t9"], observation.outputs["t9"])


def precisions(graph: ModelProto) -> dict[str, str]:
    """The type that NVIDIA's builder has each convolution and matrix product compute in."""
    shape = tuple(dim.dim_value for dim in graph.graph.input[0].type.tensor_type.shape.dim)
    built = TensorRtBackend(BackendOptions(target="sm86")).build(BuildRequest(graph, "int8", shape))
    layers = [layer for layer in layers_from_json(built.files[LAYERS_FILE]) if layer.kind in ("correlation", "gemm")]
    names = [node.name for node in graph.graph.node if node.op_type in COMPUTE_OPS]
    return {name: layer.precision for layer in layers for name in names if name in layer.nodes}


def test_nvidias_builder_takes_both_kinds_of_q_dq_as_int8() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    assert precisions(quantised(prepare(qat_net(), run))) == dict.fromkeys(("Conv_t3", "Conv_t9", "Conv_t11"), "Int8")


def test_a_quantised_model_is_built_at_once(bench: Bench) -> None:
    by_onnxruntime(residual_net(), bench.folder, per_channel=True, floats=())
    bench.images("some", picture())
    said = bench.refuses(*calibrate(bench, bench.spec("own", onnx.load(bench / "model.onnx")), "some"))
    assert said.startswith("calibration.nothing: a model that is quantised already")
    assert "build it at once" in said
    for precision in ("int8", "fp32"):
        out = bench / precision
        assert main(["build", str(bench / "own.yaml"), "--precision", precision, "-o", str(out)]) == 0
        assert json.loads((out / "manifest.json").read_text())["int8_macs_share"] == 1.0


@pytest.mark.parametrize("per_channel", [True, False])
def test_nvidias_builder_takes_what_onnxruntime_quantised(per_channel: bool, tmp_path: Path) -> None:
    """Its outputs are dequantised: nothing reads them."""
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    graph = quantised(prepare(load_model(by_onnxruntime(residual_net(), tmp_path, per_channel, ("Conv_t2",))), run))
    assert set(precisions(graph)) == {"Conv_t0", "Conv_t2", "Conv_t4", "Gemm_t9"}
    assert set(precisions(graph).values()) == {"Int8"}


def test_nvidias_builder_takes_transposed_weights() -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    n = net(8)
    graph = n.model(n.node("MatMul", n.int8("image"), n.node("Transpose", n.stored((6, 8)), perm=[1, 0])))
    assert precisions(graph) == {"MatMul_t4": "Int8"}


def test_q_and_dq_with_constants_of_their_own_agree_in_float16() -> None:
    n = net()
    form = half_precision(n.model(n.node("Exp", n.int8(n.node("Relu", "image"), 0.0123))), {}).model
    topology = Topology(form)
    for node in topology.nodes:
        if node.op_type == "QuantizeLinear":
            scales = [node.input[1], *(reader.input[1] for reader, _ in topology.readers(node.output[0]))]
            first, *others = (onnx.numpy_helper.to_array(topology.initializers[name]) for name in scales)
            assert all(np.array_equal(first.astype(np.float32), other.astype(np.float32)) for other in others)
