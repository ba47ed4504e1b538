"""Rewrite a quantised graph so that the integer kernels of a CPU compute what the graph says.

The passes keep the graph a valid one, which ONNX Runtime computes exactly. They are for OpenVINO, each for what was
measured there (benchmarks/RESULTS.md, "INT8 on OpenVINO").
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from engines.graph.topology import COMPUTE_OPS, DEQUANTISE, QDQ_OPS, QUANTISE, Topology
from engines.graph.weights import IMAGE_OPS, add_constant, channel_counts

_SHIFT = 128  # from int8 to uint8
_TRACE = 2.0**-100  # no sum of INT8 products notices it
_SEVEN_BITS = 64  # the most that a weight of seven bits is


def shift_concatenated(model: ModelProto) -> None:
    """Write int8 tensors that come from a Concat as uint8 with zero point 128.

    The numbers are the same. But of int8 there, OpenVINO 2024.6 to 2026.4 loses the scale where convolutions in INT8
    make the inputs of the Concat: these keep two or three levels. So it does where the Concat's output is clipped,
    moved or added to a constant before it is quantised.
    """
    topology = Topology(model)
    zero_points = {
        name for name, tensor in topology.initializers.items()
        if tensor.data_type == TensorProto.INT8 and not _has_values(tensor)
    }  # fmt: skip
    shifted = set[str]()
    for node in topology.nodes:
        if node.op_type != QUANTISE or len(node.input) < 3 or node.input[2] not in zero_points:
            continue
        readers = [reader for reader, _ in topology.readers(node.output[0])]
        if not _is_concatenated(node, topology) or any(reader.op_type != DEQUANTISE for reader in readers):
            continue
        if node.output[0] in topology.pinned:
            continue
        shape = topology.initializers[node.input[2]].dims
        zero = add_constant(model, topology, f"{node.name}.shift", np.full(tuple(shape), _SHIFT, np.uint8))
        for each in (node, *readers):
            each.input[2] = zero
        shifted.add(node.output[0])
    for value in [value for value in model.graph.value_info if value.name in shifted]:
        model.graph.value_info.remove(value)  # its type was int8


def _is_concatenated(node: NodeProto, topology: Topology) -> bool:
    """Return whether a Concat has a part in what the node reads, behind the last layers that multiply weights."""
    waiting, seen = list(node.input[:1]), set[str]()
    while waiting:
        tensor = waiting.pop()
        maker = topology.producers.get(tensor)
        if maker is None or tensor in seen or maker.op_type in COMPUTE_OPS or maker.op_type in QDQ_OPS:
            continue
        if maker.op_type == "Concat":
            return True
        seen.add(tensor)
        waiting += maker.input
    return False


def bias_shared(model: ModelProto) -> None:
    """Give convolutions in INT8 without a bias one of almost zero where several nodes read their outputs.

    If the graph leaves a dimension open, OpenVINO 2026.4 dequantises such an output for each reader, then moves all of
    these scales into the convolution: of n readers, the output is multiplied by the scale n times. The addition of a
    bias is one reader, after the scale. OpenVINO removes additions of zero.
    """
    topology = Topology(model)
    for node in topology.nodes:
        output = node.output[0]
        if node.op_type not in IMAGE_OPS or len(topology.readers(output)) + (output in topology.pinned) < 2:
            continue
        stored, bias = _stored_weight(node, topology), node.input[2] if len(node.input) > 2 else ""
        is_biased = bias and (bias not in topology.initializers or _has_values(topology.initializers[bias]))
        if stored is None or is_biased:
            continue
        _, channels = channel_counts(node, stored.dims)
        trace = add_constant(model, topology, f"{node.name}.trace", np.full(channels, _TRACE, np.float32))
        node.input[2:] = [trace]


def _stored_weight(node: NodeProto, topology: Topology) -> TensorProto | None:
    """Return the constant behind the weight of a layer in INT8; None where the weight is float or computed."""
    maker = topology.producers.get(node.input[1])
    if maker is None or maker.op_type != DEQUANTISE:
        return None
    while maker is not None and maker.op_type in QDQ_OPS:
        name = maker.input[0]
        maker = topology.producers.get(name)
    return topology.initializers.get(name)


def _has_values(tensor: TensorProto) -> bool:
    return bool(numpy_helper.to_array(tensor).any())


def narrow_weights(model: ModelProto) -> int:
    """Round weights from eight to seven bits, -64 to 64, with scales twice as large; return how many tensors.

    Weights of no more than seven bits stay as they are: those that `insert_qdq` rounded from float at once.

    Without VNNI, x86 processors add two products of uint8 and int8 in 16 bits (vpmaddubsw), which saturates from
    2 * 255 * 65 on. With seven bits it cannot.
    """
    topology = Topology(model)
    scales: dict[str, str] = {}
    narrowed = set[str]()
    for node in topology.nodes:
        if node.op_type != DEQUANTISE or node.input[0] not in topology.initializers:
            continue
        tensor = topology.initializers[node.input[0]]
        if tensor.data_type != TensorProto.INT8 or len(tensor.dims) < 2:
            continue
        if tensor.name not in narrowed:
            values = numpy_helper.to_array(tensor)
            if np.abs(values.astype(np.int16)).max(initial=0) <= _SEVEN_BITS:
                continue
            narrowed.add(tensor.name)
            tensor.CopyFrom(numpy_helper.from_array(np.rint(values / 2.0).astype(np.int8), tensor.name))
        name = node.input[1]
        if name not in scales:  # a scale may be an activation's, too
            doubled = 2 * numpy_helper.to_array(topology.initializers[name])
            scales[name] = add_constant(model, topology, f"{name}.doubled", doubled)
        node.input[1] = scales[name]
    return len(narrowed)
