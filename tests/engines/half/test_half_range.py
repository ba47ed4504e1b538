"""Limits of float16: values measured or proven too large, values that vanish, INT8 scales out of reach."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper
from zoo import Net

from engines.half.ranges import HALF_MAX, HEADROOM, beyond_half
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place

SHAPE = (1, 4, 6, 6)
ONES = np.ones(4, np.float32)


def chain_of_four(operator: str = "Relu") -> ModelProto:
    """image -> Conv t0 -> operator t1 -> Conv t2 -> Softmax t3, which has a bound of its own."""
    net = Net(SHAPE)
    x = net.node(operator, net.node("Conv", "image", net.weight(4, 4, 1, 1)))
    return net.model(net.node("Softmax", net.node("Conv", x, net.weight(4, 4, 1, 1))), opset=14)


@pytest.mark.parametrize(
    ("amax", "expected"),
    [
        ({}, {}),
        ({"another model's": 1e9}, {}),
        ({"image": 0.0}, {}),
        ({"t1": HALF_MAX / HEADROOM / 100}, {}),
        ({"t2": HALF_MAX / HEADROOM}, {}),
        ({"t2": HALF_MAX / HEADROOM + 1}, dict.fromkeys(["Conv_t2", "Softmax_t3"], "'t2' was measured at 16377")),
        ({"t2": math.inf}, dict.fromkeys(["Conv_t2", "Softmax_t3"], "'t2' was measured at inf")),
        ({"t2": math.nan}, dict.fromkeys(["Conv_t2", "Softmax_t3"], "'t2' was measured at nan")),
        ({"image": 1.0, "t2": math.nan}, dict.fromkeys(["Conv_t2", "Softmax_t3"], "'t2' was measured at nan")),
        ({"t2": 1e-6}, dict.fromkeys(["Conv_t2", "Softmax_t3"], "'t2' was measured at 1e-06, below")),
        ({"t1": 0.0, "t3": 1e9}, {}),
        (
            {"t1": 9999.0},
            {"Conv_t2": "'t2' can reach", "Softmax_t3": "'t2' can reach"},
        ),
        (
            {"t1": 2e4, "t2": 1.0},  # the activation did not make it that large: the convolution did
            {"Conv_t0": "'t0' reaches 80000 or more", "Relu_t1": "'t0' reaches", "Conv_t2": "'t1' was measured"},
        ),
    ],
)
def test_measurements_beyond_float16_keep_a_node_in_float32(amax: dict[str, float], expected: dict[str, str]) -> None:
    reasons = beyond_half(chain_of_four(), amax)
    assert reasons.keys() == expected.keys()
    for name, reason in reasons.items():
        assert expected[name] in reason


@pytest.mark.parametrize(
    ("operator", "amax", "conv_is_beyond"),
    [
        ("Add", {"t1": 0.0, "t2": 17e3}, True),
        ("Add", {"t1": 1e3, "t2": 17e3}, False),  # 17e3 - 1e3 is what the convolution must have reached
        ("Sub", {"t1": 1e3, "t2": 18e3}, True),
        ("Mul", {"t1": 1 / HEADROOM, "t2": 17e3}, True),
        ("Mul", {"t1": 2 / HEADROOM, "t2": 17e3}, False),
        ("Mul", {"t1": 0.001, "t2": 200.0}, True),
        ("Max", {"t1": 0.0, "t2": 17e3}, False),  # not examined
    ],
)
def test_a_measured_result_speaks_for_an_unmeasured_operand(
    operator: str, amax: dict[str, float], conv_is_beyond: bool
) -> None:
    net = Net(SHAPE)
    model = net.model(net.node(operator, net.conv("image", 4, 4), net.node("Relu", "image")))
    assert ("Conv_t0" in beyond_half(model, amax)) == conv_is_beyond


@pytest.mark.parametrize(
    ("make", "vanishing"),
    [
        (lambda net, c: net.node("Add", "image", c), True),
        (lambda net, c: net.node("Conv", "image", net.weight(4, 4, 1, 1), c), False),
        (lambda net, c: net.node("BatchNormalization", "image", *(net.weight(4) for _ in range(3)), c), True),
        (lambda net, c: net.node("BatchNormalization", "image", net.weight(4), c, c, net.constant(ONES)), False),
    ],
)
def test_a_constant_that_vanishes_matters_unless_it_is_added_to_a_product(
    make: Callable[[Net, str], str], vanishing: bool
) -> None:
    net = Net((1, 4, 4, 4))
    model = net.model(make(net, net.constant(np.full(4, 1e-7, np.float32))))
    assert bool(beyond_half(model, {})) == vanishing


def test_the_smallest_divisor_counts_and_the_largest_factor() -> None:
    mixed = np.array([1e-7, 0, 1, 1], np.float32)
    for operator, beyond in (("Div", True), ("Mul", False)):
        net = Net((1, 4, 4, 4))
        model = net.model(net.node(operator, "image", net.constant(mixed)))
        assert bool(beyond_half(model, {})) == beyond


@pytest.mark.parametrize(
    ("scale", "fits"), [(2.0**-17, True), (2.0**-18, False), (511.0, True), (512.0, False), (math.inf, False)]
)
def test_int8_scales_out_of_reach_concern_both_sides_of_the_pair(scale: float, fits: bool) -> None:
    model = chain_of_four("Sigmoid")
    quantised = insert_qdq(model, place(model), {"image": 1.0, "t1": 1.0})
    for tensor in quantised.graph.initializer:
        if tensor.name == "t1.scale":
            tensor.CopyFrom(numpy_helper.from_array(np.array(scale, np.float32), tensor.name))
    reasons = beyond_half(quantised, {})
    concerned = {name for name, reason in reasons.items() if "INT8 scale" in reason}
    assert concerned == (set() if fits else {"Sigmoid_t1", "Conv_t2"})
    assert "Conv_t0" not in reasons
    assert not any(name.endswith((".int8", ".dequantised")) for name in reasons)
