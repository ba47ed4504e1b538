"""How far one operator can take |x|: bounds on its results from bounds on what it reads, for engines/ranges.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto

from engines.operators import AVERAGE_OPS, MOVEMENT_OPS
from engines.topology import attribute

Floats = NDArray[np.float64]

UNIT_OPS = {"Sigmoid", "HardSigmoid", "Tanh", "Erf", "Softsign", "Softmax", "Hardmax", "Sign", "Sin", "Cos"}
NO_LARGER_OPS = {  # |f(x)| <= |x|
    *(MOVEMENT_OPS - {"Concat", "Pad", "Resize"}), *AVERAGE_OPS, "Relu", "ThresholdedRelu", "HardSwish", "Mish", "Gelu",
    "Swish", "Abs", "Neg", "Identity", "Dropout", "Cast", "Expand", "Tile", "GatherElements", "GatherND", "TopK",
    "GlobalMaxPool", "ReduceMax", "ReduceMin", "Trilu",
}  # fmt: skip
LARGEST_OPS = {"Concat", "Max", "Min", "Mean", "Where", "Pad"}
SUM_OPS = {"Add", "Sub", "Sum"}


def bound_of_inputs(node: NodeProto, bounds: Sequence[float]) -> float | None:
    """A bound on |x| of a node's outputs; None for an operator that is not known to have one.

    bounds: on |x| of the inputs that count, at least one, in the operator's order.
    """
    operator, largest = node.op_type, max(bounds)
    if operator in NO_LARGER_OPS | LARGEST_OPS:
        return largest
    if operator in SUM_OPS:
        return sum(bounds)
    if operator == "Mul":
        return math.prod(bounds)
    if operator == "Resize":  # cubic interpolation overshoots, and cropping fills in a value of its own
        mode = attribute(node, "mode", b"nearest"), attribute(node, "coordinate_transformation_mode")
        return None if mode[0] == b"cubic" or mode[1] == b"tf_crop_and_resize" else largest
    if operator == "PRelu":
        return bounds[0] * max(1.0, bounds[1])
    functions = {
        "LeakyRelu": lambda x: x * max(1.0, abs(number(node, "alpha", 0.01))),
        "Elu": lambda x: max(x, abs(number(node, "alpha", 1.0))),
        "Celu": lambda x: max(x, abs(number(node, "alpha", 1.0))),
        "Selu": lambda x: max(x, abs(number(node, "alpha", 1.67326))) * abs(number(node, "gamma", 1.0507)),
        "Softplus": lambda x: x + math.log(2.0),
        "Exp": lambda x: math.exp(min(x, 700.0)),
        "Sqrt": math.sqrt,
    }
    return functions[operator](largest) if operator in functions else None


def absolute_sums(node: NodeProto, weight: Floats, constant: int) -> Floats:
    """sum|w| over all that one output value adds up: float64, one per output channel.

    weight: the constant operand of a Conv, ConvTranspose, Gemm or MatMul, in ONNX's layout; constant: which input it
    is, 0 or 1.
    """
    sizes = np.abs(weight)
    if node.op_type == "Conv":  # (out, in / groups, ...)
        return np.asarray(sizes.sum(axis=tuple(range(1, weight.ndim))))
    if node.op_type == "ConvTranspose":  # (in, out / groups, ...): group g of the inputs makes group g of the outputs
        groups = int(number(node, "group", 1))
        grouped = sizes.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        return np.asarray(grouped.sum(axis=(1, 3))).reshape(-1)
    if node.op_type == "Gemm":
        return np.asarray(sizes.sum(axis=1 if attribute(node, "transB", 0) else 0))
    inner = -1 if constant == 0 or weight.ndim == 1 else -2
    return np.asarray(sizes.sum(axis=inner))


def number(node: NodeProto, name: str, default: float) -> float:
    """A node's attribute of type int or float."""
    value = attribute(node, name, default)
    return float(value)  # type: ignore[arg-type]  # ONNX says number
