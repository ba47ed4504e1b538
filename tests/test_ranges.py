from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from zoo import Net

from engines.placement import place
from engines.qdq import insert_qdq
from engines.ranges import HALF_MAX, HEADROOM, beyond_half, tensor_bounds
from engines.topology import tensor_types

Images = NDArray[np.float32]
SHAPE = (1, 4, 6, 6)
ONES = np.ones(4, np.float32)


def values_of(model: ModelProto, image: Images) -> dict[str, Images]:
    """Every float tensor that a graph computes, and the image."""
    watched = ModelProto()
    watched.CopyFrom(model)
    floats = [name for name, found in tensor_types(model).items() if found.elem_type == TensorProto.FLOAT]
    made = [name for node in model.graph.node for name in node.output if name in floats]
    del watched.graph.output[:]
    watched.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in made)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = onnxruntime.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {"image": image} | dict(zip(made, session.run(made, {"image": image}), strict=True))


def scalar(net: Net, value: float) -> str:
    return net.constant(np.array(value, np.float32))


# Operators on feature maps of SHAPE that give one of SHAPE again.
UNARY: dict[str, Callable[[Net, str], str]] = {
    "Conv": lambda net, x: net.conv(x, 4, 4),
    "Conv grouped": lambda net, x: net.conv(x, 4, 4, group=2),
    "ConvTranspose": lambda net, x: net.node(
        "ConvTranspose", x, net.weight(4, 2, 3, 3), net.weight(4), group=2, pads=[1, 1, 1, 1]
    ),
    "MatMul": lambda net, x: net.node("MatMul", x, net.weight(6, 6)),
    "MatMul by a constant": lambda net, x: net.node("MatMul", net.weight(6, 6), x),
    "Gemm": lambda net, x: net.node(
        "Reshape",
        net.node(
            "Gemm",
            net.node("Reshape", x, net.constant(np.array([24, 6], np.int64))),
            net.weight(6, 6),
            net.weight(6),
            alpha=1.5,
            beta=-2.0,
            transB=1,
        ),
        net.constant(np.array(SHAPE, np.int64)),
    ),
    "BatchNormalization": lambda net, x: net.norm(x, 4),
    "Div": lambda net, x: net.node("Div", x, net.constant(net.rng.uniform(0.2, 3, (4, 1, 1)).astype(np.float32))),
    "Pad": lambda net, x: net.node(
        "Pad",
        net.node("Slice", x, *slice_channels(net, 3)),
        net.constant(np.array([0, 1, 0, 0] + [0] * 4)),
        scalar(net, 7),
    ),
    "Clip": lambda net, x: net.node("Clip", x, scalar(net, 0.5), scalar(net, 2)),
    "Clip from below": lambda net, x: net.node("Clip", x, scalar(net, 3)),
    "Clip from above": lambda net, x: net.node("Clip", x, "", scalar(net, -3)),
    "LeakyRelu": lambda net, x: net.node("LeakyRelu", x, alpha=-2.0),
    "PRelu": lambda net, x: net.node("PRelu", x, net.weight(4, 1, 1)),
    "Elu": lambda net, x: net.node("Elu", x, alpha=3.0),
    "Celu": lambda net, x: net.node("Celu", x, alpha=2.0),
    "Selu": lambda net, x: net.node("Selu", x),
    "Softplus": lambda net, x: net.node("Softplus", x),
    "Exp": lambda net, x: net.node("Exp", net.node("Tanh", x)),
    "Sqrt": lambda net, x: net.node("Sqrt", net.node("Abs", x)),
    "Erf": lambda net, x: net.node("Erf", x),
    "HardSwish": lambda net, x: net.node("HardSwish", x),
    "Sigmoid": lambda net, x: net.node("Sigmoid", x),
    "Softmax": lambda net, x: net.node("Softmax", x),
    "AveragePool": lambda net, x: net.node("AveragePool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "MaxPool": lambda net, x: net.node("MaxPool", x, kernel_shape=[3, 3], pads=[1, 1, 1, 1]),
    "ReduceMean": lambda net, x: net.node("Add", x, net.node("ReduceMean", x, axes=[2, 3])),
    "Resize": lambda net, x: net.node(
        "MaxPool",
        net.node("Resize", x, "", net.constant(np.array([1, 1, 2, 2], np.float32)), mode="linear"),
        kernel_shape=[2, 2],
        strides=[2, 2],
    ),
    "Transpose": lambda net, x: net.node("Transpose", x, perm=[0, 1, 3, 2]),
    "Neg": lambda net, x: net.node("Neg", x),
}
BINARY: dict[str, Callable[[Net, str, str], str]] = {
    "Add": lambda net, x, y: net.node("Add", x, y),
    "Sub": lambda net, x, y: net.node("Sub", x, y),
    "Mul": lambda net, x, y: net.node("Mul", x, y),
    "Max": lambda net, x, y: net.node("Max", x, y, scalar(net, -0.5)),
    "Min": lambda net, x, y: net.node("Min", x, y),
    "Where": lambda net, x, y: net.node("Where", net.node("Greater", x, y), x, y),
    "Concat": lambda net, x, y: net.node("Slice", net.node("Concat", x, y, axis=1), *slice_channels(net)),
}
STEPS = [*UNARY, *BINARY]


def slice_channels(net: Net, end: int = 6) -> tuple[str, str, str]:
    """Starts, ends and axes that leave channels end - 4 (or 0) up to end."""
    start = max(end - 4, 0)
    return tuple(net.constant(np.array([number], np.int64)) for number in (start, end, 1))  # type: ignore[return-value]  # three


def chain(steps: list[str], seed: int) -> ModelProto:
    net = Net(SHAPE, seed)
    x, y = "image", "image"
    for step in steps:
        x, y = UNARY[step](net, x) if step in UNARY else BINARY[step](net, x, y), x
    return net.model(x, opset=14)


def assert_within(values: dict[str, Images], bounds: dict[str, float]) -> None:
    for name, found in values.items():
        if name in bounds:
            # float32 sums round; the bounds do not.
            assert np.abs(found).max() <= bounds[name] * (1 + 1e-5), name


@pytest.mark.parametrize("step", STEPS)
@given(seed=st.integers(0, 2**32 - 1), scale=st.floats(0.01, 100))
@settings(max_examples=8, deadline=None)
def test_no_operator_exceeds_its_bound(step: str, seed: int, scale: float) -> None:
    model = chain([step], seed)
    image = (np.random.default_rng(seed).normal(size=SHAPE) * scale).astype(np.float32)
    values = values_of(model, image)
    bounds = tensor_bounds(model, {"image": float(np.abs(image).max()) / HEADROOM})
    assert model.graph.output[0].name in bounds
    assert_within(values, bounds)


@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=8),
    seed=st.integers(0, 2**32 - 1),
    measured=st.integers(0, 2**24 - 1),
    quantised=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_no_chain_exceeds_its_bounds(steps: list[str], seed: int, measured: int, quantised: bool) -> None:
    """Whichever of its tensors are measured, and with INT8 in between: for images up to HEADROOM times as bright."""
    model = chain(steps, seed)
    image = np.random.default_rng(seed).normal(size=SHAPE).astype(np.float32)
    values = values_of(model, image)
    amax = {name: float(np.abs(v).max()) for name, v in values.items()}
    if quantised:
        placement = place(model)
        model = insert_qdq(model, placement, {tap: amax[tap] for tap in placement.taps})
        values = values_of(model, image)
        amax = {name: float(np.abs(v).max()) for name, v in values.items()}
    known = {name: amax[name] / HEADROOM for i, name in enumerate(amax) if name == "image" or measured >> (i % 24) & 1}
    bounds = tensor_bounds(model, known)
    assert_within(values, bounds)
    for name, largest in known.items():
        assert bounds[name] <= largest * HEADROOM


@pytest.mark.parametrize(
    "step", ["Conv", "Conv grouped", "ConvTranspose", "Gemm", "MatMul", "MatMul by a constant", "BatchNormalization"]
)
def test_a_bound_on_a_product_is_attained(step: str) -> None:
    """By the image that has the sign of each weight: nothing smaller would be a bound."""
    model = chain([step], 3)
    name = model.graph.output[0].name
    bound = tensor_bounds(model, {"image": 1 / HEADROOM})[name]
    # Each output value is affine in the image: the image with the signs of its gradient takes it furthest.
    at_zero = values_of(model, np.zeros(SHAPE, np.float32))[name].ravel()
    units = np.eye(at_zero.size, dtype=np.float32).reshape(-1, *SHAPE)
    gradient = np.stack([values_of(model, unit)[name].ravel() for unit in units]) - at_zero
    reached = np.abs(gradient).sum(axis=0) + np.abs(at_zero)
    assert reached.max() == pytest.approx(bound, rel=1e-4)


# ---- what float16 cannot hold


def test_unknown_operators_and_unmeasured_inputs_have_no_bound() -> None:
    net = Net(SHAPE)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    outputs = [
        net.node("Log", "image"),
        net.node("MatMul", "image", net.node("Relu", "image")),
        net.node("Resize", "image", "", scales, mode="cubic"),
        net.node("Div", "image", scalar(net, 0.0)),
        net.node("Clip", "image", scalar(net, 0.0), scalar(net, 3.4e38)),
    ]
    model = net.model(*outputs)
    assert not tensor_bounds(model, {}).keys() & {"image", *outputs}
    assert tensor_bounds(model, {"image": 1.0}).keys() & {"image", *outputs} == {"image", outputs[4]}


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
def test_what_measurements_take_beyond_float16(amax: dict[str, float], expected: dict[str, str]) -> None:
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
def test_a_measured_result_speaks_for_the_operand_nobody_measured(
    operator: str, amax: dict[str, float], conv_is_beyond: bool
) -> None:
    net = Net(SHAPE)
    model = net.model(net.node(operator, net.conv("image", 4, 4), net.node("Relu", "image")))
    assert ("Conv_t0" in beyond_half(model, amax)) == conv_is_beyond


def test_an_output_left_out_has_no_bound() -> None:
    net = Net(SHAPE)
    best = net.node("TopK", net.node("Sigmoid", "image"), net.constant(np.array([1])), outputs=2)
    net.nodes[-1].output[0] = ""
    padded = net.node("Pad", "image", net.constant(np.array([1, 1])), "", net.constant(np.array([3])))
    model = net.model(net.node("Cast", f"{best}_1", to=TensorProto.FLOAT), padded, opset=18)
    assert padded not in tensor_bounds(model, {})


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
