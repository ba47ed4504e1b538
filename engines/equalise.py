"""Channel equalisation: what a layer reads is brought to INT8's range channel by channel, in float without any effect.

One scale serves all channels of a tensor. Where their ranges differ by orders of magnitude, the small ones vanish: on
yolox_nano's first depthwise convolution 5 of 16 channels round to zero. And what is never negative, behind ReLU, or
hardly, behind SiLU, uses half of the integers. So a layer may read (x - offset) / divisor, per channel, with its
weights multiplied by the divisor and the weighted offsets added to its bias. Offsets need a layer without padding.

A division without offset costs nothing where the layer before can do it: what lies between is positively homogeneous
(f(a x) = a f(x) for a > 0: ReLU, pooling), and nothing else reads it (Nagel et al., "Data-Free Quantization Through
Weight Equalization and Bias Correction", arXiv:1906.04721, section 4.1). Elsewhere, behind SiLU for one, it is a Mul
before the layer's own Q, and other readers keep the tensor as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from engines.backend import EngineError
from engines.bias import add_to_bias, takes_bias
from engines.layer_weights import by_input, from_matrix, to_matrix
from engines.passes import drop_unused
from engines.topology import Topology, attribute

Floats = NDArray[np.float64]

_HOMOGENEOUS_OPS = {"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool"}
_DIVISIBLE_OPS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}  # operators that can read x / divisor


def equalised_name(layer: str) -> str:
    """The tensor that an equalised layer reads, and the last node that is there to make it."""
    return f"{layer}.equalised"


def divided_name(layer: str) -> str:
    """The same before the offset is taken off."""
    return f"{layer}.divided"


def equalise(
    master: ModelProto, divisors: Mapping[str, Sequence[float]], offsets: Mapping[str, Sequence[float]]
) -> ModelProto:
    """The graph in which each layer named reads (x - offset) / divisor per channel; the master itself is not changed.

    divisors: per layer (channels,), positive. offsets: for some of these layers the same. Raises EngineError
    `plan.node` for what is no such layer of the graph, or has another number of channels.
    """
    if not divisors:
        return master
    model = ModelProto()
    model.CopyFrom(master)
    for node in list(model.graph.node):
        if node.name in divisors:
            divisor = np.asarray(divisors[node.name], np.float64)
            _equalise(model, node, divisor, np.asarray(offsets.get(node.name, np.zeros_like(divisor)), np.float64))
    missing = set(divisors) - {node.name for node in model.graph.node}
    if missing:
        raise _misfit(min(missing), "no node of that name")
    return drop_unused(model)


def can_divide(topology: Topology, layer: NodeProto) -> bool:
    """Whether a layer's input can be divided per channel: constant weights, and channels that are an axis of it."""
    transposed = layer.op_type == "Gemm" and bool(attribute(layer, "transA", 0))
    return layer.op_type in _DIVISIBLE_OPS and layer.input[1] in topology.initializers and not transposed


def can_offset(topology: Topology, layer: NodeProto) -> bool:
    """Whether its bias can make up for an offset of its input: padding, which is zero, would not have it."""
    pads = attribute(layer, "pads", ())
    padded = any(pads) or attribute(layer, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")  # type: ignore[arg-type]  # ONNX says ints
    plain = layer.op_type == "Conv" or (layer.op_type == "Gemm" and attribute(layer, "alpha", 1.0) == 1.0)
    return plain and not padded and can_divide(topology, layer) and takes_bias(topology, layer)


def is_free(topology: Topology, layer: NodeProto) -> bool:
    """Whether the layer before can do the division, so that it costs nothing."""
    return _divider(topology, layer) is not None


def _equalise(model: ModelProto, layer: NodeProto, divisor: Floats, offset: Floats) -> None:
    topology = Topology(model)  # of the graph as the layers before have left it
    if not can_divide(topology, layer) or (offset.any() and not can_offset(topology, layer)):
        raise _misfit(layer.name, f"a {layer.op_type} whose input cannot be divided or offset")
    weight = numpy_helper.to_array(topology.initializers[layer.input[1]])
    matrix = to_matrix(layer, weight)
    channels = matrix.shape[0] * matrix.shape[2]
    if divisor.shape != (channels,) or offset.shape != (channels,) or not (divisor > 0.0).all():
        raise _misfit(layer.name, f"{divisor.size} divisors and {offset.size} offsets for {channels} channels")
    name = equalised_name(layer.name)
    _constant(model, f"{name}.weight", from_matrix(layer, matrix * by_input(divisor, matrix), weight.shape))
    divider = None if offset.any() else _divider(topology, layer)
    if divider is not None:
        _divide_outputs(model, topology, divider, divisor)
        topology.producers[layer.input[0]].output[0] = name
    else:
        _insert_operations(model, layer, divisor, offset)
    layer.input[0], layer.input[1] = name, f"{name}.weight"
    if offset.any():
        add_to_bias(model, topology, layer, (matrix * by_input(offset, matrix)).sum(axis=(2, 3)).ravel())


def _divider(topology: Topology, layer: NodeProto) -> NodeProto | None:
    """The layer that makes, for this one alone, what it reads, with nothing between them but homogeneous operators."""
    tensor = layer.input[0]
    reader = layer
    while topology.sole_reader(tensor) is reader and len(topology.readers(tensor)) == 1:
        producer = topology.producers.get(tensor)
        if producer is None or len(producer.output) != 1:
            return None
        if producer.op_type in ("Conv", "Gemm") and _has_constant_parameters(topology, producer):
            return producer if _has_one_output_per_channel(topology, producer, layer) else None
        if producer.op_type not in _HOMOGENEOUS_OPS:
            return None
        tensor, reader = producer.input[0], producer
    return None


def _has_constant_parameters(topology: Topology, node: NodeProto) -> bool:
    plain = node.op_type == "Conv" or (attribute(node, "beta", 1.0) == 1.0 and attribute(node, "alpha", 1.0) == 1.0)
    return plain and all(name in topology.initializers for name in node.input[1:] if name)


def _has_one_output_per_channel(topology: Topology, producer: NodeProto, layer: NodeProto) -> bool:
    made = to_matrix(producer, numpy_helper.to_array(topology.initializers[producer.input[1]])).shape
    read = to_matrix(layer, numpy_helper.to_array(topology.initializers[layer.input[1]])).shape
    biases = topology.initializers[producer.input[2]].dims if len(producer.input) > 2 and producer.input[2] else None
    return made[0] * made[1] == read[0] * read[2] and (biases is None or list(biases) == [made[0] * made[1]])


def _divide_outputs(model: ModelProto, topology: Topology, node: NodeProto, divisor: Floats) -> None:
    """Divide what a layer gives, per output channel, through new initialisers: others may share the old ones."""
    weight = numpy_helper.to_array(topology.initializers[node.input[1]])
    matrix = to_matrix(node, weight)
    divided = matrix / divisor.reshape(matrix.shape[0], matrix.shape[1], 1, 1)
    _constant(model, f"{node.name}.divided_weight", from_matrix(node, divided, weight.shape))
    node.input[1] = f"{node.name}.divided_weight"
    if len(node.input) > 2 and node.input[2]:
        bias = numpy_helper.to_array(topology.initializers[node.input[2]]).astype(np.float64)
        _constant(model, f"{node.name}.divided_bias", (bias / divisor).astype(np.float32))
        node.input[2] = f"{node.name}.divided_bias"


def _insert_operations(model: ModelProto, layer: NodeProto, divisor: Floats, offset: Floats) -> None:
    """x * (1 / divisor) - offset / divisor, of which what does nothing is left out."""
    name = equalised_name(layer.name)
    spatial = len(_weight_dims(model, layer)) - 2 if layer.op_type in ("Conv", "ConvTranspose") else 0
    shape = (1, -1, *[1] * spatial) if layer.op_type in ("Conv", "ConvTranspose") else (-1,)
    steps = [("Mul", 1.0 / divisor), ("Add", -offset / divisor)]
    used = [(operator, values) for operator, values in steps if operator == "Mul" or offset.any()]
    index = next(i for i, node in enumerate(model.graph.node) if node.name == layer.name)
    read = layer.input[0]
    for number, (operator, values) in enumerate(used):
        made = name if number == len(used) - 1 else divided_name(layer.name)
        _constant(model, f"{made}.constant", values.astype(np.float32).reshape(shape))
        model.graph.node.insert(
            index + number, helper.make_node(operator, [read, f"{made}.constant"], [made], name=made)
        )
        read = made


def _weight_dims(model: ModelProto, layer: NodeProto) -> Sequence[int]:
    return next(tensor.dims for tensor in model.graph.initializer if tensor.name == layer.input[1])


def _constant(model: ModelProto, name: str, value: NDArray[np.float32]) -> None:
    model.graph.initializer.append(numpy_helper.from_array(value, name))


def _misfit(layer: str, found: str) -> EngineError:
    return EngineError(
        "plan.node", f"divisors for '{layer}': {found}", "layers of this model", "make the plan anew for this model"
    )
