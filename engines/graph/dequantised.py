"""Take a Q/DQ graph apart: its INT8 layers, the ranges of its activations, the float network without Q/DQ.

All read graphs of any tool, ModelOpt's and ONNX Runtime's among them. What `existing_qdq` refuses for a runtime, as
uint8 with a zero point, still has a range here.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from engines.errors import EngineError
from engines.graph.passes import constants_to_initializers, drop_unused
from engines.graph.topology import COMPUTE_OPS, DEQUANTISE, QUANTISE, Topology, replace_nodes
from engines.graph.weights import dequantised

_INTEGERS = {TensorProto.INT8: (-127, 127), TensorProto.UINT8: (0, 255)}  # -128 has no positive counterpart


def int8_layers(graph: ModelProto) -> list[str]:
    """Return the names of the convolutions and matrix products that read INT8, in graph order."""
    topology = Topology(graph)
    return [
        node.name
        for node in topology.nodes
        if node.op_type in COMPUTE_OPS
        and node.input[0] in topology.producers
        and topology.producers[node.input[0]].op_type == DEQUANTISE
    ]


def activation_amax(model: ModelProto) -> dict[str, float]:
    """Return, for each activation that the graph quantises, the largest magnitude that its integers can hold.

    Several Q of one tensor count by the widest. A Cast before a Q is looked through: the range is that of its input.

    Raises EngineError (`export.qdq`) for a Q with a computed scale, with a scale per channel or of another type.
    """
    topology = Topology(constants_to_initializers(deepcopy(model)))
    found: dict[str, float] = {}
    for node in topology.nodes:
        if node.op_type == QUANTISE and node.input[0] not in topology.initializers:
            tensor = _without_casts(node.input[0], topology)
            found[tensor] = max(found.get(tensor, 0.0), _amax(node, topology))
    return found


def without_qdq(model: ModelProto) -> ModelProto:
    """Return the float network of a Q/DQ graph, with the same tensor names; the graph itself is not changed.

    Its weights are the integers times their scales: to quantise them again under the same rule gives the same integers.
    """
    bare = constants_to_initializers(deepcopy(model))
    topology = Topology(bare)
    aliases: dict[str, str] = {}
    kept: list[NodeProto] = []
    for node in topology.nodes:
        copy = deepcopy(node)
        for index, name in enumerate(copy.input):
            copy.input[index] = aliases.get(name, name)
        if node.op_type == QUANTISE:
            aliases[node.output[0]] = copy.input[0]
        elif node.op_type != DEQUANTISE:
            kept.append(copy)
        elif node.output[0] in topology.pinned:
            kept.append(helper.make_node("Identity", [copy.input[0]], [node.output[0]], name=node.name))
        elif node.input[0] in topology.initializers:
            values = dequantised(node, topology)
            if values is None:
                raise _refused(node, "with a computed scale")
            bare.graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        else:
            aliases[node.output[0]] = copy.input[0]
    return drop_unused(replace_nodes(bare, kept))


def _without_casts(tensor: str, topology: Topology) -> str:
    maker = topology.producers.get(tensor)
    while maker is not None and maker.op_type == "Cast":
        tensor = maker.input[0]
        maker = topology.producers.get(tensor)
    return tensor


def _amax(node: NodeProto, topology: Topology) -> float:
    scale = _constant(node, 1, topology)
    zero_point = _constant(node, 2, topology) if len(node.input) > 2 and node.input[2] else np.zeros((), np.uint8)
    kind = helper.np_dtype_to_tensor_dtype(zero_point.dtype)
    if kind not in _INTEGERS or scale.size != 1:
        raise _refused(node, f"of type {zero_point.dtype} with {scale.size} scales")
    low, high = (bound - int(zero_point.item()) for bound in _INTEGERS[kind])
    amax = float(scale.item()) * max(-low, high)
    if not (np.isfinite(amax) and amax > 0.0):
        raise _refused(node, f"with scale {scale.item()}")
    return amax


def _constant(node: NodeProto, index: int, topology: Topology) -> NDArray[np.generic]:
    stored = topology.initializers.get(node.input[index])
    if stored is None:
        raise _refused(node, f"with a computed input '{node.input[index]}'")
    return numpy_helper.to_array(stored)


def _refused(node: NodeProto, found: str) -> EngineError:
    return EngineError(
        "export.qdq",
        f"{node.op_type} '{node.name or node.output[0]}' {found}",
        "8-bit Q/DQ with one constant positive scale per activation",
        "export the model again with int8 or uint8 Q/DQ, per tensor for activations",
    )
