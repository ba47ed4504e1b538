"""Weights of convolutions and matrix products in one form, whatever the operator's own layout.

The form is (groups, outputs per group, inputs per group, taps), float64: a matrix product has one group and one tap.
Input channel i of group g is channel g * inputs per group + i of the layer's input; outputs likewise.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from engines.topology import attribute

Floats = NDArray[np.float64]


def to_matrix(node: NodeProto, weight: NDArray[np.generic]) -> Floats:
    """(groups, outputs, inputs, taps) of a Conv, ConvTranspose, Gemm or MatMul with constant weights."""
    values: Floats = weight.astype(np.float64)
    if node.op_type == "Conv":  # (out, in / groups, ...)
        return values.reshape(_groups(node), -1, values.shape[1], int(np.prod(values.shape[2:])))
    if node.op_type == "ConvTranspose":  # (in, out / groups, ...)
        grouped = values.reshape(_groups(node), -1, values.shape[1], int(np.prod(values.shape[2:])))
        transposed: Floats = grouped.transpose(0, 2, 1, 3)
        return transposed
    oriented: Floats = values if _is_transposed(node) else values.T
    return oriented[np.newaxis, :, :, np.newaxis]


def from_matrix(node: NodeProto, matrix: Floats, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The inverse of `to_matrix`, for a weight of that shape; float32."""
    if node.op_type == "ConvTranspose":
        matrix = matrix.transpose(0, 2, 1, 3)
    elif node.op_type != "Conv":
        matrix = matrix[0, :, :, 0] if _is_transposed(node) else matrix[0, :, :, 0].T
    return np.ascontiguousarray(matrix.reshape(shape), np.float32)


def by_input(values: Floats, matrix: Floats) -> Floats:
    """(groups, 1, inputs, 1) from one value per input channel (channels,), to multiply a weight matrix with."""
    return values.reshape(matrix.shape[0], 1, matrix.shape[2], 1)


def channels_first(node: NodeProto, tensor: NDArray[np.generic]) -> Floats:
    """A layer's input or output as (channels, values): images keep theirs on axis 1, matrix products on the last."""
    axis = 1 if node.op_type in ("Conv", "ConvTranspose") else -1
    channels: Floats = np.moveaxis(tensor, axis, 0).reshape(tensor.shape[axis], -1).astype(np.float64)
    return channels


def _groups(node: NodeProto) -> int:
    return int(attribute(node, "group", 1))  # type: ignore[call-overload, no-any-return]  # ONNX says int


def _is_transposed(node: NodeProto) -> bool:
    return node.op_type == "Gemm" and bool(attribute(node, "transB", 0))
