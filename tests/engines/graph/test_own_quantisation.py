"""Models that bring Q/DQ of their own: it is kept to the byte, and what is added around it fits to it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto
from quantised_zoo import net, qat_net, quantised
from zoo import assert_same_bits, by_name, image, residual_net, run

from calibrate.noise import sqnr_db
from calibrate.plan import PrecisionPlan
from engines.errors import EngineError
from engines.graph.load import canonical_hash, load_model
from engines.graph.passes import prepare
from engines.graph.topology import Topology
from engines.graph.weights import dequantised
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.fusion import int8_macs_share
from engines.quantise.placement import place

QDQ = ("QuantizeLinear", "DequantizeLinear")


# ---- what is kept


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
    assert_same_bits(model, master)
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
    try:
        run(model, image(model))
    except EngineError:  # as 1.23, the last one for Python 3.10, does
        pytest.skip("this ONNX Runtime takes no int32 with a zero point, though ONNX has it")
    master = prepare(model, run)
    assert_same_bits(model, master)
    assert {t.data_type for t in master.graph.initializer} == {TensorProto.FLOAT, TensorProto.INT8}
    assert Counter(n.op_type for n in master.graph.node) == {"QuantizeLinear": 1, "DequantizeLinear": 2, "Conv": 1}


def test_float8_weights_keep_their_fractions() -> None:
    n = net()
    for name, shape, stored in (("w", [4], [0.5, 1.75, -0.25, 3.0]), ("z", [], [0.5])):
        n.initializers.append(onnx.helper.make_tensor(name, TensorProto.FLOAT8E4M3FN, shape, stored))
    n.node("DequantizeLinear", "w", n.constant(np.array(2.0, np.float32)), "z")
    topology = Topology(onnx.helper.make_model(onnx.helper.make_graph(n.nodes, "net", [], [], n.initializers)))
    values = dequantised(n.nodes[0], topology)
    assert values is not None
    assert values.tolist() == [0.0, 2.5, -1.5, 5.0]


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


def test_readers_of_dequantised_values_need_weights_alone() -> None:
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
    batch = image(model)
    np.testing.assert_array_equal(run(model, batch)["t7"], run(graph, batch)["t7"])


def test_an_add_to_an_own_layer_of_the_model_is_left_alone() -> None:
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


def test_a_graph_of_our_own_is_kept_when_it_comes_back() -> None:
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
    assert_same_bits(whole, graph)
    assert canonical_hash(insert_qdq(graph, place(graph), {})) == canonical_hash(graph)
