"""Write a plan's repairs into the float graph: divided and offset inputs, and corrected biases.

`equalise` lets a layer read (x - offset) / divisor, with its weights and bias changed to match, so that the float graph
computes the same. `shift_biases` takes back in a layer's bias what quantisation shifts the mean of its outputs by
(Nagel et al., arXiv:1906.04721, section 4.2). It costs nothing, since the bias stays float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from engines.errors import EngineError
from engines.graph.passes import drop_unused
from engines.graph.topology import Topology, attribute
from engines.graph.weights import IMAGE_OPS, add_constant, by_input, by_output, channel_counts, from_matrix, to_matrix

Floats = NDArray[np.float64]

_HOMOGENEOUS_OPS = {"Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool"}
_DIVISIBLE_OPS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}  # operators that can read x / divisor


def equalised_name(layer: str) -> str:
    """Return the name of the tensor that is observed for an equalised layer, and of the last node that makes it."""
    return f"{layer}.equalised"


def divided_name(layer: str) -> str:
    """Return the name of the same before the offset is subtracted."""
    return f"{layer}.divided"


def equalise(
    master: ModelProto, divisors: Mapping[str, Sequence[float]], offsets: Mapping[str, Sequence[float]]
) -> ModelProto:
    """Return the graph in which each named layer reads (x - offset) / divisor per channel; the master is not changed.

    divisors: per layer (channels,), positive.
    offsets: for some of these layers, (channels,).

    Raises EngineError (`plan.node`) for a node that cannot be equalised, or has another number of channels.
    """
    if not (divisors or offsets):
        return master
    model = deepcopy(master)
    topology = Topology(model)
    for node in topology.nodes:
        if node.name in divisors:
            divisor = np.asarray(divisors[node.name], np.float64)
            offset = np.asarray(offsets.get(node.name, np.zeros_like(divisor)), np.float64)
            _equalise(model, topology, node, divisor, offset)
    missing = (set(divisors) | set(offsets)) - {node.name for node in model.graph.node}
    if missing:
        raise _misfit(min(missing), "no node of that name")
    if set(offsets) - set(divisors):
        raise _misfit(min(set(offsets) - set(divisors)), "offsets alone")
    return drop_unused(model)


def can_divide(topology: Topology, layer: NodeProto) -> bool:
    """Return True if a layer's input can be divided per channel: constant weights, and channels that are an axis.

    A graph that already has the names of a division is left alone: plans refer to these names.
    """
    weight = topology.initializers.get(layer.input[1]) if layer.op_type in _DIVISIBLE_OPS else None
    if weight is None or weight.data_type != TensorProto.FLOAT:
        return False
    if layer.op_type == "MatMul" and len(weight.dims) != 2:
        return False
    names = {equalised_name(layer.name), divided_name(layer.name)}
    taken = any(node.name in names or names.intersection(node.output) for node in topology.nodes)
    transposed = layer.op_type == "Gemm" and bool(attribute(layer, "transA", 0))
    return not (taken or transposed or names & topology.initializers.keys() or names.intersection(topology.inputs))


def can_offset(topology: Topology, layer: NodeProto) -> bool:
    """Return True if a layer's bias can make up for an offset of its input: padding, which is zero, has no offset."""
    pads = attribute(layer, "pads", ())
    padded = any(pads) or attribute(layer, "auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID")  # type: ignore[arg-type]  # ONNX says ints
    plain = layer.op_type == "Conv" or (layer.op_type == "Gemm" and attribute(layer, "alpha", 1.0) == 1.0)
    return plain and not padded and can_divide(topology, layer) and takes_bias(topology, layer)


def is_free(topology: Topology, layer: NodeProto) -> bool:
    """Return True if the layer before can do the division, so that it costs nothing."""
    return _divider(topology, layer) is not None


def _equalise(model: ModelProto, topology: Topology, layer: NodeProto, divisor: Floats, offset: Floats) -> None:
    """Divide and offset the input of one layer, and change the weights and the layers before to match.

    Args:
        topology: Of the graph as the layers before have changed it.
        divisor: (channels,), positive.
        offset: (channels,), in the units of the input.
    """
    if not can_divide(topology, layer) or (offset.any() and not can_offset(topology, layer)):
        raise _misfit(layer.name, f"a {layer.op_type} whose input cannot be divided or offset")
    weight = numpy_helper.to_array(topology.initializers[layer.input[1]])
    channels, _ = channel_counts(layer, weight.shape)
    if divisor.shape != (channels,) or offset.shape != (channels,):
        raise _misfit(layer.name, f"{divisor.size} divisors and {offset.size} offsets for {channels} channels")
    if not (np.isfinite(divisor) & (divisor > 0.0) & np.isfinite(offset)).all():
        raise _misfit(layer.name, "a divisor that is not positive, or an offset that is not finite")
    matrix = to_matrix(layer, weight)
    divider = None if offset.any() else _divider(topology, layer)
    if offset.any():
        add_to_bias(model, topology, layer, (matrix * by_input(offset, matrix)).sum(axis=(2, 3)).ravel())
    if divider is not None:
        _divide_outputs(model, topology, divider, divisor)
        # The tensor that placement has observed for the layer lies in front of max pooling, which only moves values. It
        # gets a new name: under the old one a calibration has seen it undivided.
        tensor = layer.input[0]
        while topology.producers[tensor].op_type == "MaxPool":
            tensor = topology.producers[tensor].input[0]
        topology.rename(tensor, equalised_name(layer.name))
    else:
        _insert_operations(model, topology, layer, divisor, offset)
    multiplied = from_matrix(layer, matrix * by_input(divisor, matrix), weight.shape)
    layer.input[1] = add_constant(model, topology, f"{equalised_name(layer.name)}.weight", multiplied)


def _divider(topology: Topology, layer: NodeProto) -> NodeProto | None:
    """Return the layer that makes this layer's input for it alone, with only homogeneous operators between them."""
    tensor, reader = layer.input[0], layer
    while topology.sole_reader(tensor) is reader:
        producer = topology.producers.get(tensor)
        if producer is None or len(producer.output) != 1:
            return None
        if producer.op_type in ("Conv", "Gemm"):
            return producer if _makes_channels_of(topology, producer, layer) else None
        if producer.op_type not in _HOMOGENEOUS_OPS:
            return None
        tensor, reader = producer.input[0], producer
    return None


def _makes_channels_of(topology: Topology, producer: NodeProto, layer: NodeProto) -> bool:
    """Return True if each of a layer's input channels is an output of the producer, made with constant parameters."""
    weight = topology.initializers.get(producer.input[1])
    same_axis = (producer.op_type in IMAGE_OPS) == (layer.op_type in IMAGE_OPS)
    if weight is None or weight.data_type != TensorProto.FLOAT or not same_axis:
        return False
    _, made = channel_counts(producer, weight.dims)
    read, _ = channel_counts(layer, topology.initializers[layer.input[1]].dims)
    bias = producer.input[2] if len(producer.input) > 2 else ""
    return made == read and (not bias or (bias in topology.initializers and topology.initializers[bias].dims == [made]))


def _divide_outputs(model: ModelProto, topology: Topology, node: NodeProto, divisor: Floats) -> None:
    """Divide a layer's outputs per channel, through new initialisers: others may share the old ones."""
    weight = numpy_helper.to_array(topology.initializers[node.input[1]])
    matrix = to_matrix(node, weight)
    divided = from_matrix(node, matrix / by_output(divisor, matrix), weight.shape)
    node.input[1] = add_constant(model, topology, f"{node.name}.divided_weight", divided)
    if len(node.input) > 2 and node.input[2]:
        bias = (numpy_helper.to_array(topology.initializers[node.input[2]]) / divisor).astype(np.float32)
        node.input[2] = add_constant(model, topology, f"{node.name}.divided_bias", bias)


def _insert_operations(
    model: ModelProto, topology: Topology, layer: NodeProto, divisor: Floats, offset: Floats
) -> None:
    """Insert x * (1 / divisor) - offset / divisor; an Add alone if nothing is divided."""
    spatial = len(topology.initializers[layer.input[1]].dims) - 2
    shape = (1, -1, *[1] * spatial) if layer.op_type in IMAGE_OPS else (-1,)
    steps = [("Add", -offset / divisor)] if offset.any() else []
    if not steps or (divisor != 1.0).any():
        steps.insert(0, ("Mul", 1.0 / divisor))
    index = next(i for i, node in enumerate(model.graph.node) if node.name == layer.name)
    for number, (operator, values) in enumerate(steps):
        made = (equalised_name if number == len(steps) - 1 else divided_name)(layer.name)
        constant = add_constant(model, topology, f"{made}.constant", values.astype(np.float32).reshape(shape))
        node = helper.make_node(operator, [layer.input[0], constant], [made], name=made)
        model.graph.node.insert(index + number, node)
        topology.insert(model.graph.node[index + number], layer)


def _misfit(layer: str, found: str) -> EngineError:
    return EngineError(
        "plan.node", f"divisors for '{layer}': {found}", "layers of this model", "make the plan again for this model"
    )


def shift_biases(master: ModelProto, shifts: Mapping[str, Sequence[float]]) -> ModelProto:
    """Return the graph in which each named layer's outputs are less by a shift, (outputs,); the master is not changed.

    Raises EngineError (`plan.node`) for a node that accepts no bias, or has another number of outputs.
    """
    if not shifts:
        return master
    model = deepcopy(master)
    topology = Topology(model)
    for node in topology.nodes:
        if node.name in shifts:
            if not takes_bias(topology, node):
                raise _bias_misfit(node.name, f"a {node.op_type} that takes none")
            add_to_bias(model, topology, node, -np.asarray(shifts[node.name], np.float64))
    missing = set(shifts) - {node.name for node in topology.nodes}
    if missing:
        raise _bias_misfit(min(missing), "no node of that name")
    return model


def takes_bias(topology: Topology, node: NodeProto) -> bool:
    """Return True if a constant can be added to a layer's outputs, per channel, without another node."""
    weight = topology.initializers.get(node.input[1]) if node.op_type in ("Conv", "ConvTranspose", "Gemm") else None
    if weight is None or (node.op_type == "Gemm" and attribute(node, "beta", 1.0) != 1.0):
        return False
    bias = node.input[2] if len(node.input) > 2 else ""
    _, outputs = channel_counts(node, weight.dims)
    return not bias or (bias in topology.initializers and list(topology.initializers[bias].dims) == [outputs])


def add_to_bias(model: ModelProto, topology: Topology, node: NodeProto, values: NDArray[np.float64]) -> None:
    """Add values (outputs,) to the bias of a layer of the model, which gets one of its own; see `takes_bias`.

    topology: of the model. Raises EngineError `plan.node` where the layer has another number of outputs.
    """
    _, outputs = channel_counts(node, topology.initializers[node.input[1]].dims)
    if values.shape != (outputs,):
        raise _bias_misfit(node.name, f"{values.size} values for {outputs} outputs")
    if len(node.input) > 2 and node.input[2]:
        values = values + numpy_helper.to_array(topology.initializers[node.input[2]])
    node.input[:] = [*node.input[:2], add_constant(model, topology, f"{node.name}.bias", values.astype(np.float32))]


def _bias_misfit(layer: str, found: str) -> EngineError:
    return EngineError(
        "plan.node",
        f"a bias correction for '{layer}': {found}",
        "layers of this model that take a bias, with a value for each output",
        "make the plan again for this model",
    )
