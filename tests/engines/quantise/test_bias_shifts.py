"""Corrected biases, run by ONNX Runtime: a layer's shifts are taken off its outputs, or refused."""

from __future__ import annotations

import numpy as np
import pytest
from equalise_cases import CENTRED, PADDED, built, flat
from zoo import Net, by_name, image, run

from engines.errors import EngineError
from engines.graph.topology import Topology
from engines.graph.weights import channel_counts
from engines.quantise.equalise import shift_biases, takes_bias


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
