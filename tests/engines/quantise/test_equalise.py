"""Equalised and centred graphs, run by ONNX Runtime: in float they compute what they computed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from equalise_cases import CENTRED, CHANNELS, PADDED, built, convolution, divisors_for
from zoo import Net, assert_close, assert_same_bits, by_name

from engines.errors import EngineError
from engines.graph.topology import Topology
from engines.quantise.equalise import can_divide, can_offset, equalise, equalised_name


@pytest.mark.parametrize("case", [*PADDED, *CENTRED])
def test_divisors_change_no_bit(case: str) -> None:
    model, layer, channels = built((PADDED | CENTRED)[case])
    before = model.SerializeToString()
    divided = equalise(model, {layer: divisors_for(channels)}, {})
    assert model.SerializeToString() == before
    onnx.checker.check_model(divided, full_check=True)
    assert by_name(divided)[equalised_name(layer)].op_type == "Mul"
    assert_same_bits(model, divided)


@pytest.mark.parametrize("case", CENTRED)
def test_offsets_are_made_up_for_by_the_bias(case: str) -> None:
    model, layer, channels = built(CENTRED[case])
    assert can_offset(Topology(model), by_name(model)[layer])
    offsets = np.random.default_rng(2).normal(size=channels).tolist()
    centred = equalise(model, {layer: divisors_for(channels)}, {layer: offsets})
    onnx.checker.check_model(centred, full_check=True)
    assert [node.op_type for node in centred.graph.node if node.name.startswith(f"{layer}.")] == ["Mul", "Add"]
    assert_close(model, centred)


def test_offsets_alone_need_no_multiplication() -> None:
    model, layer, channels = built(convolution)
    centred = equalise(model, {layer: [1.0] * channels}, {layer: [0.5] * channels})
    assert [node.op_type for node in centred.graph.node] == ["Add", "Conv"]
    assert centred.graph.node[0].name == equalised_name(layer)
    assert_close(model, centred)


@pytest.mark.parametrize("case", PADDED)
def test_offsets_are_refused_where_the_bias_cannot_make_up_for_them(case: str) -> None:
    model, layer, channels = built(PADDED[case])
    assert not can_offset(Topology(model), by_name(model)[layer])
    with pytest.raises(EngineError, match=r"plan\.node.*cannot be divided or offset"):
        equalise(model, {layer: [1.0] * channels}, {layer: [1.0] * channels})


@pytest.mark.parametrize(
    ("divisors", "offsets"),
    [
        ({"Conv_t9": [1.0] * 4}, {}),
        ({}, {"Conv_t0": [1.0] * 4}),
        ({"Conv_t0": [1.0] * 3}, {}),
        ({"Conv_t0": [1.0] * 4}, {"Conv_t0": [1.0] * 5}),
        ({"Conv_t0": [1.0, 1.0, 0.0, 1.0]}, {}),
        ({"Conv_t0": [1.0, 1.0, float("inf"), 1.0]}, {}),
        ({"Conv_t0": [1.0] * 4}, {"Conv_t0": [float("nan")] * 4}),
        ({"Relu_t1": [1.0] * 4}, {}),
        ({"MatMul_t2": [1.0] * 4}, {}),
    ],
)
def test_refuses_a_plan_of_another_model(divisors: dict[str, list[float]], offsets: dict[str, list[float]]) -> None:
    net = Net((1, CHANNELS, 4, 4))
    relu = net.node("Relu", convolution(net))
    model = net.model(net.node("MatMul", relu, net.weight(4, 1, 2, 2)))
    with pytest.raises(EngineError) as caught:
        equalise(model, divisors, offsets)
    assert caught.value.code == "plan.node"


def test_weights_of_another_type_are_left_alone() -> None:
    net = Net((1, CHANNELS, 4, 4))
    double = net.node("Cast", "image", to=onnx.TensorProto.DOUBLE)
    layer = net.node("Conv", double, net.constant(net.rng.normal(size=(2, 4, 1, 1))))
    model = net.model(net.node("Cast", layer, to=onnx.TensorProto.FLOAT))
    assert not can_divide(Topology(model), by_name(model)[f"Conv_{layer}"])
