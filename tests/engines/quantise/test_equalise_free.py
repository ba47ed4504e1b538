"""The layer before divides for nothing where all between is homogeneous and has no other reader; else a Mul does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from equalise_cases import divisors_for
from half_zoo import branching_net
from onnx import ModelProto, helper, numpy_helper
from zoo import Net, assert_same_bits, by_name

from engines.errors import EngineError
from engines.graph.topology import Topology
from engines.quantise.equalise import can_divide, equalise, equalised_name, is_free, shift_biases
from engines.quantise.placement import place

POOL: dict[str, Any] = {"kernel_shape": [2, 2], "strides": [1, 1]}
BETWEEN: dict[str, Callable[[Net, str], str]] = {
    "nothing": lambda _, x: x,
    "ReLU": lambda net, x: net.node("Relu", x),
    "leaky ReLU": lambda net, x: net.node("LeakyRelu", x, alpha=0.1),
    "max pooling": lambda net, x: net.node("MaxPool", x, **POOL),
    "ReLU and max pooling": lambda net, x: net.node("MaxPool", net.node("Relu", x), **POOL),
    "padded max pooling": lambda net, x: net.node("MaxPool", net.node("Relu", x), pads=[1, 1, 1, 1], **POOL),
    "average pooling": lambda net, x: net.node("AveragePool", net.node("Relu", x), **POOL),
    "global pooling": lambda net, x: net.node("GlobalAveragePool", x),
}
NOT_HOMOGENEOUS: dict[str, Callable[[Net, str], str]] = {
    "sigmoid": lambda net, x: net.node("Sigmoid", x),
    "SiLU": lambda net, x: net.node("Mul", x, net.node("Sigmoid", x)),
    "PReLU": lambda net, x: net.node("PRelu", x, net.weight(4, 1, 1)),
    "ReLU6": lambda net, x: net.node(
        "Clip", x, net.constant(np.array(0, np.float32)), net.constant(np.array(6, np.float32))
    ),
}


def chain(between: Callable[[Net, str], str]) -> tuple[ModelProto, str]:
    net = Net((1, 3, 6, 6))
    last = net.node("Conv", between(net, net.conv("image", 3, 4)), net.weight(5, 4, 1, 1), net.weight(5))
    return net.model(last), f"Conv_{last}"


@pytest.mark.parametrize("case", BETWEEN)
def test_the_layer_before_divides_for_nothing(case: str) -> None:
    model, layer = chain(BETWEEN[case])
    assert is_free(Topology(model), by_name(model)[layer])
    divided = equalise(model, {layer: divisors_for(4)}, {})
    onnx.checker.check_model(divided, full_check=True)
    assert [node.op_type for node in divided.graph.node] == [node.op_type for node in model.graph.node]
    assert_same_bits(model, divided)
    # What is observed has another name, for under its old one a calibration has seen it undivided.
    assert place(divided).taps == ("image", equalised_name(layer))
    assert not set(place(model).taps[1:]) & set(place(divided).taps)


@pytest.mark.parametrize("case", NOT_HOMOGENEOUS)
def test_behind_what_is_not_homogeneous_it_takes_a_multiplication(case: str) -> None:
    model, layer = chain(NOT_HOMOGENEOUS[case])
    assert not is_free(Topology(model), by_name(model)[layer])
    divided = equalise(model, {layer: divisors_for(4)}, {})
    assert len(divided.graph.node) == len(model.graph.node) + 1
    assert_same_bits(model, divided)


@pytest.mark.parametrize("reader", ["node", "output", "body of an If"])
def test_a_tensor_with_other_readers_stays_as_it_is(reader: str) -> None:
    if reader == "body of an If":
        model = branching_net()
        layer = "Conv_t2"
    else:
        net = Net((1, 3, 6, 6))
        shared = net.node("Relu", net.conv("image", 3, 4))
        last = net.node("Conv", shared, net.weight(5, 4, 1, 1), net.weight(5))
        outputs = [last, shared if reader == "output" else net.node("Abs", shared)]
        model, layer = net.model(*outputs), f"Conv_{last}"
    assert not is_free(Topology(model), by_name(model)[layer])
    assert_same_bits(model, equalise(model, {layer: divisors_for(4)}, {}))


def test_shared_parameters_are_left_to_the_others() -> None:
    """Three layers of one weight and one bias: one divides, one is divided, one is neither."""
    net = Net((1, 4, 6, 6))
    weight, bias = net.weight(4, 4, 1, 1), net.weight(4)
    first = net.node("Relu", net.node("Conv", "image", weight, bias))
    second = net.node("Conv", first, weight, bias)
    third = net.node("Conv", net.node("Sigmoid", second), weight, bias)
    model = net.model(third)
    assert is_free(Topology(model), by_name(model)[f"Conv_{second}"])
    divided = equalise(model, {f"Conv_{second}": divisors_for(4)}, {})
    assert_same_bits(model, divided)
    kept = by_name(divided)[f"Conv_{third}"]
    assert list(kept.input[1:]) == [weight, bias]


def test_a_layer_may_divide_and_be_divided() -> None:
    net = Net((1, 4, 6, 6))
    x, layers = "image", []
    for _ in range(3):
        x = net.conv(x, 4, 4)
        layers.append(f"Conv_{x}")
        x = net.node("Relu", x)
    model = net.model(x)
    divided = equalise(
        model, {layer: divisors_for(4)[::step] for layer, step in zip(layers, (1, -1, 1), strict=True)}, {}
    )
    assert len(divided.graph.node) == len(model.graph.node) + 1  # for the first, whose input no layer makes
    assert_same_bits(model, divided)
    centred = equalise(shift_biases(model, {layers[0]: [0.0] * 4}), dict.fromkeys(layers, divisors_for(4)), {})
    assert_same_bits(model, centred)


def test_rows_of_an_image_are_no_channels() -> None:
    """A matrix product over the last axis of an image that has as many columns as channels."""
    net = Net((1, 4, 4, 4))
    last = net.node("MatMul", net.node("Relu", net.conv("image", 4, 4)), net.weight(4, 3))
    model = net.model(last)
    assert not is_free(Topology(model), by_name(model)[f"MatMul_{last}"])
    assert_same_bits(model, equalise(model, {f"MatMul_{last}": divisors_for(4)}, {}))


def test_a_model_that_has_our_names_is_left_alone() -> None:
    model, layer = chain(BETWEEN["ReLU"])
    model.graph.node[1].name = equalised_name(layer)
    assert not can_divide(Topology(model), by_name(model)[layer])
    with pytest.raises(EngineError, match=r"plan\.node"):
        equalise(model, {layer: divisors_for(4)}, {})


def test_constants_that_have_our_names_are_kept() -> None:
    model, layer = chain(BETWEEN["ReLU"])
    for taken in (f"{equalised_name(layer)}.weight", "Conv_t0.divided_weight", "Conv_t0.divided_bias", f"{layer}.bias"):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(4, np.float32), taken))
        model.graph.node.append(helper.make_node("Abs", [taken], [f"{taken}.read"], name=f"{taken}.reader"))
        output = helper.make_tensor_value_info(f"{taken}.read", onnx.TensorProto.FLOAT, [4])
        model.graph.output.append(output)
    assert_same_bits(model, equalise(shift_biases(model, {layer: [0.0] * 5}), {layer: divisors_for(4)}, {}))
