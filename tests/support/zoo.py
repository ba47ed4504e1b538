"""Small ONNX graphs that several tests share, built node by node."""

from __future__ import annotations

from contextlib import closing
from functools import lru_cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from engines.interface import Array
from engines.onnxruntime_backend import OnnxRuntimeBackend

Shape = tuple[int | str, ...]


class Net:
    """A graph under construction; every method that adds a node returns the name of its output."""

    def __init__(self, shape: Shape = (1, 3, 8, 8), seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = shape
        self.nodes: list[NodeProto] = []
        self.initializers: list[TensorProto] = []

    def constant(self, value: NDArray[np.generic]) -> str:
        name = f"c{len(self.initializers)}"
        self.initializers.append(numpy_helper.from_array(value, name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.normal(size=shape).astype(np.float32))

    def node(self, operator: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        name = f"t{len(self.nodes)}"
        names = [name, *(f"{name}_{i}" for i in range(1, outputs))]
        self.nodes.append(helper.make_node(operator, inputs, names, name=f"{operator}_{name}", **attributes))
        return name

    def conv(self, x: str, inputs: int, outputs: int, group: int = 1, **attributes: Any) -> str:
        parameters = self.weight(outputs, inputs // group, 3, 3), self.weight(outputs)
        return self.node("Conv", x, *parameters, group=group, pads=[1, 1, 1, 1], **attributes)

    def norm(self, x: str, channels: int) -> str:
        gamma, beta, mean = (self.weight(channels) for _ in range(3))
        variance = self.constant(self.rng.uniform(0.5, 2.0, channels).astype(np.float32))
        return self.node("BatchNormalization", x, gamma, beta, mean, variance)

    def model(self, *outputs: str, opset: int = 13, ir_version: int = 8) -> ModelProto:
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, self.shape)
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "net", [image], results, self.initializers)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir_version)
        inferred = onnx.shape_inference.infer_shapes(model)  # the checker wants shapes of outputs, and only those
        for result, typed in zip(graph.output, inferred.graph.output, strict=True):
            result.CopyFrom(typed)
        model.graph.CopyFrom(graph)
        return model


def residual_net(shape: Shape = (1, 3, 8, 8)) -> ModelProto:
    """Stem, one residual block, pooling, classifier: every rule of a ResNet once."""
    net = Net(shape)
    stem = net.node("Relu", net.conv("image", 3, 4))
    inner = net.node("Relu", net.conv(stem, 4, 4))
    block = net.node("Relu", net.node("Add", net.conv(inner, 4, 4), stem))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", block))
    return net.model(net.node("Gemm", pooled, net.weight(5, 4), net.weight(5), transB=1))


def run(model: ModelProto, batch: Array) -> dict[str, Array]:
    """Outputs by name, on ONNX Runtime."""
    with closing(OnnxRuntimeBackend().load(model.SerializeToString())) as engine:
        return engine.infer(batch)


def image(model: ModelProto, seed: int = 0) -> NDArray[np.float32]:
    """A random batch for the model's fixed input shape."""
    sizes = [d.dim_value or 1 for d in model.graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(seed).normal(size=sizes).astype(np.float32)


def assert_same_bits(model: ModelProto, other: ModelProto) -> None:
    batch = image(model)
    found = run(other, batch)
    for name, expected in run(model, batch).items():
        np.testing.assert_array_equal(found[name], expected)


def assert_close(model: ModelProto, other: ModelProto) -> None:
    batch = image(model)
    found = run(other, batch)
    for name, expected in run(model, batch).items():
        assert np.abs(found[name] - expected).max() <= 1e-5 * np.abs(expected).max()


def by_name(model: ModelProto) -> dict[str, NodeProto]:
    return {node.name: node for node in model.graph.node}


@lru_cache
def rounds_half() -> bool:
    """Whether this ONNX Runtime quantises float16 to the nearest step."""
    net = Net((1, 1, 1, 3))
    half = net.node("Cast", "image", to=TensorProto.FLOAT16)
    step, zero = net.constant(np.array(1, np.float16)), net.constant(np.array(0, np.int8))
    model = net.model(net.node("QuantizeLinear", half, step, zero), opset=19, ir_version=9)
    model.graph.output[0].type.tensor_type.elem_type = TensorProto.INT8
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"image": np.array([0.75, 1.75, -0.75], np.float32).reshape(1, 1, 1, 3)})
    return bool((found.ravel() == [1, 2, -1]).all())
