"""Make tensors inside a graph visible as outputs, with the extremes of their channels; count the values of each."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from calibrate.repair import Extremes
from engines.errors import EngineError
from engines.graph.passes import standard_opset
from engines.graph.topology import Topology, fresh_name, is_float, tensor_types, types_for_image
from engines.graph.weights import IMAGE_OPS, channel_counts
from engines.interface import Array

_AXES_ARE_INPUTS = 18  # from this opset on ReduceMin and ReduceMax take their axes as an input


def expose(reference: ModelProto, taps: Sequence[str]) -> ModelProto:
    """Return the graph with the taps as further outputs, except those that are inputs or outputs already.

    Raises EngineError (`observer.tap`) for what is no float32 tensor of the graph.
    """
    graph = deepcopy(reference)
    types = tensor_types(reference)
    present = {value.name for value in (*graph.graph.input, *graph.graph.output)}
    for tap in taps:
        if not is_float(types, tap):
            raise EngineError(
                "observer.tap",
                f"tap '{tap}'",
                "a float32 tensor of the reference graph",
                "place the taps on this very graph",
            )
        if tap not in present:
            graph.graph.output.append(helper.make_tensor_value_info(tap, TensorProto.FLOAT, None))
    return graph


def element_counts(reference: ModelProto, input_shape: Sequence[int], taps: Sequence[str]) -> Mapping[str, int | None]:
    """Return the number of values in each tap for an input of a shape; None where ONNX cannot infer it."""
    types = types_for_image(reference, input_shape)
    shapes = {tap: types[tap].shape for tap in taps}
    return {
        tap: prod(size for size in shape if isinstance(size, int))
        if shape is not None and all(isinstance(size, int) for size in shape)
        else None
        for tap, shape in shapes.items()
    }


@dataclass(frozen=True)
class ExtremesOutput:
    """The one output of a graph that holds the extremes of what layers read.

    size: of all columns. columns: per layer its part of the least values, and of the largest ones, which follow them.
    """

    name: str
    size: int
    columns: Mapping[str, slice]

    def take_from(self, outputs: MutableMapping[str, Array]) -> dict[str, Extremes]:
        """Take the output away from a graph's others, and return the extremes by layer."""
        if not self.columns:
            return {}
        rows = outputs.pop(self.name).reshape(2, self.size).astype(np.float32, copy=False)
        return {layer: rows[:, part] for layer, part in self.columns.items()}


def expose_extremes(reference: ModelProto, layers: Sequence[str]) -> tuple[ModelProto, ExtremesOutput]:
    """Return the graph with one more output: the extremes of each channel that these layers read, over all else.

    layers: names of convolutions and matrix products with constant weights. Those that read one tensor share its
        extremes. Without layers the graph is returned as it is.
    """
    if not layers:
        return reference, ExtremesOutput("", 0, {})
    graph = deepcopy(reference)
    topology = Topology(graph)
    writer = _ExtremesWriter(graph, topology)
    wanted = set(layers)
    columns = {node.name: writer.columns(node) for node in topology.nodes if node.name in wanted}
    name = writer.finish()
    return graph, ExtremesOutput(name, writer.size, columns)


class _ExtremesWriter:
    """Appends nodes that reduce what layers read. size: channels so far."""

    def __init__(self, graph: ModelProto, topology: Topology) -> None:
        self.size = 0
        self._graph = graph
        self._topology = topology
        self._taken = {*topology.inputs, *topology.initializers, *topology.producers, *topology.pinned}
        self._taken.update(node.name for node in topology.nodes)
        self._parts: dict[tuple[str, bool], slice] = {}
        self._made: dict[str, list[str]] = {"ReduceMin": [], "ReduceMax": []}
        self._axes_are_inputs = standard_opset(graph) >= _AXES_ARE_INPUTS

    def columns(self, layer: NodeProto) -> slice:
        """Return the columns of what a layer reads, which is reduced once for all its readers."""
        is_image = layer.op_type in IMAGE_OPS
        key = layer.input[0], is_image
        if key not in self._parts:
            weight = self._topology.initializers[layer.input[1]]
            channels, _ = channel_counts(layer, weight.dims)
            tensor, axes = layer.input[0], [0, *range(2, len(weight.dims))]
            if not is_image:  # a matrix of any rank, with the channels last
                rows = self._constant(np.array([-1, channels], np.int64))
                tensor, axes = self._node("Reshape", [tensor, rows]), [0]
            for operator, made in self._made.items():
                made.append(self._reduced(operator, tensor, axes))
            self._parts[key] = slice(self.size, self.size + channels)
            self.size += channels
        return self._parts[key]

    def finish(self) -> str:
        """Join all that was reduced in one output, (2 * size,), the least values first; return its name."""
        name = self._node("Concat", [*self._made["ReduceMin"], *self._made["ReduceMax"]], axis=0)
        self._graph.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [2 * self.size]))
        return name

    def _reduced(self, operator: str, tensor: str, axes: list[int]) -> str:
        if self._axes_are_inputs:
            return self._node(operator, [tensor, self._constant(np.array(axes, np.int64))], keepdims=0)
        return self._node(operator, [tensor], axes=axes, keepdims=0)

    def _constant(self, value: Array) -> str:
        name = fresh_name("extremes.constant", self._taken)
        self._graph.graph.initializer.append(numpy_helper.from_array(value, name))
        return name

    def _node(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        name = fresh_name(f"extremes.{operator}.{len(self._graph.graph.node)}", self._taken)
        self._graph.graph.node.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name
