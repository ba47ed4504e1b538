"""What the placement rules need to know about single operators."""

from __future__ import annotations

from collections.abc import Container

from onnx import NodeProto

from engines.topology import attribute

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
