"""Write the float16 form of a graph: `half_precision`.

HalfTypes decides which nodes compute in float16, `_Writer` writes each tensor in the types in which it is read. A node
computes in float16 unless there is a reason:

1. Range: the values it reads or makes are out of float16's reach (`engines.half.ranges`).
2. Arithmetic that loses too much: exponentials, normalisations, sums of squares, sampling coordinates.
3. Decoding: past the last convolution or matrix product, from the first arithmetic on. A box coordinate of 640 has
   steps of 0.5 in float16.
4. No image: it computes from shapes and constants alone, counts and grids.
5. Definition: ONNX does not define it for float16, or not at all; control flow, with all it reads.
6. Islands: it lies between nodes that compute in float32, where casting there and back would only lose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from engines.errors import EngineError
from engines.graph.passes import constants_to_initializers, name_nodes, raise_opset, standard_opset
from engines.graph.topology import (
    COMPUTE_OPS,
    MOVEMENT_OPS,
    QDQ_OPS,
    Topology,
    all_nodes,
    captured_names,
    fresh_name,
    is_float,
    replace_items,
    replace_nodes,
    subgraphs,
    tensor_types,
)
from engines.half.ranges import HALF_MAX, beyond_half, scale_fits

MIN_OPSET = 19  # the first whose Q/DQ takes float16 scales
MIN_IR_VERSION = 9  # that of opset 19
HALF, FLOAT = int(TensorProto.FLOAT16), int(TensorProto.FLOAT)

_SENSITIVE_OPS = {
    "Softmax", "LogSoftmax", "LayerNormalization", "InstanceNormalization", "GroupNormalization", "RMSNormalization",
    "MeanVarianceNormalization", "LpNormalization", "LRN", "Exp", "Log", "Pow", "Sqrt", "Reciprocal", "Sinh", "Cosh",
    "Sin", "Cos", "Tan", "ReduceSum", "ReduceSumSquare", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceProd", "CumSum", "LpPool", "GlobalLpPool", "GridSample", "RoiAlign", "MaxRoiPool", "Det", "LSTM", "GRU",
    "RNN",
}  # fmt: skip
_ACTIVATION_OPS = {
    "Relu", "LeakyRelu", "PRelu", "ThresholdedRelu", "Clip", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "Tanh",
    "Softsign", "Softplus",
}  # fmt: skip
_EITHER_TYPE_OPS = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero", "Cast"}  # no cast is inserted for them
_TAIL_OPS = MOVEMENT_OPS | _ACTIVATION_OPS | _EITHER_TYPE_OPS | {
    "Identity", "Expand", "Tile", "Where", "GatherElements", "GatherND", "TopK", "GlobalMaxPool", "ReduceMax",
    "ReduceMin", "Max", "Min", "CenterCropPad", "Trilu",
}  # fmt: skip
_PRODUCT_OPS = COMPUTE_OPS | {"Einsum", "Attention", "RNN", "LSTM", "GRU"}


@dataclass(frozen=True)
class HalfForm:
    """Hold the float16 form of a graph.

    Q/DQ nodes, and nodes without float tensors, are not in `float32`.

    Args:
        float32: Name of each node that computes in float32 -> the reason in plain words.
    """

    model: ModelProto
    float32: Mapping[str, str]


def half_precision(graph: ModelProto, amax: Mapping[str, float]) -> HalfForm:
    """Return the float16 form of a master graph, with or without Q/DQ; the graph itself is not changed.

    amax: the largest |x| measured, by name of the tensor in the master; of all tensors, of some, or of none.

    Inputs and outputs stay float32, and nodes and tensors keep their names. Only a tensor that must be float32 under
    its own name (an output, or captured by control flow) is `NAME.half` first. INT8 scales of activations are rounded
    to float16 values in both types.

    Raises EngineError:
        model.opset  Q/DQ that cannot be raised to opset 19
        model.half   a form that ONNX's type inference refuses
    """
    model = deepcopy(graph)
    if any(node.op_type in QDQ_OPS for node in model.graph.node):
        if standard_opset(model) < MIN_OPSET:
            model = raise_opset(model, MIN_OPSET, ", or build it in fp32: INT8 with float16 needs that opset")
            model = name_nodes(constants_to_initializers(model))
            model.ir_version = max(model.ir_version, MIN_IR_VERSION)
        _round_scales(model)
    types = HalfTypes(model, amax)
    written = _Writer(model, types).write()
    try:
        onnx.checker.check_model(written, full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise EngineError(
            "model.half", str(error), "a graph whose float16 form is valid", "build it in fp32, and report the model"
        ) from error
    in_order = [node.name for node in model.graph.node if node.name in types.float32]
    return HalfForm(written, {name: types.float32[name] for name in in_order})


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


class HalfTypes:
    """The decision: which nodes compute in float32, and the type in which a node reads and makes each float tensor."""

    def __init__(self, model: ModelProto, amax: Mapping[str, float]) -> None:
        self.topology = Topology(model)
        self.types = tensor_types(model)
        self.opset = standard_opset(model)
        self.float32: dict[str, str] = {}
        image, tail, ranges = self._image_tensors(), self._tail(), beyond_half(model, amax)
        for node in self.topology.nodes:
            if node.op_type not in QDQ_OPS and self._is_typed(node):
                makers = [self.topology.producers[name] for name in node.input if name in self.topology.producers]
                decodes = node.op_type not in _TAIL_OPS or any(maker.name in self.float32 for maker in makers)
                reason = self._reason(node, image)
                if reason is None and node.name in tail and decodes:
                    reason = "decoding: past the last convolution or matrix product"
                reason = reason or ranges.get(node.name)
                if reason is not None:
                    self.float32[node.name] = reason
        self._join_islands()
        self.made: dict[str, int] = dict.fromkeys(self.topology.inputs, FLOAT)
        for node in self.topology.nodes:
            if node.op_type not in QDQ_OPS:
                for _, name, variable in self._floats(node, "output"):
                    self.made[name] = self._type(node, variable)

    def is_float(self, name: str) -> bool:
        return is_float(self.types, name)

    def reads(self, node: NodeProto) -> list[tuple[int, str, int]]:
        """Return (input index, tensor, type) for every float32 tensor that a node, no Q or DQ, reads."""
        either = node.op_type in _EITHER_TYPE_OPS
        return [
            (index, name, self.made.get(name, FLOAT) if either else self._type(node, variable))
            for index, name, variable in self._floats(node, "input")
        ]

    def _floats(self, node: NodeProto, side: str) -> list[tuple[int, str, str]]:
        """Return (index, tensor, type variable) for every float32 tensor on a side of a node, "input" or "output".

        The variable is "" if there is no schema.
        """
        schema = self._schema(node)
        parameters = getattr(schema, f"{side}s") if schema else ()
        last = len(parameters) - 1  # may be variadic
        return [
            (index, name, parameters[min(index, last)].type_str if parameters else "")
            for index, name in enumerate(getattr(node, side))
            if self.is_float(name)
        ]

    def _schema(self, node: NodeProto) -> onnx.defs.OpSchema | None:
        try:
            return onnx.defs.get_schema(node.op_type, self.opset, "" if node.domain == "ai.onnx" else node.domain)
        except onnx.defs.SchemaError:
            return None

    def _type(self, node: NodeProto, variable: str) -> int:
        """Return the type that a type variable of a node stands for."""
        return HALF if node.name not in self.float32 and variable in self._variables(node) else FLOAT

    def _variables(self, node: NodeProto) -> set[str]:
        """Return the type variables that become float16: of the results, or of the operands if there are none.

        Others stay: the scales of Resize are float32 by definition, its region of interest holds coordinates.
        """
        operands = {variable for *_, variable in self._floats(node, "input")}
        results = {variable for *_, variable in self._floats(node, "output")}
        return operands | results if node.op_type == "BatchNormalization" else results or operands

    def _is_typed(self, node: NodeProto) -> bool:
        """Return True if a node reads or makes float tensors, and does not accept either type."""
        return any(map(self.is_float, node.output)) or (
            any(map(self.is_float, node.input)) and node.op_type not in _EITHER_TYPE_OPS
        )

    def _reason(self, node: NodeProto, image: set[str]) -> str | None:
        schema = self._schema(node)
        if any(True for _ in subgraphs(node)):
            return "control flow: its bodies are written in float32"
        if schema is None or any(name and self._unknown(name) for name in (*node.input, *node.output)):
            return "ONNX does not declare its types"
        if not image.intersection(node.input):
            return "it computes from shapes and constants, not from the image"
        if node.op_type in _SENSITIVE_OPS:
            return f"{node.op_type} loses too much in float16"
        if node.op_type == "Mul" and node.input[0] == node.input[1]:
            return "squares leave float16's range first"
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        operands = {variable for *_, variable in self._floats(node, "input")}
        for variable in self._variables(node):
            made_up = variable not in operands and node.op_type != "Cast"
            if made_up or "tensor(float16)" not in allowed.get(variable, ()):
                return f"ONNX does not define {node.op_type} for float16 here"
        return None

    def _unknown(self, name: str) -> bool:
        return name not in self.types or self.types[name].elem_type == TensorProto.UNDEFINED

    def _image_tensors(self) -> set[str]:
        """Return the tensors that hold values of the image, or made from them; counts and comparisons are none.

        INT8 weights count too: what transposes them has the type of the product that reads them.
        """
        dequantised = (node.output[0] for node in self.topology.nodes if node.op_type == "DequantizeLinear")
        found = {*self.topology.inputs, *dequantised}
        counts = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
        for node in self.topology.nodes:
            if found.intersection({*node.input, *captured_names(node)}):
                found.update(
                    name for name in node.output if self._unknown(name) or self.types[name].elem_type not in counts
                )
        return found

    def _tail(self) -> set[str]:
        """Return the nodes that are no convolution or matrix product, and from which none can be reached."""
        feeding: set[str] = set()
        tail = set()
        for node in reversed(self.topology.nodes):
            bodies = [inner for body in subgraphs(node) for inner in all_nodes(body)]
            product = any(candidate.op_type in _PRODUCT_OPS for candidate in (node, *bodies))
            if product or feeding.intersection(node.output):
                feeding.update(node.input, captured_names(node))
            else:
                tail.add(node.name)
        return tail

    def _join_islands(self) -> None:
        """Make a node float32 if all its readers accept float32 and all its makers give it (reason 6)."""
        joining = {"QuantizeLinear", *_EITHER_TYPE_OPS}
        candidates = set()
        for node in reversed(self.topology.nodes):
            readers = [reader for name in node.output for reader, _ in self.topology.readers(name)]
            ready = all(r.name in self.float32 or r.name in candidates or r.op_type in joining for r in readers)
            if ready and self._is_typed(node) and node.op_type not in QDQ_OPS | _PRODUCT_OPS:
                candidates.add(node.name)
        for node in self.topology.nodes:
            if node.name not in candidates or node.name in self.float32:
                continue
            inputs = [name for name in node.input if self.is_float(name) and name not in self.topology.initializers]
            makers = [self.topology.producers.get(name) for name in inputs]  # None: the graph's input
            if all(maker is None or maker.name in self.float32 for maker in makers):
                self.float32[node.name] = "it is between tensors that are float32"


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
        constants = (constant for tensor in graph.initializer for constant in self._constants(tensor))
        replace_items(graph.initializer, constants)
        for value in graph.value_info:
            if self.types.is_float(value.name):
                value.type.tensor_type.elem_type = self._own_type(value.name)
        return replace_nodes(self.model, self.nodes)

    def _reads(self, node: NodeProto) -> list[tuple[int, str, int]]:
        """Return what `HalfTypes.reads` does, Q/DQ included: a scale has the type of its float side."""
        if node.op_type == "QuantizeLinear":
            made = self.types.made.get(node.input[0], FLOAT)
            return [(0, node.input[0], made), (1, node.input[1], made)]
        if node.op_type == "DequantizeLinear":
            return [(1, node.input[1], elem_type) for elem_type in sorted(self.read[node.output[0]])]
        return self.types.reads(node)

    def _own_type(self, name: str) -> int:
        """Return the type that has the tensor's own name: float32 if others rely on it, else the one it is made in."""
        if name in self.topology.pinned:
            return FLOAT
        return self.types.made.get(name, HALF if HALF in self.read.get(name, ()) else FLOAT)

    def _name(self, name: str, elem_type: int) -> str:
        if elem_type == self._own_type(name):
            return name
        if (name, elem_type) not in self.names:
            self.names[name, elem_type] = fresh_name(f"{name}.{'half' if elem_type == HALF else 'float'}", self.taken)
        return self.names[name, elem_type]

    def _write(self, node: NodeProto) -> None:
        copy = deepcopy(node)
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
        """Return the name of a tensor in a type; the first time, write the DequantizeLinear or Cast that makes it."""
        typed = self._name(name, elem_type)
        if (name, elem_type) in self.written or name in self.topology.initializers:
            return typed
        self.written.add((name, elem_type))
        maker = self.topology.producers.get(name)
        if maker is not None and maker.op_type == "DequantizeLinear":
            node = deepcopy(maker)
            node.name = maker.name if typed == name else fresh_name(f"{maker.name}.float", self.taken)
            node.input[1] = self._in_type(maker.input[1], elem_type)
            node.output[0] = typed
        else:
            source = self._name(name, HALF if elem_type == FLOAT else FLOAT)
            node = helper.make_node("Cast", [source], [typed], fresh_name(f"{name}.cast", self.taken), to=elem_type)
        self.nodes.append(node)
        return typed

    def _constants(self, tensor: TensorProto) -> Iterator[TensorProto]:
        """Yield an initialiser in each type in which it is read."""
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
