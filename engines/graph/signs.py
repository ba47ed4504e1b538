"""Find tensors that are never negative, whatever the frame: by the operators that make them."""

from __future__ import annotations

import numpy as np
from onnx import NodeProto, numpy_helper

from engines.graph.topology import AVERAGE_OPS, Topology, attribute, data_inputs, moves_values

_NEVER = {"Relu", "Sigmoid", "HardSigmoid", "Softmax", "Softplus", "Exp", "Abs", "Sqrt"}
_IF_NO_INPUT_IS = {"Add", "Mul", "Div", "Max", "Min", "Sum"}


def is_never_negative(tensor: str, topology: Topology) -> bool:
    """Return True if no value of a tensor can be below zero.

    That of `Relu(x)`, `Clip(x, 0, 6)` and what averages, moves, adds or scales up such tensors alone. A graph's inputs
    may be negative, and so may the outputs of operators that are not known here.
    """
    known: dict[str, bool] = {}
    waiting = [tensor]
    while waiting:  # deep networks have more operators than Python allows calls
        name = waiting[-1]
        needed = [each for each in _inputs_that_decide(name, topology) or () if each not in known]
        if needed:
            waiting += needed
            continue
        known[waiting.pop()] = _is_not_negative(name, topology, known)
    return known[tensor]


def _inputs_that_decide(tensor: str, topology: Topology) -> list[str] | None:
    """Return the inputs that must never be negative, so that a tensor never is; None if they do not decide."""
    node = topology.producers.get(tensor)
    if node is None or node.op_type in _NEVER:
        return None
    if node.op_type in _IF_NO_INPUT_IS:
        return list(node.input)
    if node.op_type in AVERAGE_OPS or moves_values(node, topology.initializers) or _interpolates(node):
        return [node.input[index] for index in data_inputs(node)]
    return None


def _is_not_negative(tensor: str, topology: Topology, known: dict[str, bool]) -> bool:
    if tensor in topology.initializers:
        return bool((numpy_helper.to_array(topology.initializers[tensor]) >= 0).all())
    node = topology.producers.get(tensor)
    if node is None:
        return False
    if node.op_type in _NEVER:
        return True
    if node.op_type == "Clip":
        return _least_of_clip(node, topology) >= 0.0
    inputs = _inputs_that_decide(tensor, topology)
    return inputs is not None and all(known[name] for name in inputs)


def _interpolates(node: NodeProto) -> bool:
    """Return True for a Resize between neighbours; a cubic one overshoots."""
    return node.op_type == "Resize" and attribute(node, "mode", b"nearest") == b"linear"


def _least_of_clip(node: NodeProto, topology: Topology) -> float:
    """Return the lower bound of a Clip: an attribute up to opset 10, then an input."""
    if len(node.input) < 2 or not node.input[1]:
        return float(attribute(node, "min", -np.inf))  # type: ignore[arg-type]  # ONNX says float
    least = topology.initializers.get(node.input[1])
    return float(numpy_helper.to_array(least).min()) if least is not None else -np.inf
