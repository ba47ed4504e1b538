"""Look up who makes and who reads every tensor of a graph, of which type it is, and what its operators do.

Passes and rules consult Topology and the families of operators: which multiply weights (COMPUTE_OPS), work element by
element (ELEMENTWISE_OPS), only move values (MOVEMENT_OPS) or average them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import onnx
from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

Item = TypeVar("Item", bound=Message)
Dim = int | str | None  # a size, the name of an open dimension, or unknown

QUANTISE, DEQUANTISE = "QuantizeLinear", "DequantizeLinear"
COMPUTE_OPS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
ELEMENTWISE_OPS = {
    "Relu", "LeakyRelu", "PRelu", "Clip", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "HardSwish",
    "Mish", "Tanh", "Softplus", "Softsign", "Gelu", "Erf", "Add", "Sub", "Mul", "Div", "BatchNormalization",
}  # fmt: skip
MOVEMENT_OPS = {
    "Concat", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split",
    "Gather", "Pad", "Resize", "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
QDQ_OPS = {QUANTISE, DEQUANTISE}
AVERAGE_OPS = {"AveragePool", "GlobalAveragePool", "ReduceMean"}


@dataclass(frozen=True)
class TensorType:
    """ONNX element type (`TensorProto.FLOAT`, ...) and shape; None when even the rank is unknown."""

    elem_type: int
    shape: tuple[Dim, ...] | None


class Topology:
    """Built from a model once; a later change to the model shows only if it is made by `rename`, `insert` or
    `engines.graph.weights.add_constant`.

    nodes: topologically sorted, as ONNX demands of a graph.
    producers: the node that makes a tensor; graph inputs and initialisers have none.
    consumers: (node, input index) for each explicit reading of a tensor.
    pinned: tensors whose names are used beyond those nodes: graph outputs, and names that the bodies of control-flow
        nodes capture.
    """

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.nodes: list[NodeProto] = list(graph.node)
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs: list[str] = [value.name for value in graph_inputs(model)]
        self.outputs: list[str] = [output.name for output in graph.output]
        self.pinned: set[str] = set(self.outputs).union(*map(captured_names, self.nodes))
        self.producers: dict[str, NodeProto] = {}
        self.consumers: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in self.nodes:
            self.producers.update(dict.fromkeys(node.output, node))
            for index, name in enumerate(node.input):
                self.consumers.setdefault(name, []).append((node, index))

    def readers(self, tensor: str) -> list[tuple[NodeProto, int]]:
        """Return the explicit readings of a tensor, in graph order."""
        return self.consumers.get(tensor, [])

    def sole_reader(self, tensor: str) -> NodeProto | None:
        """Return the one node that reads a tensor; None when several do, none does, or the tensor is pinned."""
        readers = self.readers(tensor)
        return readers[0][0] if len(readers) == 1 and tensor not in self.pinned else None

    def rename(self, tensor: str, name: str) -> None:
        """Give a tensor that a node makes, and no body of control flow reads, another name."""
        producer, readings = self.producers.pop(tensor), self.consumers.pop(tensor, [])
        producer.output[list(producer.output).index(tensor)] = name
        for reader, index in readings:
            reader.input[index] = name
        self.producers[name], self.consumers[name] = producer, readings

    def insert(self, node: NodeProto, reader: NodeProto) -> None:
        """Register a node that was placed between a tensor and its reader, which reads it as input 0.

        `nodes` does not list it, and `readers` may return it out of order.
        """
        tensor, (made,) = reader.input[0], node.output
        reader.input[0] = made
        others = [(each, index) for each, index in self.readers(tensor) if not (each is reader and index == 0)]
        self.consumers[tensor] = [*others, (node, 0)]
        self.consumers[made] = [(reader, 0)]
        self.producers[made] = node


def tensor_types(model: ModelProto) -> dict[str, TensorType]:
    """Return the types of all tensors that ONNX shape inference, with constant propagation, knows."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types = {v.name: value_type(v) for v in (*inferred.input, *inferred.value_info, *inferred.output)}
    types |= {t.name: TensorType(t.data_type, tuple(t.dims)) for t in inferred.initializer}
    return types


def types_for_image(model: ModelProto, shape: Sequence[int]) -> dict[str, TensorType]:
    """Return the types of all tensors, as far as ONNX infers them for an image of this shape."""
    graph = deepcopy(model)
    image = graph_inputs(graph)[0]
    for dimension, size in zip(image.type.tensor_type.shape.dim, shape, strict=True):
        dimension.dim_value = size
    for output in graph.graph.output:  # they may declare by name dimensions that are fixed now
        output.type.tensor_type.ClearField("shape")
    return tensor_types(graph)


def is_float(types: Mapping[str, TensorType], tensor: str) -> bool:
    """Return True if a tensor is known to be float32."""
    return tensor in types and types[tensor].elem_type == TensorProto.FLOAT


def type_name(elem_type: int) -> str:
    """Return ONNX's name of an element type, in small letters; a file may have a number that is none."""
    is_known = elem_type in TensorProto.DataType.values()
    return TensorProto.DataType.Name(elem_type).lower() if is_known else f"unknown type {elem_type}"


def value_type(value: ValueInfoProto) -> TensorType:
    """Return the element type and shape that a graph declares for one of its values."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    dims = tensor.shape.dim
    return TensorType(
        tensor.elem_type, tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims)
    )


def replace_nodes(model: ModelProto, nodes: Iterable[NodeProto]) -> ModelProto:
    """Let a model have these nodes, and return it."""
    replace_items(model.graph.node, nodes)
    return model


def replace_items(field: RepeatedCompositeFieldContainer[Item], items: Iterable[Item]) -> None:
    """Let a repeated field of a model have these items, some of which it may have already."""
    kept = list(items)
    del field[:]
    field.extend(kept)


def fresh_name(name: str, taken: set[str]) -> str:
    """Return a name that is not taken, made from `name`, and take it: a model may have the names that we give."""
    while name in taken:
        name += "_"
    taken.add(name)
    return name


def graph_inputs(model: ModelProto) -> list[ValueInfoProto]:
    """Return the inputs that a caller gives: initialisers are listed among them where IR < 4 demanded it."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in initializers]


def attribute(node: NodeProto, name: str, default: object = None) -> object:
    """Return the value of a node's attribute as Python object; `default` when it is absent."""
    for candidate in node.attribute:
        if candidate.name == name:
            value: object = onnx.helper.get_attribute_value(candidate)
            return value
    return default


def number(node: NodeProto, name: str, default: float) -> float:
    """Return a node's attribute of type int or float."""
    return float(attribute(node, name, default))  # type: ignore[arg-type]  # ONNX says number


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """Yield the bodies of a control-flow node (If, Loop, Scan)."""
    for candidate in node.attribute:
        if candidate.HasField("g"):
            yield candidate.g
        yield from candidate.graphs


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Yield every node, those in the bodies of control-flow nodes included."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def captured_names(node: NodeProto) -> set[str]:
    """Return the names that the bodies of a control-flow node mention; some may be their own, which does no harm."""
    bodies = list(subgraphs(node))
    read = {name for body in bodies for inner in all_nodes(body) for name in inner.input}
    return read | {output.name for body in bodies for output in body.output}


def trial_shape(shape: Sequence[Dim]) -> tuple[int, ...]:
    """Return a concrete shape: open dimensions become one image of 256 x 256, divisible by usual strides."""
    usual = (1, 256, 256, 256)  # an image never leaves its channels open
    return tuple(size if isinstance(size, int) else usual[axis] for axis, size in enumerate(shape))


def data_inputs(node: NodeProto) -> tuple[int, ...]:
    """Return the inputs that an operator moves values from; its others are shapes, indices, paddings."""
    return tuple(range(len(node.input))) if node.op_type == "Concat" else (0,)


def moves_values(node: NodeProto, constants: Container[str]) -> bool:
    """Return True if every value of the node's outputs is one of its (not constant) input values, or zero."""
    if node.op_type not in MOVEMENT_OPS or any(node.input[index] in constants for index in data_inputs(node)):
        return False
    if node.op_type == "Resize":
        return attribute(node, "mode", b"nearest") == b"nearest"
    if node.op_type == "Pad":  # a third input would be another padding value than zero
        return len(node.input) < 3 or not node.input[2]
    return node.op_type != "MaxPool" or len(node.output) == 1


def channel_axis(node: NodeProto, rank: int) -> int:
    """Return the axis of the output channels in the weight of a convolution or matrix product.

    A grouped ConvTranspose has (in, out / groups, ...): the groups then share their scales.
    """
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1}.get(node.op_type, rank - 1)
