"""Equalised and bias-corrected graphs, run by ONNX Runtime: in float they compute what they computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from half_zoo import MODELS, branching_net, master
from onnx import ModelProto, helper, numpy_helper
from zoo import Net, by_name, image, residual_net, run

from engines.backend import EngineError
from engines.bias import shift_biases, takes_bias
from engines.equalise import can_divide, can_offset, equalise, equalised_name, is_free
from engines.layer_weights import channel_counts
from engines.placement import place
from engines.topology import Topology

CHANNELS = 4


def flat(net: Net) -> str:
    return net.node("Flatten", "image")


def convolution(net: Net, outputs: int = 6, group: int = 1, **attributes: object) -> str:
    weight = net.weight(outputs, CHANNELS // group, 3, 3)
    return net.node("Conv", "image", weight, net.weight(outputs), group=group, **attributes)


def tokens(net: Net) -> str:
    return net.node("Reshape", "image", net.constant(np.array([1, 16, 4])))


# Each ends in the layer to equalise, which reads CHANNELS channels.
PADDED: dict[str, Callable[[Net], str]] = {
    "padded": lambda net: convolution(net, pads=[1, 1, 1, 1]),
    "same size": lambda net: convolution(net, auto_pad="SAME_UPPER"),
    "transposed": lambda net: net.node("ConvTranspose", "image", net.weight(4, 3, 2, 2), net.weight(3), strides=[2, 2]),
    "transposed in groups": lambda net: net.node("ConvTranspose", "image", net.weight(4, 3, 2, 2), group=2),
    "product of tokens": lambda net: net.node("MatMul", tokens(net), net.weight(4, 5)),
    "rank 2 product": lambda net: net.node(
        "MatMul", net.node("Squeeze", tokens(net), net.constant(np.array([0]))), net.weight(4, 5)
    ),
    "scaled product": lambda net: net.node("Gemm", flat(net), net.weight(64, 5), net.weight(5), alpha=0.5),
}
CENTRED: dict[str, Callable[[Net], str]] = {
    "convolution": convolution,
    "groups": lambda net: convolution(net, group=2),
    "depthwise": lambda net: convolution(net, outputs=8, group=4),
    "strides": lambda net: convolution(net, strides=[2, 2]),
    "one dimension": lambda net: net.node(
        "Conv", net.node("Reshape", "image", net.constant(np.array([1, 4, 16]))), net.weight(6, 4, 3)
    ),
    "no bias": lambda net: net.node("Conv", "image", net.weight(6, 4, 1, 1)),
    "product": lambda net: net.node("Gemm", flat(net), net.weight(64, 5), net.weight(5)),
    "transposed product": lambda net: net.node("Gemm", flat(net), net.weight(5, 64), net.weight(5), transB=1),
    "product without bias": lambda net: net.node("Gemm", flat(net), net.weight(5, 64), transB=1),
}


def built(make: Callable[[Net], str]) -> tuple[ModelProto, str, int]:
    """A graph with its last layer's name and how many channels that reads."""
    net = Net((1, CHANNELS, 4, 4))
    model = net.model(make(net))
    layer = model.graph.node[-1]
    weight = Topology(model).initializers[layer.input[1]]
    return model, layer.name, channel_counts(layer, weight.dims)[0]


def divisors_for(channels: int) -> list[float]:
    """Powers of two, no two neighbours alike."""
    return np.exp2(-(np.arange(channels) * 3 % 10)).tolist()


def assert_same_bits(model: ModelProto, other: ModelProto) -> None:
    batch = image(model)
    found = run(other, batch)
    for name, expected in run(model, batch).items():
        np.testing.assert_array_equal(found[name], expected)


def assert_close(model: ModelProto, other: ModelProto, tolerance: float = 1e-5) -> None:
    batch = image(model)
    found = run(other, batch)
    for name, expected in run(model, batch).items():
        assert np.abs(found[name] - expected).max() <= tolerance * np.abs(expected).max()


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
        ({}, {"Conv_t9": [1.0] * 4}),
        ({}, {"Conv_t0": [1.0] * 4}),
        ({"Conv_t0": [1.0] * 3}, {}),
        ({"Conv_t0": [1.0] * 4}, {"Conv_t0": [1.0] * 5}),
        ({"Conv_t0": [1.0, 1.0, 0.0, 1.0]}, {}),
        ({"Conv_t0": [1.0, 1.0, -1.0, 1.0]}, {}),
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


def test_nothing_to_divide_is_the_model_itself() -> None:
    model = residual_net()
    assert equalise(model, {}, {}) is model
    assert shift_biases(model, {}) is model


# ---- the free form


POOL = {"kernel_shape": [2, 2], "strides": [1, 1]}
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


def test_offsets_are_never_free() -> None:
    model, layer = chain(BETWEEN["ReLU"])
    centred = equalise(model, {layer: divisors_for(4)}, {layer: [0.5] * 4})
    assert len(centred.graph.node) == len(model.graph.node) + 2
    assert_close(model, centred)


@pytest.mark.parametrize("reader", ["node", "output", "body of an If"])
def test_what_others_read_stays_as_it_is(reader: str) -> None:
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


# ---- biases


@pytest.mark.parametrize("case", [name for name in PADDED | CENTRED if "product of" not in name and "rank" not in name])
def test_shifts_are_taken_off_the_outputs(case: str) -> None:
    model, layer, _ = built((PADDED | CENTRED)[case])
    node = by_name(model)[layer]
    _, outputs = channel_counts(node, Topology(model).initializers[node.input[1]].dims)
    shifts = np.random.default_rng(4).normal(size=outputs)
    batch = image(model)
    (expected,), (found,) = (
        run(each, batch).values() for each in (model, shift_biases(model, {layer: shifts.tolist()}))
    )
    off = shifts.reshape(1, -1, *[1] * (expected.ndim - 2))
    np.testing.assert_allclose(found, expected - off, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(("name", "count"), [("Conv_t0", 3), ("Conv_t0", 5), ("Relu_t1", 4), ("Conv_t9", 4)])
@pytest.mark.parametrize("biased", [True, False])
def test_refuses_shifts_of_another_model(name: str, count: int, biased: bool) -> None:
    net = Net((1, 4, 4, 4))
    parameters = [net.weight(4, 4, 1, 1), *([net.weight(4)] if biased else [])]
    model = net.model(net.node("Relu", net.node("Conv", "image", *parameters)))
    with pytest.raises(EngineError, match=r"plan\.node.*bias correction"):
        shift_biases(model, {name: [0.0] * count})


def test_a_bias_that_all_outputs_share_or_that_is_scaled_is_left_alone() -> None:
    net = Net((1, 4, 1, 1))
    x = flat(net)
    products = [
        net.node("Gemm", x, net.weight(4, 3), net.weight(1)),
        net.node("Gemm", x, net.weight(4, 3), net.weight(1, 3)),
        net.node("Gemm", x, net.weight(4, 3), net.weight(3), beta=0.5),
        net.node("MatMul", x, net.weight(4, 3)),
    ]
    model = net.model(*products)
    topology = Topology(model)
    assert not any(takes_bias(topology, node) for node in topology.nodes)


# ---- real models


@pytest.mark.parametrize("name", MODELS)
def test_real_models_compute_the_same_with_every_layer_divided(name: str, shared_data: Path) -> None:
    model = master(shared_data / f"{name}_fp32.onnx")
    topology, weights = Topology(model), place(model).weights
    divisors, free = {}, 0
    for node in topology.nodes:
        if node.name in weights and can_divide(topology, node):
            channels, _ = channel_counts(node, topology.initializers[node.input[1]].dims)
            divisors[node.name] = divisors_for(channels)
            free += is_free(topology, node)
    divided = equalise(model, divisors, {})
    assert divisors.keys() == weights.keys()
    assert len(divided.graph.node) == len(model.graph.node) + len(divisors) - free
    assert_same_bits(model, divided)
