"""Which nodes of a graph compute in float16, which do not, and why not.

A node computes in float16 unless there is a reason:

- the values it reads or makes are out of float16's reach (`engines.ranges`);
- its arithmetic loses too much: exponentials, normalisations, sums of squares, sampling coordinates;
- it decodes: past the last convolution or matrix product, from the first arithmetic on. A box coordinate of 640
  has steps of 0.5 in float16;
- it computes from shapes and constants alone: counts and grids, no image values;
- ONNX does not define it for float16, or not at all; control flow, with all it reads;
- it lies between nodes that compute in float32: casting there and back would only lose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import ModelProto, NodeProto, TensorProto

from engines.operators import MOVEMENT_OPS
from engines.passes import standard_opset
from engines.placement import COMPUTE_OPS
from engines.ranges import QDQ_OPS, beyond_half
from engines.topology import Topology, all_nodes, subgraphs, tensor_types

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
_AS_THEY_COME = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero", "Cast"}  # take either type: no cast for their sake
_TAIL_OPS = MOVEMENT_OPS | _ACTIVATION_OPS | _AS_THEY_COME | {
    "Identity", "Expand", "Tile", "Where", "GatherElements", "GatherND", "TopK", "GlobalMaxPool", "ReduceMax",
    "ReduceMin", "Max", "Min", "CenterCropPad", "Trilu",
}  # fmt: skip
_PRODUCT_OPS = COMPUTE_OPS | {"Einsum", "Attention", "RNN", "LSTM", "GRU"}


class HalfTypes:
    """Which nodes compute in float32, and in which type a node reads and makes each float32 tensor of the graph."""

    def __init__(self, model: ModelProto, amax: Mapping[str, float]) -> None:
        self.topology = Topology(model)
        self.types = tensor_types(model)
        self.opset = standard_opset(model)
        self.floats: dict[str, str] = {}
        image, tail, ranges = self._image_tensors(), self._tail(), beyond_half(model, amax)
        for node in self.topology.nodes:
            if node.op_type not in QDQ_OPS and self._decides(node):
                reason = self._reason(node, image)
                if reason is None and node.name in tail and self._decodes(node):
                    reason = "decoding: past the last convolution or matrix product"
                reason = reason or ranges.get(node.name)
                if reason is not None:
                    self.floats[node.name] = reason
        self._join_islands()
        self.made: dict[str, int] = dict.fromkeys(self.topology.inputs, FLOAT)
        for node in self.topology.nodes:
            if node.op_type not in QDQ_OPS:
                for name, parameter in _formal(node.output, self._schema(node), "outputs"):
                    if self.is_float(name):
                        self.made[name] = self._type(node, parameter)

    def is_float(self, name: str) -> bool:
        return name in self.types and self.types[name].elem_type == FLOAT

    def reads(self, node: NodeProto) -> list[tuple[int, str, int]]:
        """(input index, tensor, type) for every float32 tensor that a node, no Q or DQ, reads."""
        found = []
        for index, (name, parameter) in enumerate(_formal(node.input, self._schema(node), "inputs")):
            if self.is_float(name):
                as_it_comes = self.made.get(name, FLOAT) if node.op_type in _AS_THEY_COME else None
                found.append((index, name, as_it_comes or self._type(node, parameter)))
        return found

    def _schema(self, node: NodeProto) -> onnx.defs.OpSchema | None:
        try:
            return onnx.defs.get_schema(node.op_type, self.opset, "" if node.domain == "ai.onnx" else node.domain)
        except onnx.defs.SchemaError:
            return None

    def _type(self, node: NodeProto, parameter: str) -> int:
        """The type of one parameter of a node, by its type variable."""
        if node.name in self.floats:
            return FLOAT
        return HALF if parameter in self._variables(node) else FLOAT

    def _variables(self, node: NodeProto) -> set[str]:
        """The type variables that become float16: those of the results, or of the operands where there are none.

        Others stay: the scales of Resize are float32 by definition, its region of interest holds coordinates.
        """
        schema = self._schema(node)
        operands = {parameter for name, parameter in _formal(node.input, schema, "inputs") if self.is_float(name)}
        results = {parameter for name, parameter in _formal(node.output, schema, "outputs") if self.is_float(name)}
        return operands | results if node.op_type == "BatchNormalization" else results or operands

    def _decides(self, node: NodeProto) -> bool:
        """Float tensors are at stake, and the node does not just take them as they come."""
        return any(map(self.is_float, node.output)) or (
            any(map(self.is_float, node.input)) and node.op_type not in _AS_THEY_COME
        )

    def _reason(self, node: NodeProto, image: set[str]) -> str | None:
        schema = self._schema(node)
        if any(True for _ in subgraphs(node)):
            return "control flow: its bodies are written in float32"
        if schema is None or any(name and self._unknown(name) for name in (*node.input, *node.output)):
            return "ONNX does not tell its types"
        if not image.intersection(node.input):
            return "it computes from shapes and constants, not from the image"
        if node.op_type in _SENSITIVE_OPS:
            return f"{node.op_type} loses too much in float16"
        if node.op_type == "Mul" and node.input[0] == node.input[1]:
            return "squares leave float16's range first"
        allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
        operands = {parameter for _, parameter in _formal(node.input, schema, "inputs")}
        for variable in self._variables(node):
            made_up = variable not in operands and node.op_type != "Cast"
            if made_up or "tensor(float16)" not in allowed.get(variable, ()):
                return f"ONNX does not define {node.op_type} for float16 here"
        return None

    def _unknown(self, name: str) -> bool:
        return name not in self.types or self.types[name].elem_type == TensorProto.UNDEFINED

    def _image_tensors(self) -> set[str]:
        """Tensors that hold values of the image, or made from them; what was counted or compared is none.

        INT8 weights count too: what transposes them has the type of the product that reads them.
        """
        dequantised = (node.output[0] for node in self.topology.nodes if node.op_type == "DequantizeLinear")
        found = {*self.topology.inputs, *dequantised}
        counts = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
        for node in self.topology.nodes:
            if found.intersection(_all_reads(node)):
                found.update(
                    name for name in node.output if self._unknown(name) or self.types[name].elem_type not in counts
                )
        return found

    def _tail(self) -> set[str]:
        """Nodes from which no convolution or matrix product can be reached, and that are none."""
        feeding: set[str] = set()
        tail = set()
        for node in reversed(self.topology.nodes):
            bodies = [inner for body in subgraphs(node) for inner in all_nodes(body)]
            product = any(candidate.op_type in _PRODUCT_OPS for candidate in (node, *bodies))
            if product or feeding.intersection(node.output):
                feeding.update(_all_reads(node))
            else:
                tail.add(node.name)
        return tail

    def _decodes(self, node: NodeProto) -> bool:
        makers = [self.topology.producers[name] for name in node.input if name in self.topology.producers]
        return node.op_type not in _TAIL_OPS or any(maker.name in self.floats for maker in makers)

    def _join_islands(self) -> None:
        """Float32 for what all its readers take in float32, or either way, and all its makers give in float32."""
        joining = {"QuantizeLinear", *_AS_THEY_COME}
        candidates = set()
        for node in reversed(self.topology.nodes):
            readers = [reader for name in node.output for reader, _ in self.topology.readers(name)]
            ready = all(r.name in self.floats or r.name in candidates or r.op_type in joining for r in readers)
            if ready and self._decides(node) and node.op_type not in (*QDQ_OPS, *_PRODUCT_OPS):
                candidates.add(node.name)
        for node in self.topology.nodes:
            if node.name not in candidates or node.name in self.floats:
                continue
            inputs = [name for name in node.input if self.is_float(name) and name not in self.topology.initializers]
            makers = [self.topology.producers.get(name) for name in inputs]  # None: the graph's input
            if all(maker is None or maker.name in self.floats for maker in makers):
                self.floats[node.name] = "it lies between tensors that are float32"


def _formal(names: Sequence[str], schema: onnx.defs.OpSchema | None, side: str) -> list[tuple[str, str]]:
    """Tensors of a node with the type variables of their parameters; "" where there is no schema."""
    parameters = getattr(schema, side) if schema else ()
    last = len(parameters) - 1  # may be variadic
    return [(name, parameters[min(i, last)].type_str if parameters else "") for i, name in enumerate(names)]


def _all_reads(node: NodeProto) -> set[str]:
    """The inputs of a node, and what its bodies capture."""
    inner = [(body, candidate) for body in subgraphs(node) for candidate in all_nodes(body)]
    return {
        *node.input,
        *(name for _, candidate in inner for name in candidate.input),
        *(o.name for body, _ in inner for o in body.output),
    }
