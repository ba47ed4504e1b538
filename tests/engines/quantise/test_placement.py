from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import ModelProto
from zoo import Net, by_name, residual_net

from calibrate.plan import PrecisionPlan
from engines.errors import EngineError
from engines.quantise.placement import Placement, place


def quantised_ops(model: ModelProto, placement: Placement) -> Counter[str]:
    nodes = by_name(model)
    return Counter(nodes[name].op_type for name in placement.quantised)


def check_invariants(model: ModelProto, placement: Placement) -> None:
    """Check the rules of every placement."""
    nodes = by_name(model)
    assert set(placement.quantised) | set(placement.floats) == set(nodes)
    assert not set(placement.quantised) & set(placement.floats)
    assert all(placement.floats.values())
    read = {nodes[name].input[index] for name, indices in placement.reads.items() for index in indices}
    grouped = [tensor for group in placement.groups for tensor in group.tensors]
    assert sorted(grouped) == sorted(read)
    assert len(set(placement.taps)) == len(placement.taps)
    assert set(placement.weights) <= set(placement.quantised)


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), ("batch", 3, "height", "width")])
def test_residual_network(shape: tuple[int | str, ...]) -> None:
    model = residual_net(shape)
    placement = place(model)
    check_invariants(model, placement)
    assert quantised_ops(model, placement) == {"Conv": 3, "Add": 1, "Gemm": 1, "Flatten": 1}
    # t1 is the skip: one Q serves the block's first convolution and the Add; t4, the last convolution's output, stays
    # float and is added in its accumulator.
    assert placement.reads["Add_t5"] == (1,)
    assert placement.taps == ("image", "t1", "t3", "t7")
    assert placement.floats["GlobalAveragePool_t7"]


@pytest.mark.parametrize(
    ("operator", "shape", "attributes", "axis"),
    [
        ("Conv", (8, 4, 3, 3), {}, 0),
        ("Conv", (4, 1, 3, 3), {"group": 4}, 0),
        ("ConvTranspose", (4, 8, 3, 3), {}, 1),
        ("ConvTranspose", (4, 2, 3, 3), {"group": 2}, 1),
        ("MatMul", (4, 6), {}, 1),
        ("Gemm", (64, 5), {}, 1),
        ("Gemm", (5, 64), {"transB": 1}, 0),
    ],
)
def test_weights_are_quantised_per_output_channel(
    operator: str, shape: tuple[int, ...], attributes: dict[str, int], axis: int
) -> None:
    net = Net((1, 4, 4, 4))
    x = net.node("Flatten", "image") if operator == "Gemm" else "image"
    placement = place(net.model(net.node(operator, x, net.weight(*shape), **attributes)))
    assert [weight.axis for weight in placement.weights.values()] == [axis]


def test_concat_and_what_moves_values_share_one_scale() -> None:
    net = Net((1, 4, 8, 8))
    left = net.node("Relu", net.conv("image", 4, 4, strides=[2, 2]))
    right = net.node("Relu", net.conv("image", 4, 4))
    pooled = net.node("MaxPool", right, kernel_shape=[2, 2], strides=[2, 2])
    joined = net.node("Concat", left, pooled, axis=1)
    model = net.model(net.conv(joined, 8, 4))
    placement = place(model)
    check_invariants(model, placement)
    assert placement.shared == ((left, right),)
    assert {left, right, pooled, joined} in [set(group.tensors) for group in placement.groups]


def test_a_float_reader_keeps_the_concat_float() -> None:
    net = Net((1, 4, 8, 8))
    joined = net.node("Concat", net.node("Relu", "image"), net.node("Abs", "image"), axis=1)
    model = net.model(net.conv(joined, 8, 4), net.node("Sigmoid", joined))
    placement = place(model)
    check_invariants(model, placement)
    assert quantised_ops(model, placement) == {"Conv": 1}
    assert placement.groups[0].tensors == (joined,)  # Q after the concat, on the scale of what went into it
    assert placement.groups[0].taps == ("t0", "t1")


@pytest.mark.parametrize(("mode", "quantised"), [("nearest", True), ("linear", False)])
def test_only_nearest_resize_moves_values(mode: str, quantised: bool) -> None:
    net = Net((1, 4, 4, 4))
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    resized = net.node("Resize", net.node("Relu", "image"), "", scales, mode=mode)
    placement = place(net.model(net.conv(resized, 4, 4)))
    assert ("Resize_t1" in placement.quantised) is quantised


def test_silu_and_its_residual() -> None:
    net = Net((1, 4, 8, 8))
    stem = net.conv("image", 4, 4)
    skip = net.node("Mul", stem, net.node("Sigmoid", stem))
    conv = net.conv(skip, 4, 4)
    block = net.node("Add", skip, net.node("Mul", conv, net.node("Sigmoid", conv)))
    model = net.model(net.conv(block, 4, 4))
    placement = place(model)
    assert quantised_ops(model, placement) == {"Conv": 3, "Add": 1}
    assert placement.reads["Add_t6"] == (0,)


def test_the_later_of_two_convolutions_into_an_add_is_fused() -> None:
    net = Net((1, 4, 8, 8))
    first, second = net.conv("image", 4, 4), net.conv("image", 4, 4)
    model = net.model(net.conv(net.node("Relu", net.node("Add", second, first)), 4, 4))
    assert place(model).reads["Add_t2"] == (1,)


def test_an_add_that_is_no_residual_stays_float() -> None:
    net = Net((1, 4, 8, 8))
    conv = net.conv("image", 4, 4)
    gated = net.node("Add", conv, net.node("GlobalAveragePool", conv))  # broadcast
    shifted = net.node("Add", conv, net.weight(1, 4, 1, 1))  # a constant
    ends = net.node("Add", net.node("Relu", gated), shifted)  # feeds nothing
    placement = place(net.model(ends))
    assert [name for name in placement.quantised if name.startswith("Add")] == []


def test_a_plan_keeps_its_layers_float() -> None:
    model = residual_net()
    placement = place(model, PrecisionPlan({"Conv_t2": "too sensitive"}))
    check_invariants(model, placement)
    assert placement.floats["Conv_t2"] == "too sensitive"
    assert placement.reads["Add_t5"] == (1,)
    completed = place(model, PrecisionPlan({"Conv_t4": "too sensitive"}))
    assert completed.floats["Add_t5"] == "the layer that it completes stays float"


def test_refuses_a_plan_of_another_model() -> None:
    with pytest.raises(EngineError, match=r"plan\.node.*'Conv_9'"):
        place(residual_net(), PrecisionPlan({"Conv_9": "too sensitive"}))


def branching_net() -> ModelProto:
    """Concats, residuals and pooling woven together."""
    net = Net((1, 4, 8, 8))
    a = net.node("Relu", net.conv("image", 4, 4))
    b = net.node("Add", net.conv(a, 4, 4), net.conv("image", 4, 4))
    c = net.node("Concat", a, net.node("Relu", b), axis=1)
    d = net.node("Add", net.conv(c, 8, 4), a)
    e = net.node("Concat", c, net.node("MaxPool", d, kernel_shape=[1, 1]), axis=1)
    return net.model(net.conv(e, 12, 2), net.node("Sigmoid", net.conv(d, 4, 1)))


BRANCHING = branching_net()


@given(st.sets(st.sampled_from(place(BRANCHING).quantised)))
def test_a_single_calibration_serves_every_plan(floats: set[str]) -> None:
    placement = place(BRANCHING, PrecisionPlan(dict.fromkeys(floats, "planned")))
    check_invariants(BRANCHING, placement)
    assert set(placement.taps) <= set(place(BRANCHING).taps)
    layers = [name for name in floats if by_name(BRANCHING)[name].op_type in ("Conv", "Add")]
    assert not set(layers) & set(placement.quantised)
