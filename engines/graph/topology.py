"""Who makes and who reads every tensor of a graph, and of what type it is: what passes and rules consult."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

Dim = int | str | None  # a size, the name of an open dimension, or unknown


@dataclass(frozen=True)
class TensorType:
    """ONNX element type (`TensorProto.FLOAT`, ...) and shape; None when even the rank is unknown."""

    elem_type: int
    shape: tuple[Dim, ...] | None


class Topology:
    """Built from a model once; later changes to the model do not show.

    nodes: topologically sorted, as ONNX demands of a graph. producers: the node that makes a tensor; graph
    inputs and initialisers have none. consumers: (node, input index) for each explicit reading of a tensor.
    pinned: tensors whose names something beyond those nodes relies on: graph outputs, and names that the
    bodies of control-flow nodes capture.
    """

    def __init__(self, model: ModelProto) -> None:
        graph = model.graph
        self.nodes: list[NodeProto] = list(graph.node)
        self.initializers: dict[str, TensorProto] = {tensor.name: tensor for tensor in graph.initializer}
        self.inputs: list[str] = [i.name for i in graph.input if i.name not in self.initializers]
        self.outputs: list[str] = [output.name for output in graph.output]
        self.pinned: set[str] = {*self.outputs, *captured_names(graph)}
        self.producers: dict[str, NodeProto] = {}
        self.consumers: dict[str, list[tuple[NodeProto, int]]] = {}
        for node in self.nodes:
            self.producers.update(dict.fromkeys(node.output, node))
            for index, name in enumerate(node.input):
                self.consumers.setdefault(name, []).append((node, index))

    def readers(self, tensor: str) -> list[tuple[NodeProto, int]]:
        """The explicit readings of a tensor, in graph order."""
        return self.consumers.get(tensor, [])

    def sole_reader(self, tensor: str) -> NodeProto | None:
        """The one node that reads a tensor, or None when several do, none does, or the tensor is pinned."""
        readers = self.readers(tensor)
        return readers[0][0] if len(readers) == 1 and tensor not in self.pinned else None


def tensor_types(model: ModelProto) -> dict[str, TensorType]:
    """Types of all tensors that ONNX shape inference (with constant propagation) can tell."""
    inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    types = {v.name: value_type(v) for v in (*inferred.input, *inferred.value_info, *inferred.output)}
    types |= {t.name: TensorType(t.data_type, tuple(t.dims)) for t in inferred.initializer}
    return types


def value_type(value: ValueInfoProto) -> TensorType:
    """Element type and shape that a graph declares for one of its values."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        return TensorType(tensor.elem_type, None)
    dims = tensor.shape.dim
    return TensorType(
        tensor.elem_type, tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims)
    )


def attribute(node: NodeProto, name: str, default: object = None) -> object:
    """The value of a node's attribute as Python object; `default` when it is absent."""
    for candidate in node.attribute:
        if candidate.name == name:
            value: object = onnx.helper.get_attribute_value(candidate)
            return value
    return default


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The bodies of a control-flow node (If, Loop, Scan)."""
    for candidate in node.attribute:
        if candidate.HasField("g"):
            yield candidate.g
        yield from candidate.graphs


def all_nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """Every node, those in the bodies of control-flow nodes included."""
    for node in graph.node:
        yield node
        for body in subgraphs(node):
            yield from all_nodes(body)


def captured_names(graph: GraphProto) -> set[str]:
    """Names that bodies of control-flow nodes mention; some may be their own, which does no harm."""
    bodies = [body for node in graph.node for body in subgraphs(node)]
    read = {name for body in bodies for node in all_nodes(body) for name in node.input}
    return read | {output.name for body in bodies for output in body.output}


def trial_shape(shape: Sequence[Dim]) -> tuple[int, ...]:
    """A concrete shape: open dimensions become one image of 256 x 256, divisible by usual strides."""
    usual = (1, 256, 256, 256)  # whose channels no image leaves open
    return tuple(size if isinstance(size, int) else usual[axis] for axis, size in enumerate(shape))


ELEMENTWISE_OPS = {
    "Relu", "LeakyRelu", "PRelu", "Clip", "Elu", "Selu", "Celu", "Sigmoid", "HardSigmoid", "HardSwish",
    "Mish", "Tanh", "Softplus", "Softsign", "Gelu", "Erf", "Add", "Sub", "Mul", "Div", "BatchNormalization",
}  # fmt: skip
MOVEMENT_OPS = {
    "Concat", "MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Slice", "Split",
    "Gather", "Pad", "Resize", "DepthToSpace", "SpaceToDepth",
}  # fmt: skip
AVERAGE_OPS = {"AveragePool", "GlobalAveragePool", "ReduceMean"}


def data_inputs(node: NodeProto) -> tuple[int, ...]:
    """The inputs that an operator moves values from; its others are shapes, indices, paddings."""
    return tuple(range(len(node.input))) if node.op_type == "Concat" else (0,)


def moves_values(node: NodeProto, constants: Container[str]) -> bool:
    """True when every value of the node's outputs is one of its (not constant) input values, or zero."""
    if node.op_type not in MOVEMENT_OPS or any(node.input[index] in constants for index in data_inputs(node)):
        return False
    if node.op_type == "Resize":
        return attribute(node, "mode", b"nearest") == b"nearest"
    if node.op_type == "Pad":  # a third input would be another padding value than zero
        return len(node.input) < 3 or not node.input[2]
    return node.op_type != "MaxPool" or len(node.output) == 1


def channel_axis(node: NodeProto, rank: int) -> int:
    """The axis of the output channels in the weight of a convolution or matrix product.

    A grouped ConvTranspose has (in, out / groups, ...): the groups then share their scales.
    """
    if node.op_type == "Gemm":
        return 0 if attribute(node, "transB", 0) else 1
    return {"Conv": 0, "ConvTranspose": 1}.get(node.op_type, rank - 1)


COMPUTE_OPS = {"Conv", "ConvTranspose", "Gemm", "MatMul"}
