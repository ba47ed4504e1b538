"""Find tensors that are never negative, whatever the frame: by the operators that make them."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, numpy_helper

from engines.graph.topology import AVERAGE_OPS, Topology, attribute, data_inputs, moves_values

_NEVER = {"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Exp", "Abs", "Sqrt"}
_IF_NO_INPUT_IS = {"Add", "Mul", "Div", "Max", "Min", "Sum"}


def never_negative(topology: Topology) -> set[str]:
    """Return the tensors that nodes make and of which no value can be below zero.

    Those of `Relu(x)`, `Clip(x, 0, 6)` and what averages, moves, adds or scales up such tensors alone. A graph's inputs
    may be negative, and so may the outputs of operators that are not known here.
    """
    found: set[str] = set()

    def is_sure(tensor: str) -> bool:
        stored = topology.initializers.get(tensor)
        return tensor in found or (stored is not None and bool((numpy_helper.to_array(stored) >= 0).all()))

    for node in topology.nodes:
        if node.op_type == "Clip":
            sure = _least_of_clip(node, topology) >= 0.0
        elif node.op_type in _IF_NO_INPUT_IS:
            sure = all(map(is_sure, node.input))
        elif node.op_type in AVERAGE_OPS or moves_values(node, topology.initializers) or _interpolates(node):
            sure = all(is_sure(node.input[index]) for index in data_inputs(node))
        else:
            sure = node.op_type in _NEVER
        if sure:
            found.update(node.output)
    return found


def _interpolates(node: NodeProto) -> bool:
    """Return True for a Resize between neighbours; a cubic one overshoots."""
    return node.op_type == "Resize" and attribute(node, "mode", b"nearest") == b"linear"


def _least_of_clip(node: NodeProto, topology: Topology) -> float:
    """Return the lower bound of a Clip: an attribute up to opset 10, then an input."""
    if len(node.input) < 2 or not node.input[1]:
        return float(attribute(node, "min", -np.inf))  # type: ignore[arg-type]  # ONNX says float
    least = topology.initializers.get(node.input[1])
    return float(numpy_helper.to_array(least).min()) if least is not None else -np.inf
