"""Constants computed once: batch normalisation, folded into the convolution or matrix product before it, and biases
that a model stores as integers.

BN(y) = (y - mean) * gamma / sqrt(var + epsilon) + beta is affine per channel, so it moves into the weights
and the bias (Jacob et al., arXiv:1712.05877, section 3.2): quantisation then sees the weights that are
executed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from engines.topology import Topology, attribute

Floats = NDArray[np.float64]


def fold_batch_norms(model: ModelProto) -> ModelProto:
    """Fold each BatchNormalization whose input a Conv, ConvTranspose or Gemm makes for it alone."""
    topology = Topology(model)
    kept = []
    for node in topology.nodes:
        producer = topology.producers.get(node.input[0]) if node.op_type == "BatchNormalization" else None
        if producer is not None and _foldable(producer, node, topology):
            _fold(model, producer, node, topology)
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _foldable(producer: NodeProto, norm: NodeProto, topology: Topology) -> bool:
    """Constant parameters, no other reader of the product, and inference mode."""
    if producer.op_type not in ("Conv", "ConvTranspose", "Gemm"):
        return False
    if topology.sole_reader(norm.input[0]) is not norm:
        return False
    if attribute(norm, "training_mode", 0) or any(map(topology.readers, norm.output[1:])):
        return False
    bias = producer.input[2] if len(producer.input) > 2 else ""
    constants = [producer.input[1], *norm.input[1:], *([bias] if bias else [])]
    if not all(name in topology.initializers for name in constants):
        return False
    channels = topology.initializers[norm.input[1]].dims[0]
    return not bias or list(topology.initializers[bias].dims) == [channels]


def _fold(model: ModelProto, producer: NodeProto, norm: NodeProto, topology: Topology) -> None:
    def value(name: str) -> Floats:
        return numpy_helper.to_array(topology.initializers[name]).astype(np.float64)

    gamma, beta, mean, variance = (value(name) for name in norm.input[1:5])
    gain = gamma / np.sqrt(variance + float(attribute(norm, "epsilon", 1e-5)))  # type: ignore[arg-type]  # ONNX says float
    has_bias = len(producer.input) > 2 and producer.input[2] != ""
    bias = value(producer.input[2]) if has_bias else np.zeros_like(mean)
    if producer.op_type == "Gemm":
        bias = bias * float(attribute(producer, "beta", 1.0))  # type: ignore[arg-type]  # likewise
        for candidate in producer.attribute:
            if candidate.name == "beta":
                candidate.f = 1.0
    weight = _scaled(value(producer.input[1]), gain, producer)
    # New initialisers: other nodes may share the old ones.
    names = (f"{norm.output[0]}.folded_weight", f"{norm.output[0]}.folded_bias")
    for name, array in zip(names, (weight, (bias - mean) * gain + beta), strict=True):
        model.graph.initializer.append(numpy_helper.from_array(array.astype(np.float32), name))
    producer.input[:] = [producer.input[0], *names]
    producer.output[0] = norm.output[0]


def _scaled(weight: Floats, gain: Floats, producer: NodeProto) -> Floats:
    """The weights times the gain of their output channel."""
    if producer.op_type == "Conv":  # (out, in / groups, ...)
        return weight * gain.reshape(-1, *[1] * (weight.ndim - 1))
    if producer.op_type == "Gemm":  # (out, in) when transposed, else (in, out)
        return weight * (gain[:, None] if attribute(producer, "transB", 0) else gain)
    # ConvTranspose (in, out / groups, ...): group g of the inputs makes group g of the output channels.
    groups = int(attribute(producer, "group", 1))  # type: ignore[call-overload]  # ONNX says int
    grouped = weight.reshape(groups, -1, *weight.shape[1:])
    return (grouped * gain.reshape(groups, 1, -1, *[1] * (weight.ndim - 2))).reshape(weight.shape)


def fold_integer_biases(model: ModelProto) -> ModelProto:
    """Make a float32 initialiser of what DequantizeLinear makes of an int32 constant: the same values, to the bit.

    Quantising tools store biases so; TensorRT takes them in float alone.
    """
    topology = Topology(model)
    kept = []
    for node in topology.nodes:
        stored = topology.initializers.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        integers = stored is not None and stored.data_type == TensorProto.INT32
        constant = all(name in topology.initializers for name in node.input)
        if integers and constant and node.output[0] not in topology.outputs:
            model.graph.initializer.append(_dequantised(node, topology))
        else:
            kept.append(node)
    del model.graph.node[:]
    model.graph.node.extend(kept)
    return model


def _dequantised(node: NodeProto, topology: Topology) -> TensorProto:
    integers, scale, *zero_point = (numpy_helper.to_array(topology.initializers[name]) for name in node.input)
    along = [1] * integers.ndim
    if scale.size > 1:
        along[int(attribute(node, "axis", 1))] = -1  # type: ignore[call-overload]  # ONNX says int
    steps = integers - (zero_point[0].reshape(along) if zero_point else 0)
    values = steps.astype(np.float32) * scale.reshape(along)
    return numpy_helper.from_array(values, node.output[0])
