"""Bring the weights of convolutions and matrix products into one form, whatever the operator's own layout.

The form is (groups, outputs per group, inputs per group, taps), float64: a matrix product has one group and one tap.
Input channel i of group g is channel g * inputs per group + i of the layer's input; outputs likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from engines.graph.topology import Topology, attribute, fresh_name, number

Floats = NDArray[np.float64]

IMAGE_OPS = {"Conv", "ConvTranspose"}  # channels on axis 1; matrix products have theirs on the last


def to_matrix(node: NodeProto, weight: NDArray[np.generic]) -> Floats:
    """Return the (groups, outputs, inputs, taps) of a Conv, ConvTranspose, Gemm or MatMul with constant weights."""
    values: Floats = weight.astype(np.float64)
    if node.op_type == "Conv":  # (out, in / groups, ...)
        return values.reshape(groups(node), -1, values.shape[1], prod(values.shape[2:]))
    if node.op_type == "ConvTranspose":  # (in, out / groups, ...)
        grouped = values.reshape(groups(node), -1, values.shape[1], prod(values.shape[2:]))
        transposed: Floats = grouped.transpose(0, 2, 1, 3)
        return transposed
    oriented: Floats = values if _is_transposed(node) else values.T
    return oriented[np.newaxis, :, :, np.newaxis]


def from_matrix(node: NodeProto, matrix: Floats, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Return the inverse of `to_matrix`, for a weight of that shape; float32."""
    if node.op_type == "ConvTranspose":
        matrix = matrix.transpose(0, 2, 1, 3)
    elif node.op_type != "Conv":
        matrix = matrix[0, :, :, 0] if _is_transposed(node) else matrix[0, :, :, 0].T
    return np.ascontiguousarray(matrix.reshape(shape), np.float32)


def dequantised(node: NodeProto, topology: Topology) -> NDArray[np.float32] | None:
    """Return the constant that a DequantizeLinear makes of constants; None if one of its inputs is computed."""
    names = [name for name in node.input if name]
    if not all(name in topology.initializers for name in names):
        return None
    stored, scale, *zero_point = (numpy_helper.to_array(topology.initializers[name]) for name in names)
    along = [1] * stored.ndim
    if scale.size > 1:
        along[int(number(node, "axis", 1))] = -1
    if stored.dtype != np.int32:  # float32 holds the others exactly, also those of FLOAT8, which are no integers
        stored = stored.astype(np.float32)
    if zero_point:
        stored = stored - zero_point[0].astype(stored.dtype).reshape(along)
    return np.asarray(stored.astype(np.float32) * scale.astype(np.float32).reshape(along))


def by_input(values: Floats, matrix: Floats) -> Floats:
    """Return (groups, 1, inputs, 1) from one value per input channel (channels,), to multiply a matrix with."""
    return values.reshape(matrix.shape[0], 1, matrix.shape[2], 1)


def by_output(values: Floats, matrix: Floats) -> Floats:
    """Return (groups, outputs, 1, 1) from one value per output channel (channels,), to multiply a matrix with."""
    return values.reshape(matrix.shape[0], matrix.shape[1], 1, 1)


def channel_counts(node: NodeProto, dims: Sequence[int]) -> tuple[int, int]:
    """Return how many channels a layer with a weight of that shape reads, and how many it makes."""
    if node.op_type == "Conv":
        return dims[1] * groups(node), dims[0]
    if node.op_type == "ConvTranspose":
        return dims[0], dims[1] * groups(node)
    return (dims[1], dims[0]) if _is_transposed(node) else (dims[0], dims[1])


def coverage(node: NodeProto) -> float:
    """Return the mean share of a layer's taps that meet in one output: a ConvTranspose spreads them by its strides."""
    strides: Sequence[int] = attribute(node, "strides", ()) if node.op_type == "ConvTranspose" else ()  # type: ignore[assignment]  # ONNX says ints
    return 1.0 / prod(strides)


def channels_first(node: NodeProto, tensor: NDArray[np.generic], is_input: bool) -> NDArray[np.float32]:
    """Return a layer's input or output as (channels, values), float32."""
    axis = 1 if node.op_type in IMAGE_OPS else -1
    if is_input and node.op_type == "Gemm" and attribute(node, "transA", 0):
        axis = 0
    channels: NDArray[np.generic] = np.moveaxis(tensor, axis, 0).reshape(tensor.shape[axis], -1)
    return channels.astype(np.float32, copy=False)


def groups(node: NodeProto) -> int:
    """Return the groups of a convolution; a matrix product is one group."""
    return int(number(node, "group", 1))


def add_constant(model: ModelProto, topology: Topology, name: str, value: NDArray[np.generic]) -> str:
    """Add a constant to a model and to its topology, and return its name, which is made unique."""
    name = fresh_name(name, {*topology.initializers, *topology.producers, *topology.inputs})
    model.graph.initializer.append(numpy_helper.from_array(value, name))
    topology.initializers[name] = model.graph.initializer[-1]
    return name


def _is_transposed(node: NodeProto) -> bool:
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
