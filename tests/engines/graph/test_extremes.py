"""The extremes of what layers read are those of the tensors, channel by channel, whatever the graph and the frames."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from onnx import ModelProto
from zoo import Net, run

from engines.graph.taps import expose_extremes
from engines.graph.topology import Topology
from engines.interface import BuildRequest
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.quantise.placement import place

RNG = np.random.default_rng(0)


def every_layer(opset: int, ir_version: int = 8) -> ModelProto:
    """Open in every dimension of the image; a tensor with two readers, one of them by groups, and rows of rank 3."""
    net = Net(("n", 4, "h", "w"))
    active = net.node("Sigmoid", net.conv("image", 4, 6))
    grouped = net.node("Conv", active, net.weight(6, 3, 1, 1), group=2)
    up = net.node("ConvTranspose", active, net.weight(6, 5, 2, 2))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", grouped))
    wide = net.node("Gemm", pooled, net.weight(7, 6), transB=1)
    rows = net.node("Reshape", wide, net.constant(np.array([0, 1, 7])))
    return net.model(up, net.node("MatMul", rows, net.weight(7, 3)), opset=opset, ir_version=ir_version)


def layers_of(model: ModelProto) -> list[str]:
    return list(place(model).weights)


@pytest.mark.parametrize(("opset", "ir_version"), [(13, 8), (17, 8), (18, 8), (20, 9)])
@pytest.mark.parametrize("batch", [1, 3])
def test_extremes_are_those_of_what_each_layer_reads(opset: int, ir_version: int, batch: int) -> None:
    """Before opset 18 reductions have their axes as an attribute."""
    model = every_layer(opset, ir_version)
    layers, frame = layers_of(model), RNG.normal(size=(batch, 4, 9, 7)).astype(np.float32)
    assert len(layers) == 5
    graph, extremes = expose_extremes(model, layers)
    outputs = run(graph, frame)
    seen = extremes.take_from(outputs)
    assert list(outputs) == [output.name for output in model.graph.output]
    assert list(seen) == layers
    for layer, tensor in ((node.name, node.input[0]) for node in Topology(model).nodes if node.name in layers):
        values = frame if tensor == "image" else tapped(model, tensor, frame)
        axis = 1 if "Conv" in layer else -1
        channels = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
        np.testing.assert_allclose(seen[layer], [channels.min(axis=1), channels.max(axis=1)], rtol=1e-6)


def tapped(model: ModelProto, tensor: str, frame: np.ndarray) -> np.ndarray:
    with closing(OnnxRuntimeBackend().load(tapping(model, tensor))) as engine:
        return np.asarray(engine.infer(frame)[tensor])


def tapping(model: ModelProto, tensor: str) -> bytes:
    copy = ModelProto()
    copy.CopyFrom(model)
    copy.graph.output.add().name = tensor
    return copy.SerializeToString()


def test_layers_that_read_one_tensor_share_its_reduction() -> None:
    model = every_layer(13)
    graph, extremes = expose_extremes(model, layers_of(model))
    assert [node.op_type for node in graph.graph.node].count("ReduceMax") == 4
    assert extremes.size == 4 + 6 + 6 + 7


def test_an_observed_batch_gives_the_extremes_of_all_its_images() -> None:
    model = every_layer(13)
    layers, frames = layers_of(model), RNG.normal(size=(3, 4, 9, 7)).astype(np.float32)
    runtime = OnnxRuntimeBackend()
    with closing(runtime.observer(BuildRequest(model), place(model).taps, layers=layers)) as observer:
        assert [output.name for output in observer.outputs] == [output.name for output in model.graph.output]
        parts = [observer.observe(frame[np.newaxis]) for frame in frames]
        whole = observer.observe(frames[:, :, ::-1].copy()).extremes["Conv_t0"]  # mirrored
        assert set(observer.infer(frames[:1])) == set(parts[0].outputs) == {output.name for output in observer.outputs}
    lows, highs = (np.stack([part.extremes["Conv_t0"][row] for part in parts]) for row in (0, 1))
    np.testing.assert_array_equal(whole, [lows.min(axis=0), highs.max(axis=0)])
    np.testing.assert_array_equal(whole, [frames.min(axis=(0, 2, 3)), frames.max(axis=(0, 2, 3))])
