"""Which tensors of a graph are INT8 by Q/DQ that the graph already has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from onnx import NodeProto, numpy_helper

from engines.operators import data_inputs, moves_values
from engines.topology import Topology

QUANTISE, DEQUANTISE = "QuantizeLinear", "DequantizeLinear"


@dataclass(frozen=True)
class OwnInt8:
    """What a model's own Q/DQ makes of its tensors.

    weights: dequantised constants, transposed or not. activations: dequantised activations, and what only moves values
    of such under one scale; with that scale. pairs: per activation that the model quantises, its first Q and DQ.
    """

    weights: frozenset[str]
    activations: Mapping[str, float]
    pairs: Mapping[str, tuple[NodeProto, NodeProto]]

    def multiplies(self, node: NodeProto) -> bool:
        """True for a convolution or matrix product both of whose operands are the model's own INT8."""
        return all(map(self.dequantises, node.input[:2]))

    def dequantises(self, tensor: str) -> bool:
        """True for a tensor that is the model's own INT8, dequantised."""
        return tensor in self.activations or tensor in self.weights

    def concerns(self, tensor: str) -> bool:
        """True for a tensor that the model quantises, or has dequantised."""
        return tensor in self.pairs or self.dequantises(tensor)


def own_int8(topology: Topology) -> OwnInt8:
    """Read the Q/DQ of a master graph, which `check_own_quantisation` has accepted."""
    weights: set[str] = set()
    activations: dict[str, float] = {}
    pairs: dict[str, tuple[NodeProto, NodeProto]] = {}
    for node in topology.nodes:
        if node.op_type == DEQUANTISE:
            maker = topology.producers.get(node.input[0])
            if maker is None or maker.input[0] in topology.initializers:
                weights.add(node.output[0])
            else:
                activations[node.output[0]] = numpy_helper.to_array(topology.initializers[node.input[1]]).item()
                pairs.setdefault(maker.input[0], (maker, node))
        elif node.op_type == "Transpose" and node.input[0] in weights:
            weights.add(node.output[0])
        elif moves_values(node, topology.initializers):
            scales = {activations.get(node.input[index]) for index in data_inputs(node)}
            scale = scales.pop()
            if scale is not None and not scales:
                activations.update(dict.fromkeys(node.output, scale))
    return OwnInt8(frozenset(weights), activations, pairs)
