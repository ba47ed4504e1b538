"""Nodes that stay float32 in the float16 form, with reasons, and tensors that exist in both types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from half_zoo import (
    FLOAT,
    HALF,
    assert_well_formed,
    batches_for,
    loud_net,
    measure,
    noise_db,
    quantise,
    run,
    silu_net,
    upsampling_net,
)
from onnx import ModelProto, numpy_helper
from zoo import Net, by_name, residual_net

from engines.half.convert import half_precision


def eps_net() -> ModelProto:
    """Layer normalisation as exporters write it out, between two convolutions."""
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 4)
    centred = net.node("Sub", x, net.node("ReduceMean", x, axes=[1]))
    variance = net.node("ReduceMean", net.node("Mul", centred, centred), axes=[1])
    root = net.node("Sqrt", net.node("Add", variance, net.constant(np.array(1e-6, np.float32))))
    return net.model(net.conv(net.node("Div", centred, root), 4, 2))


def segmentation_net() -> ModelProto:
    """One head ends in movement and a bounded activation, the other in arithmetic on the way."""
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 4)
    large = net.node("Resize", x, "", net.constant(np.array([1, 1, 4, 4], np.float32)), mode="linear")
    depth = net.node("Mul", net.node("Sigmoid", x), net.constant(np.array(80, np.float32)))
    return net.model(net.node("Sigmoid", large), net.node("Transpose", depth, perm=[0, 2, 3, 1]))


def foreign_net() -> ModelProto:
    """Operators that ONNX defines for float32 only: Celu's data, the boxes and scores of NonMaxSuppression."""
    net = Net((1, 4, 4, 4))
    x = net.node("Conv", net.node("Celu", net.conv("image", 4, 4)), net.weight(4, 4, 1, 1))
    rows = net.node("Reshape", x, net.constant(np.array([1, 4, 16], np.int64)))
    boxes = net.node("Transpose", rows, perm=[0, 2, 1])
    best, overlap = net.constant(np.array([3], np.int64)), net.constant(np.array([1], np.float32))
    chosen = net.node("NonMaxSuppression", boxes, rows, best, overlap)
    return net.model(net.node("Cast", chosen, to=FLOAT))


def identity_matrix_net() -> ModelProto:
    """An operator whose result has a type of its own, whatever it reads."""
    net = Net((1, 4, 8, 8))
    x = net.node("Reshape", net.conv("image", 4, 4), net.constant(np.array([16, 16], np.int64)))
    return net.model(net.node("MatMul", net.node("Add", x, net.node("EyeLike", x)), net.weight(16, 4)))


def limits_net() -> ModelProto:
    """Clip without a real limit, a mask of -inf, a bias of nothing, and a fill value beyond float16."""
    net = Net((1, 4, 8, 8))
    bias = net.constant(np.full(4, 1e-9, np.float32))
    x = net.node("Conv", "image", net.weight(4, 4, 1, 1), bias)
    x = net.node("Clip", x, net.constant(np.array(0, np.float32)), net.constant(np.array(3.4e38, np.float32)))
    x = net.node("Max", x, net.constant(np.array(-np.inf, np.float32)))
    x = net.conv(x, 4, 4)
    x = net.node("Min", x, net.constant(np.array(1e6, np.float32)))
    return net.model(net.conv(x, 4, 2))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (residual_net, {}),
        (silu_net, {}),
        (upsampling_net, {}),
        (
            eps_net,
            {
                "Mul_t3": "squares leave",
                "ReduceMean_t4": "between",
                "Add_t5": "constant 'c2' is 1e-06",
                "Sqrt_t6": "Sqrt loses",
            },
        ),
        (segmentation_net, {"Mul_t3": "decoding", "Transpose_t5": "decoding"}),
        (
            foreign_net,
            {"Celu_t1": "not define Celu", "NonMaxSuppression_t5": "not define", "Cast_t6": "shapes and const"},
        ),
        (identity_matrix_net, {"EyeLike_t2": "not define"}),
        (limits_net, {"Min_t4": "constant 'c7' holds 1e+06"}),
    ],
)
def test_nodes_that_stay_float32_have_a_reason(make: Callable[[], ModelProto], expected: dict[str, str]) -> None:
    model = make()
    form = half_precision(model, {})
    assert_well_formed(form, model)
    assert list(form.float32) == list(expected)  # in graph order
    for name, reason in form.float32.items():
        assert expected[name] in reason
    batches = batches_for(model, 4)
    assert noise_db(run(model, batches), run(form.model, batches)) < -45


def test_a_limit_beyond_float16_becomes_its_largest_and_infinity_stays() -> None:
    constants = {t.name: numpy_helper.to_array(t) for t in half_precision(limits_net(), {}).model.graph.initializer}
    assert {constants[name].dtype for name in ("c3", "c4")} == {np.dtype(np.float16)}
    assert (float(constants["c3"]), float(constants["c4"])) == (65504, -np.inf)


@pytest.mark.parametrize("measured", [("image",), ("t0",), ("t1",), ("image", "t0", "t1")])
def test_a_map_beyond_float16_keeps_its_layers_float32(measured: tuple[str, ...]) -> None:
    """Measured itself, or proven from a measurement before it."""
    model = loud_net()
    batches = batches_for(model)
    expected = run(model, batches)
    assert not half_precision(model, {}).float32  # no measurement, no reason
    assert not np.isfinite(run(half_precision(model, {}).model, batches)["t2"]).all()
    form = half_precision(model, measure(model, batches, measured))
    assert_well_formed(form, model)
    assert "Conv_t3" not in form.float32
    assert noise_db(expected, run(form.model, batches)) < -50
    quantised, _ = quantise(model, batches)
    int8 = half_precision(quantised, {})  # the INT8 scale bounds it
    assert_well_formed(int8, quantised)
    assert int8.float32.keys() == form.float32.keys() == {"Conv_t0", "Relu_t1", "Conv_t2"}
    assert noise_db(expected, run(int8.model, batches)) < -30


def test_a_tensor_and_a_weight_that_both_kinds_read_exist_in_both_types() -> None:
    net = Net((1, 4, 8, 8))
    x = net.node("Relu", "image")
    weight = net.weight(4, 4, 1, 1)
    loud = net.constant(np.full((4, 4, 1, 1), 1e5, np.float32))
    bias = net.constant(np.zeros(4, np.float32))
    outputs = [net.node("Conv", x, weight, bias), net.node("Conv", x, loud, bias), net.node("Conv", x, weight)]
    model = net.model(*outputs)
    batches = batches_for(model)
    graph, amax = quantise(model, batches)
    for master_graph, limit in ((model, -60), (graph, -30)):
        form = half_precision(master_graph, amax)
        assert_well_formed(form, master_graph)
        assert form.float32.keys() - {"Relu_t0"} == {"Conv_t2"}
        assert noise_db(run(model, batches), run(form.model, batches)) < limit
    nodes = by_name(form.model)
    assert nodes["Conv_t1"].input[0] == nodes["Conv_t3"].input[0] == "t0.dequantised"
    assert nodes["Conv_t2"].input[0] == "t0.dequantised.float"
    assert nodes["t0.int8"].input[0] == "t0"
    values = {t.name: numpy_helper.to_array(t) for t in form.model.graph.initializer}
    assert values["t0.scale"].dtype == np.float16
    assert values["t0.scale"] == values["t0.scale.float"]  # one grid for all readers
    assert values["c2"].dtype == np.float16
    assert values["c2.float"].dtype == np.float32


def test_own_casts_and_integers_of_a_model_need_no_cast() -> None:
    net = Net((1, 4, 8, 8))
    x = net.node("Cast", net.node("Cast", net.conv("image", 4, 4), to=HALF), to=FLOAT)
    best = net.node("ArgMax", net.node("Softmax", x, axis=1), axis=1)
    shape = net.node("Shape", x)
    model = net.model(net.conv(x, 4, 2), net.node("Cast", best, to=FLOAT), net.node("Cast", shape, to=FLOAT))
    form = half_precision(model, {})
    assert_well_formed(form, model)
    assert [node.name for node in form.model.graph.node if node.op_type == "Cast"] == [
        "image.cast", "Cast_t1", "Cast_t2", "t2.cast", "t6.cast", "Cast_t7", "Cast_t8",
    ]  # fmt: skip
    batches = batches_for(model, 4)
    assert noise_db(run(model, batches), run(form.model, batches)) < -50


def test_names_that_are_taken_are_left_alone() -> None:
    net = Net((1, 4, 8, 8))
    x = net.conv("image", 4, 4)
    model = net.model(net.node("Relu", x), net.conv(x, 4, 2))
    model.graph.node[0].output[0] = model.graph.node[1].input[0] = model.graph.node[2].input[0] = "image.half"
    model.graph.node[1].name = "image.cast"
    form = half_precision(model, {})
    assert_well_formed(form, model)
    batches = batches_for(model, 4)
    assert noise_db(run(model, batches), run(form.model, batches)) < -60


def test_inferred_types_that_a_graph_carries_follow() -> None:
    model = onnx.shape_inference.infer_shapes(residual_net())
    form = half_precision(model, {})
    assert_well_formed(form, model)
    declared = {value.name: value.type.tensor_type.elem_type for value in form.model.graph.value_info}
    assert len(declared) == len(model.graph.value_info)
    assert set(declared.values()) == {HALF}
