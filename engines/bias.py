"""Bias correction: what quantisation moves the mean of a layer's outputs by is taken back in its bias.

Nagel et al., arXiv:1906.04721, section 4.2. It costs nothing: the bias stays float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from engines.backend import EngineError
from engines.layer_weights import add_constant, channel_counts
from engines.topology import Topology, attribute


def shift_biases(master: ModelProto, shifts: Mapping[str, Sequence[float]]) -> ModelProto:
    """The graph in which each layer named gives its outputs less a shift, (outputs,); the master is not changed.

    Raises EngineError `plan.node` for what is no layer that takes a bias, or has another number of outputs.
    """
    if not shifts:
        return master
    model = ModelProto()
    model.CopyFrom(master)
    topology = Topology(model)
    for node in topology.nodes:
        if node.name in shifts:
            if not takes_bias(topology, node):
                raise _misfit(node.name, f"a {node.op_type} that takes none")
            add_to_bias(model, topology, node, -np.asarray(shifts[node.name], np.float64))
    missing = set(shifts) - {node.name for node in topology.nodes}
    if missing:
        raise _misfit(min(missing), "no node of that name")
    return model


def takes_bias(topology: Topology, node: NodeProto) -> bool:
    """Whether a constant can be added to a layer's outputs, per channel, without another node."""
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
        raise _misfit(node.name, f"{values.size} values for {outputs} outputs")
    if len(node.input) > 2 and node.input[2]:
        values = values + numpy_helper.to_array(topology.initializers[node.input[2]])
    node.input[:] = [*node.input[:2], add_constant(model, topology, f"{node.name}.bias", values.astype(np.float32))]


def _misfit(layer: str, found: str) -> EngineError:
    return EngineError(
        "plan.node",
        f"a bias correction for '{layer}': {found}",
        "layers of this model that take a bias, with a value for each output",
        "make the plan anew for this model",
    )
