"""The fake builder's layers of a graph: one row for every convolution and matrix product, in NVIDIA's forms."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import onnx
from onnx import ModelProto, NodeProto, TensorProto

_KINDS = {
    "Conv": ("CaskConvolution", "Convolution"),
    "ConvTranspose": ("CaskDeconvolution", "Deconvolution"),
    "Gemm": ("CaskGemmMatrixMultiply", "MatrixMultiply"),
    "MatMul": ("CaskGemmMatrixMultiply", "MatrixMultiply"),
}
_FUSED = {"Relu", "Clip", "LeakyRelu"}
_TYPES = {int(TensorProto.FLOAT): "Float", int(TensorProto.FLOAT16): "Half", int(TensorProto.BFLOAT16): "BFloat16"}
_FORMATS = {
    "Float": "Row major linear FP32",
    "Half": "Channel major FP16 format where channel % 8 == 0",
    "BFloat16": "Row major linear BF16 format",
    "Int8": "Thirty-two wide channel vectorized row major Int8 format",
}
_TACTICS = {
    "Float": "sm80_xmma_fprop_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nchw_tilesize128x64x16_stage4",
    "Half": "sm80_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x32_stage4",
    "BFloat16": "sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x64x32_stage4",
    "Int8": "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_tilesize64x96x64",
}
_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Row:
    """One layer. input, output: tensors; read, made: their types. constants: of INT8, weights and what scales them."""

    kind: str
    parameters: str
    nodes: tuple[str, ...]
    constants: tuple[str, ...]
    weights: int
    biases: int
    input: str
    output: str
    read: str
    made: str

    @property
    def is_int8(self) -> bool:
        return bool(self.constants)

    @property
    def name(self) -> str:
        """As TensorRT names what it fused: the weights with what quantises them, then the nodes."""
        return " + ".join((*self.constants, *self.nodes))

    @property
    def key(self) -> str:
        """Return the facts that a kernel's timing depends on."""
        return f"{self.kind} {self.weights} {self.read} {self.made} {self.name}"

    def to_json(self) -> dict[str, object]:
        return {
            "Name": self.name,
            "LayerType": self.kind,
            "Inputs": [_tensor(self.input, self.read)],
            "Outputs": [_tensor(self.output, self.made)],
            "ParameterType": self.parameters,
            "Weights": {"Type": self.read, "Count": self.weights},
            "Bias": {"Type": "Float" if self.read == "Int8" else self.read, "Count": self.biases},
            "TacticName": _TACTICS[self.read],
            "TacticValue": f"0x{len(self.name):016x}",
            "StreamId": 0,
            "Metadata": self._metadata(),
        }

    def _metadata(self) -> str:
        return _SEPARATOR.join(f"[ONNX Layer: {node}]" for node in self.nodes)


def listing(model: ModelProto, marked: Collection[str], without_int8: Collection[str]) -> list[Row]:
    """The rows of a graph, in its order. marked: tensors that somebody wants to see, so nothing is fused over them."""
    return _Reader(model, marked, without_int8).rows()


def inspector_json(rows: Sequence[Row], bindings: Sequence[str], is_detailed: bool) -> str:
    """Return the answer of the engine inspector; only names where the builder was not asked for more."""
    layers = [row.to_json() if is_detailed else row.name for row in rows]
    return json.dumps({"Layers": layers, "Bindings": list(bindings)})


class _Reader:
    def __init__(self, model: ModelProto, marked: Collection[str], without_int8: Collection[str]) -> None:
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        values = (*inferred.input, *inferred.value_info, *inferred.output)
        self._nodes = list(model.graph.node)
        self._kinds = {value.name: value.type.tensor_type.elem_type for value in values}
        self._sizes = {tensor.name: _size(tensor) for tensor in model.graph.initializer}
        self._makers = {name: node for node in self._nodes for name in node.output}
        self._kept = {*marked, *(output.name for output in model.graph.output)}
        self._without_int8 = without_int8

    def rows(self) -> list[Row]:
        return [self._row(node) for node in self._nodes if node.op_type in _KINDS]

    def _row(self, node: NodeProto) -> Row:
        operands = [self._makers.get(name) for name in node.input[:2]]
        quantised = all(maker is not None and maker.op_type == "DequantizeLinear" for maker in operands)
        weight = node.input[1]
        constants: tuple[str, ...] = ()
        if operands[1] is not None and operands[1].op_type == "DequantizeLinear":
            weight = operands[1].input[0]
            constants = (weight, operands[1].name) if quantised else ()
        nodes, end = [node.name], node.output[0]
        follower = self._follower(end)
        if follower is not None and follower.op_type in _FUSED:
            nodes, end = [*nodes, follower.name], follower.output[0]
        plain = _TYPES[self._kinds[node.output[0]]]
        in_int8 = quantised and node.name not in self._without_int8
        after = self._follower(end)
        to_int8 = in_int8 and after is not None and after.op_type == "QuantizeLinear"
        return Row(
            *_KINDS[node.op_type],
            tuple(nodes),
            constants,
            self._sizes.get(weight, 0),
            self._sizes.get(node.input[2], 0) if len(node.input) > 2 else 0,
            node.input[0],
            end,
            "Int8" if in_int8 else plain,
            "Int8" if to_int8 else plain,
        )

    def _follower(self, name: str) -> NodeProto | None:
        """Return the only reader of a tensor that is no output."""
        readers = [node for node in self._nodes if name in node.input]
        return readers[0] if len(readers) == 1 and name not in self._kept else None


def _tensor(name: str, kind: str) -> dict[str, object]:
    return {"Name": name, "Location": "Device", "Dimensions": [-1], "Format/Datatype": _FORMATS[kind]}


def _size(tensor: TensorProto) -> int:
    size = 1
    for dim in tensor.dims:
        size *= dim
    return size
