"""The float16 form of a graph: every tensor has its type written into the graph, casts included.

TensorRT builds such a graph strongly typed: nothing is left to its heuristics, and the graph can be run and
compared elsewhere. Which nodes compute in float16 is decided in engines/half_types.py; here it is written.

An activation is quantised once, in the type in which it is made, and dequantised in each type that its readers
compute in: no Cast then separates a convolution from its Q/DQ pair, as TensorRT's fusion demands (NVIDIA, TensorRT
developer guide, "Working with quantized types").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from engines.backend import EngineError
from engines.half_types import FLOAT, HALF, HalfTypes
from engines.passes import constants_to_initializers, name_nodes, raise_opset, standard_opset
from engines.ranges import HALF_MAX, QDQ_OPS, scale_fits
from engines.topology import Topology, all_nodes

MIN_OPSET = 19  # the first whose Q/DQ takes float16 scales
MIN_IR_VERSION = 9  # that of opset 19


@dataclass(frozen=True)
class HalfForm:
    """model: the typed graph. floats: name of each node that computes in float32 -> the reason in plain words.

    Q/DQ nodes, and nodes without float tensors, are not in `floats`.
    """

    model: ModelProto
    floats: Mapping[str, str]


def half_precision(graph: ModelProto, amax: Mapping[str, float]) -> HalfForm:
    """The float16 form of a master graph, with or without Q/DQ; the graph itself is not changed.

    amax: the largest |x| measured, by name of the tensor in the master; of all tensors, of some, or of none. Inputs
    and outputs stay float32, and nodes and tensors keep their names, save that a tensor that must stay float32 under
    its own name (output, captured by control flow) is `NAME.half` before. INT8 scales of activations are rounded to
    float16 values in both types. Raises EngineError: `model.opset` (Q/DQ that cannot be raised to opset 19),
    `model.half` (a form that ONNX's type inference refuses).
    """
    model = ModelProto()
    model.CopyFrom(graph)
    if any(node.op_type in QDQ_OPS for node in model.graph.node):
        model = _with_half_scales(model)
        _round_scales(model)
    types = HalfTypes(model, amax)
    written = _Writer(model, types).write()
    try:
        onnx.checker.check_model(written, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineError(
            "model.half", str(error), "a graph whose float16 form is valid", "build it in fp32, and report the model"
        ) from error
    in_order = [node.name for node in model.graph.node if node.name in types.floats]
    return HalfForm(written, {name: types.floats[name] for name in in_order})


def _with_half_scales(model: ModelProto) -> ModelProto:
    """A graph with Q/DQ in an opset that defines them for float16."""
    if standard_opset(model) >= MIN_OPSET:
        return model
    raised = raise_opset(model, MIN_OPSET, ", or build it in fp32: INT8 with float16 needs that opset")
    raised = name_nodes(constants_to_initializers(raised))
    raised.ir_version = max(raised.ir_version, MIN_IR_VERSION)
    return raised


def _round_scales(model: ModelProto) -> None:
    """Give activations scales that float16 holds exactly: Q and DQ then agree, whatever their types."""
    topology = Topology(model)
    quantisers = [node for node in topology.nodes if node.op_type == "QuantizeLinear"]
    readers = [reader for node in quantisers for reader, _ in topology.readers(node.output[0])]
    for name in {node.input[1] for node in (*quantisers, *readers)} & topology.initializers.keys():
        tensor = topology.initializers[name]
        scale = numpy_helper.to_array(tensor)
        if scale_fits(scale):
            tensor.CopyFrom(numpy_helper.from_array(scale.astype(np.float16).astype(np.float32), name))


class _Writer:
    """One rewriting of one graph: each tensor in the types in which it is read."""

    def __init__(self, model: ModelProto, types: HalfTypes) -> None:
        self.model = model
        self.types = types
        self.topology = types.topology
        self.nodes: list[NodeProto] = []
        self.written = {(name, FLOAT) for name in self.topology.inputs}
        self.read: dict[str, set[int]] = {name: {FLOAT} for name in self.topology.pinned}
        for node in reversed(self.topology.nodes):
            for _, name, elem_type in self._reads(node):
                self.read.setdefault(name, set()).add(elem_type)
        every = all_nodes(model.graph)
        self.taken = {name for node in every for name in (node.name, *node.input, *node.output)} | self.topology.pinned
        self.names: dict[tuple[str, int], str] = {}

    def write(self) -> ModelProto:
        graph = self.model.graph
        for node in self.topology.nodes:
            if node.op_type != "DequantizeLinear":
                self._write(node)
            elif node.output[0] in self.topology.pinned:  # the others are written for their readers
                self._in_type(node.output[0], FLOAT)
        constants = [constant for tensor in graph.initializer for constant in self._constants(tensor)]
        del graph.node[:]
        graph.node.extend(self.nodes)
        del graph.initializer[:]
        graph.initializer.extend(constants)
        for value in graph.value_info:
            if self.types.is_float(value.name):
                value.type.tensor_type.elem_type = self._own_type(value.name)
        return self.model

    def _reads(self, node: NodeProto) -> list[tuple[int, str, int]]:
        """As `HalfTypes.reads`, Q/DQ included: a scale has the type of its float side."""
        if node.op_type == "QuantizeLinear":
            made = self.types.made.get(node.input[0], FLOAT)
            return [(0, node.input[0], made), (1, node.input[1], made)]
        if node.op_type == "DequantizeLinear":
            return [(1, node.input[1], elem_type) for elem_type in sorted(self.read[node.output[0]])]
        return self.types.reads(node)

    def _own_type(self, name: str) -> int:
        """The type that has the tensor's own name: float32 where others rely on it, else the one it is made in."""
        if name in self.topology.pinned:
            return FLOAT
        return self.types.made.get(name, HALF if HALF in self.read.get(name, ()) else FLOAT)

    def _name(self, name: str, elem_type: int) -> str:
        if elem_type == self._own_type(name):
            return name
        if (name, elem_type) not in self.names:
            self.names[name, elem_type] = self._fresh(f"{name}.{'half' if elem_type == HALF else 'float'}")
        return self.names[name, elem_type]

    def _fresh(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def _write(self, node: NodeProto) -> None:
        copy = NodeProto()
        copy.CopyFrom(node)
        for index, name, elem_type in self._reads(node):
            copy.input[index] = self._in_type(name, elem_type)
        for index, name in enumerate(node.output):
            if self.types.is_float(name):
                made = self.types.made[name]
                copy.output[index] = self._name(name, made)
                self.written.add((name, made))
                if node.op_type == "Cast":
                    copy.attribute[0].i = made
        self.nodes.append(copy)
        for name in filter(self.types.is_float, node.output):
            if name in self.topology.pinned:
                self._in_type(name, FLOAT)

    def _in_type(self, name: str, elem_type: int) -> str:
        """The name of a tensor in a type; the first time, a DequantizeLinear or a Cast makes it."""
        wanted = self._name(name, elem_type)
        if (name, elem_type) in self.written or name in self.topology.initializers:
            return wanted
        self.written.add((name, elem_type))
        maker = self.topology.producers.get(name)
        if maker is not None and maker.op_type == "DequantizeLinear":
            node = NodeProto()
            node.CopyFrom(maker)
            node.name = maker.name if wanted == name else self._fresh(f"{maker.name}.float")
            node.input[1] = self._in_type(maker.input[1], elem_type)
            node.output[0] = wanted
        else:
            source = self._name(name, HALF if elem_type == FLOAT else FLOAT)
            node = helper.make_node("Cast", [source], [wanted], self._fresh(f"{name}.cast"), to=elem_type)
        self.nodes.append(node)
        return wanted

    def _constants(self, tensor: TensorProto) -> Iterator[TensorProto]:
        """An initialiser in each type in which it is read."""
        if tensor.data_type != FLOAT:
            yield tensor
            return
        values = numpy_helper.to_array(tensor)
        for elem_type in sorted(self.read.get(tensor.name, ())):
            name = self._name(tensor.name, elem_type)
            if elem_type == FLOAT:
                yield numpy_helper.from_array(values, name)
            else:  # only limits of Clip lie beyond float16; infinities stay
                finite = np.where(np.isinf(values), values, values.clip(-HALF_MAX, HALF_MAX))
                yield numpy_helper.from_array(finite.astype(np.float16), name)
