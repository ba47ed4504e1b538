"""Read the Q/DQ that a model brings itself, and refuse what a runtime could read otherwise than it is meant.

`check_own_quantisation` accepts or refuses; `own_int8` then says which tensors are the model's own INT8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from engines.errors import EngineError
from engines.graph.topology import (
    COMPUTE_OPS,
    DEQUANTISE,
    QDQ_OPS,
    QUANTISE,
    Topology,
    all_nodes,
    attribute,
    channel_axis,
    data_inputs,
    moves_values,
    number,
)

_SYMMETRIC = (
    "export it with symmetric int8 for weights and activations, zero points written out "
    "(ONNX Runtime: QuantType.QInt8 with ActivationSymmetric and WeightSymmetric)"
)
_RECALIBRATE = "calibrate it again with the tool that quantised it, or give the model before quantisation"
_EXPLICIT = "export it with a QuantizeLinear and DequantizeLinear pair per tensor, or before quantisation"


@dataclass(frozen=True)
class OwnInt8:
    """The tensors that are INT8 by a model's own Q/DQ.

    weights: dequantised constants, transposed or not.
    activations: dequantised activations, and tensors that hold only moved values of these under one scale; with it.
    pairs: per activation that the model quantises, its first Q and DQ.
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


def check_own_quantisation(master: ModelProto) -> None:
    """Refuse Q/DQ that a runtime could read otherwise than it is meant. Raises EngineError (`model.quantised`).

    Accepted: int8 with zero points of zeros; float32 scales, constant, finite and positive; every Q read by DQs of its
    scale alone; scales per channel for constant weights only, along their output channels. What float16 cannot hold of
    a scale is no reason: the float16 form leaves such a layer float32.
    """
    topology = Topology(master)
    in_graph = {id(node) for node in master.graph.node}
    for node in all_nodes(master.graph):
        if node.op_type not in QDQ_OPS:
            continue
        if id(node) not in in_graph:
            raise _refused(node, "in the body of a control-flow node", "Q/DQ in the main graph", _EXPLICIT)
        _check_zero_point(node, topology)
        _check_scale(node, topology)
        if node.op_type == QUANTISE:
            _check_readers(node, topology)
        else:
            _check_source(node, topology)
        if _constant(node, 1, topology).ndim:
            _check_channels(node, topology)


def _check_zero_point(node: NodeProto, topology: Topology) -> None:
    expected = "a constant int8 zero point, 0"
    name = node.input[2] if len(node.input) > 2 else ""
    if not name:
        raise _refused(node, "without a zero point, which stands for uint8", expected, _SYMMETRIC)
    if name not in topology.initializers:
        raise _refused(node, "with a computed zero point", expected, _SYMMETRIC)
    zero_point = topology.initializers[name]
    if zero_point.data_type != TensorProto.INT8:
        kind = TensorProto.DataType.Name(zero_point.data_type).lower()
        raise _refused(node, f"with a zero point of type {kind}", expected, _SYMMETRIC)
    values = numpy_helper.to_array(zero_point)
    if values.any():
        raise _refused(node, f"with zero point {values[values != 0].flat[0]}", expected, _SYMMETRIC)


def _check_scale(node: NodeProto, topology: Topology) -> None:
    expected = "a constant float32 scale per tensor or per channel, finite and positive"
    stored = topology.initializers.get(node.input[1])
    if stored is None:
        raise _refused(node, "with a computed scale", expected, "export it with its scales folded to constants")
    if stored.data_type != TensorProto.FLOAT or len(stored.dims) > 1:
        kind = TensorProto.DataType.Name(stored.data_type).lower()
        raise _refused(node, f"with a {kind} scale of shape {list(stored.dims)}", expected, _EXPLICIT)
    scales = numpy_helper.to_array(stored)
    unfit = ~(np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny))  # a subnormal one is zero to a GPU
    if unfit.any():
        raise _refused(node, f"with scale {scales[unfit].flat[0]:.3g}", expected, _RECALIBRATE)


def _check_readers(node: NodeProto, topology: Topology) -> None:
    """A Q is followed by DQs alone: between them integers would be computed with."""
    expected = "a DequantizeLinear of the same scale as every reader of what it quantises"
    readers = [reader for reader, _ in topology.readers(node.output[0])]
    others = [reader.op_type for reader in readers if reader.op_type != DEQUANTISE]
    if others or node.output[0] in topology.pinned:
        raise _refused(node, f"read by {others[0] if others else 'others than nodes'}", expected, _EXPLICIT)
    scale = _constant(node, 1, topology)
    for reader in readers:
        other = topology.initializers.get(reader.input[1])
        same = other is not None and np.array_equal(numpy_helper.to_array(other), scale)
        if not same or (scale.ndim and _axis(node, topology) != _axis(reader, topology)):
            raise _refused(node, f"read by '{reader.name}' under another scale", expected, _RECALIBRATE)


def _check_source(node: NodeProto, topology: Topology) -> None:
    maker = topology.producers.get(node.input[0])
    stored = topology.initializers.get(node.input[0])
    if not (stored.data_type == TensorProto.INT8 if stored is not None else maker and maker.op_type == QUANTISE):
        reads = maker.op_type if maker else "no int8 constant"
        raise _refused(node, f"that reads {reads}", "int8 weights, or a QuantizeLinear, before it", _EXPLICIT)


def _check_channels(node: NodeProto, topology: Topology) -> None:
    """Scales per channel are for constant weights, along the output channels of whoever multiplies by them."""
    stored = topology.initializers.get(node.input[0])
    if node.op_type == DEQUANTISE and stored is None:
        return  # its Q has been checked
    axis, expected = _axis(node, topology), "one scale per output channel of a constant weight"
    if stored is None:
        raise _refused(node, "with a vector of scales for an activation", "one scale of shape []", _EXPLICIT)
    count = _constant(node, 1, topology).size
    if not axis < len(stored.dims) or stored.dims[axis] != count:
        found = f"with {count} scales along axis {axis} of a weight of shape {list(stored.dims)}"
        raise _refused(node, found, expected, _EXPLICIT)
    makers = [node] if node.op_type == DEQUANTISE else [reader for reader, _ in topology.readers(node.output[0])]
    for maker in makers:
        _check_channel_readers(node, topology, maker.output[0], axis, len(stored.dims))


def _check_channel_readers(node: NodeProto, topology: Topology, tensor: str, axis: int, rank: int) -> None:
    expected = "scales along the output channels of the convolution or matrix product that reads the weight"
    for reader, index in topology.readers(tensor):
        if reader.op_type == "Transpose":
            order = attribute(reader, "perm") or list(reversed(range(rank)))
            moved = list(order).index(axis)  # type: ignore[call-overload]  # ONNX says a list of int
            _check_channel_readers(node, topology, reader.output[0], moved, rank)
        elif reader.op_type not in COMPUTE_OPS or index != 1:
            raise _refused(node, f"with scales per channel, read by {reader.op_type}", expected, _EXPLICIT)
        elif channel_axis(reader, rank) != axis:
            found = f"with scales along axis {axis} of the weight of {reader.op_type} '{reader.name}'"
            raise _refused(node, found, f"{expected}: axis {channel_axis(reader, rank)}", _EXPLICIT)


def _axis(node: NodeProto, topology: Topology) -> int:
    """The axis of a Q's or DQ's scales; a negative one counts from the end where the rank is known."""
    axis = int(number(node, "axis", 1))
    maker = topology.producers.get(node.input[0])
    stored = topology.initializers.get(maker.input[0] if maker else node.input[0])
    return axis + len(stored.dims) if axis < 0 and stored is not None else axis


def _constant(node: NodeProto, index: int, topology: Topology) -> NDArray[np.generic]:
    return numpy_helper.to_array(topology.initializers[node.input[index]])


def _refused(node: NodeProto, found: str, expected: str, remedy: str) -> EngineError:
    name = node.name or node.output[0]
    return EngineError("model.quantised", f"{node.op_type} '{name}' {found}", expected, remedy)
