"""How much of a model's arithmetic a placement puts into INT8."""

from __future__ import annotations

from math import prod

from onnx import ModelProto

from engines.placement import COMPUTE_OPS, Placement
from engines.topology import Topology, attribute, tensor_types


def node_macs(master: ModelProto) -> dict[str, int]:
    """Multiply-accumulates per image of every convolution and matrix product, by node name.

    Open dimensions count as 1, so that shares are right wherever all layers see the same open size.
    """
    topology = Topology(master)
    types = tensor_types(master)

    def shape(tensor: str) -> tuple[int, ...]:
        known = types[tensor].shape if tensor in types else None
        return tuple(size if isinstance(size, int) else 1 for size in known or ())

    macs = {}
    for node in topology.nodes:
        if node.op_type not in COMPUTE_OPS:
            continue
        weight = shape(node.input[1])
        if node.op_type == "Conv":  # each output element: one kernel over the input channels of its group
            macs[node.name] = prod(shape(node.output[0])[1:]) * prod(weight[1:])
        elif node.op_type == "ConvTranspose":  # each input element: one kernel over the output channels of its group
            macs[node.name] = prod(shape(node.input[0])[1:]) * prod(weight[1:])
        else:
            inner = weight[1 if attribute(node, "transB", 0) else 0] if node.op_type == "Gemm" else weight[-2]
            macs[node.name] = prod(shape(node.output[0])[1:]) * inner
    return macs


def int8_macs_share(master: ModelProto, placement: Placement) -> float:
    """The share of the multiply-accumulates that run in INT8, in [0, 1]; 0.0 for a model without any.

    The model's own INT8 counts as that which we place.
    """
    macs = node_macs(master)
    total = sum(macs.values())
    return sum(macs.get(name, 0) for name in (*placement.own, *placement.quantised)) / total if total else 0.0
