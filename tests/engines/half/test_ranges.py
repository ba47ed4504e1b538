"""Bounds on |x|: no operator exceeds its bound, and no chain of them; bounds on products are attained."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper
from zoo import Net

from engines.graph.topology import tensor_types
from engines.half.ranges import HEADROOM, _Bounds
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.placement import place

Images = NDArray[np.float32]
SHAPE = (1, 4, 6, 6)


def _tensor_bounds(model: ModelProto, amax: Mapping[str, float]) -> dict[str, float]:
    return _Bounds(model, amax).known


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
@settings(max_examples=8)
def test_no_operator_exceeds_its_bound(step: str, seed: int, scale: float) -> None:
    model = chain([step], seed)
    image = (np.random.default_rng(seed).normal(size=SHAPE) * scale).astype(np.float32)
    values = values_of(model, image)
    bounds = _tensor_bounds(model, {"image": float(np.abs(image).max()) / HEADROOM})
    assert model.graph.output[0].name in bounds
    assert_within(values, bounds)


@given(
    steps=st.lists(st.sampled_from(STEPS), min_size=2, max_size=8),
    seed=st.integers(0, 2**32 - 1),
    measured=st.integers(0, 2**24 - 1),
    quantised=st.booleans(),
)
@settings(max_examples=100)
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
    bounds = _tensor_bounds(model, known)
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
    bound = _tensor_bounds(model, {"image": 1 / HEADROOM})[name]
    # Each output value is affine in the image: the image with the signs of its gradient takes it furthest.
    at_zero = values_of(model, np.zeros(SHAPE, np.float32))[name].ravel()
    units = np.eye(at_zero.size, dtype=np.float32).reshape(-1, *SHAPE)
    gradient = np.stack([values_of(model, unit)[name].ravel() for unit in units]) - at_zero
    reached = np.abs(gradient).sum(axis=0) + np.abs(at_zero)
    assert reached.max() == pytest.approx(bound, rel=1e-4)


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
    assert not _tensor_bounds(model, {}).keys() & {"image", *outputs}
    assert _tensor_bounds(model, {"image": 1.0}).keys() & {"image", *outputs} == {"image", outputs[4]}


def test_an_output_left_out_has_no_bound() -> None:
    net = Net(SHAPE)
    best = net.node("TopK", net.node("Sigmoid", "image"), net.constant(np.array([1])), outputs=2)
    net.nodes[-1].output[0] = ""
    padded = net.node("Pad", "image", net.constant(np.array([1, 1])), "", net.constant(np.array([3])))
    model = net.model(net.node("Cast", f"{best}_1", to=TensorProto.FLOAT), padded, opset=18)
    assert padded not in _tensor_bounds(model, {})
