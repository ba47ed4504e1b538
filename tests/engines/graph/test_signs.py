"""A tensor counts as never negative only where no frame can make it so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from zoo import Net, image, run

from engines.graph.signs import never_negative
from engines.graph.topology import Topology


def relu(net: Net) -> str:
    return net.node("Relu", "image")


def constant(net: Net, value: float) -> str:
    return net.constant(np.full((1, 3, 1, 1), value, np.float32))


def clip(net: Net, least: float) -> str:
    return net.node("Clip", "image", net.constant(np.float32(least)), net.constant(np.float32(6.0)))


def resized(net: Net, mode: str) -> str:
    return net.node("Resize", relu(net), "", net.constant(np.array([1, 1, 2, 2], np.float32)), mode=mode)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (relu, True),
        (lambda _: "image", False),
        (lambda net: net.node("Mul", "image", net.node("Sigmoid", "image")), False),  # SiLU
        (lambda net: net.node("Add", relu(net), net.node("Sigmoid", "image")), True),
        (lambda net: net.node("Add", relu(net), "image"), False),
        (lambda net: net.node("Mul", relu(net), constant(net, 0.5)), True),
        (lambda net: net.node("Add", relu(net), constant(net, -0.5)), False),
        (lambda net: net.node("Concat", relu(net), net.node("Sigmoid", "image"), axis=1), True),
        (lambda net: net.node("Concat", relu(net), "image", axis=1), False),
        (lambda net: net.node("MaxPool", relu(net), kernel_shape=[2, 2]), True),
        (lambda net: net.node("AveragePool", relu(net), kernel_shape=[2, 2]), True),
        (lambda net: net.conv(relu(net), 3, 4), False),
        (lambda net: clip(net, 0.0), True),
        (lambda net: clip(net, -1.0), False),
        (lambda net: resized(net, "linear"), True),
        (lambda net: resized(net, "cubic"), False),
    ],
)
def test_signs(make: Callable[[Net], str], expected: bool) -> None:
    net = Net()
    tensor = make(net)
    model = net.model(tensor if tensor != "image" else net.node("Identity", "image"))
    assert (tensor in never_negative(Topology(model))) == expected
    if expected:
        (values,) = run(model, image(model)).values()
        assert (values >= 0.0).all()
