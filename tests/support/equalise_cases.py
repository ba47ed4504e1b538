"""One layer of every kind to equalise or to shift, and the check that a graph computes what it computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import ModelProto
from zoo import Net

from engines.graph.topology import Topology
from engines.graph.weights import channel_counts

CHANNELS = 4


def flat(net: Net) -> str:
    return net.node("Flatten", "image")


def convolution(net: Net, outputs: int = 6, group: int = 1, **attributes: Any) -> str:
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
    return [float(2.0 ** -(channel * 3 % 10)) for channel in range(channels)]
