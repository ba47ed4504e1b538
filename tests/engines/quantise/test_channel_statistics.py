"""Statistics of a layer's channels are those of the tensors that it reads and gives."""

from __future__ import annotations

import numpy as np
from half_zoo import run as run_all
from repair_flow import frames_for, observed
from zoo import Net, residual_net

from engines.graph.taps import expose
from engines.quantise.placement import place


def test_statistics_are_those_of_the_tensors() -> None:
    model = residual_net((1, 3, 32, 32))
    frames = frames_for(model, 5)
    statistics = observed(model, frames)
    assert statistics.keys() == place(model).weights.keys()
    tensors = {name for node in model.graph.node for name in (node.input[0], node.output[0])} - {"image", "t9"}
    values = {"image": np.stack(frames), **run_all(expose(model, sorted(tensors)), frames)}
    for node in model.graph.node:
        if node.name not in statistics:
            continue
        found, axis = statistics[node.name], 2 if node.op_type == "Conv" else -1
        read = np.moveaxis(values[node.input[0]], axis, 0).reshape(values[node.input[0]].shape[axis], -1)
        given = np.moveaxis(values[node.output[0]], axis, 0).reshape(values[node.output[0]].shape[axis], -1)
        np.testing.assert_allclose(found.read.low, read.min(axis=1), rtol=1e-6)
        np.testing.assert_allclose(found.read.high, read.max(axis=1), rtol=1e-6)
        np.testing.assert_allclose(found.variance, given.var(axis=1, dtype=np.float64), rtol=1e-5)
        assert (found.read.samples >= found.read.low[:, np.newaxis]).all()
        assert (found.read.samples <= found.read.high[:, np.newaxis]).all()
        np.testing.assert_allclose(found.read.variance, read.var(axis=1), rtol=0.3)  # of a sample
    for name, again in observed(model, frames, pass_bytes=1).items():  # a pass for each layer
        np.testing.assert_array_equal(again.read.samples, statistics[name].read.samples)
        np.testing.assert_array_equal(again.variance, statistics[name].variance)


def test_a_constant_output_has_no_variance() -> None:
    net = Net((1, 3, 7, 9))
    model = net.model(net.node("Conv", "image", net.constant(np.zeros((64, 3, 1, 1), np.float32)), net.weight(64)))
    assert not observed(model, frames_for(model, 3))["Conv_t0"].variance.any()
