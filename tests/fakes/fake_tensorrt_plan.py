"""The fake's plan file, and the graph in it, run by ONNX Runtime."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnxruntime as ort
from fake_tensorrt_config import CrossBuilderConfig, IBuilderConfig, Shape
from fake_tensorrt_types import NUMPY, ONNX, DataType, ProfilingVerbosity
from onnx import ModelProto

from engines.cuda.kernels import Array

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt
    from fake_tensorrt_network import INetworkDefinition

_MAGIC = b"ptrt"
_VALUE_DEPENDENT_OPS = {"NonZero", "NonMaxSuppression", "Unique", "Compress"}  # their outputs' sizes are data


@dataclass(frozen=True)
class Plan:
    """A built plan.

    Args:
        home: Module and version that built it.
        capability: Compute capability of its GPU, as 87.
        gpu: Name of that GPU.
        profiles: By input name, the smallest, best and largest shape.
        debug: The tensors marked as debug tensors.
        outputs: The tensors marked as outputs.
        without_int8: Quantised nodes that run in float.
    """

    home: tuple[str, str]
    capability: int
    gpu: str
    is_detailed: bool
    profiles: Sequence[Mapping[str, Sequence[Shape]]]
    debug: Sequence[str]
    outputs: Sequence[str]
    without_int8: Sequence[str]
    graph: bytes

    @staticmethod
    def of(world: FakeTensorRt, network: INetworkDefinition, config: IBuilderConfig) -> Plan:
        major, minor = world.pycuda.device.compute_capability()
        chosen = [int(each) for each in config.capabilities.values()] if isinstance(config, CrossBuilderConfig) else []
        return Plan(
            (world.name, world.version),
            chosen[0] if chosen else 10 * major + minor,
            "" if chosen else world.pycuda.device.name(),
            config.profiling_verbosity is ProfilingVerbosity.DETAILED,
            [profile.shapes for profile in config.profiles],
            network.debug,
            network.outputs,
            sorted(world.without_int8),
            network.model.SerializeToString(),
        )

    def to_bytes(self) -> bytes:
        """Magic, sizes of header and graph, header in JSON, graph."""
        fields = {name: value for name, value in asdict(self).items() if name != "graph"}
        header = json.dumps(fields).encode()
        return _MAGIC + struct.pack("<QQ", len(header), len(self.graph)) + header + self.graph

    @staticmethod
    def from_bytes(content: bytes) -> Plan:
        """Raises ValueError, with TensorRT's words, for what is no plan or not all of one."""
        start = len(_MAGIC) + 16
        if not content.startswith(_MAGIC) or len(content) < start:
            raise ValueError("Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match")
        header, graph = struct.unpack("<QQ", content[len(_MAGIC) : start])
        if len(content) != start + header + graph:
            raise ValueError(f"Serialization assertion sizeRead == {len(content)} failed.Plan is truncated")
        fields: dict[str, Any] = json.loads(content[start : start + header])
        return Plan(**{**fields, "home": tuple(fields["home"]), "graph": content[start + header :]})


class Program:
    """The graph of a plan. types, dims: of inputs and outputs by name, -1 for what is open until shapes are set."""

    def __init__(self, plan: Plan) -> None:
        model = ModelProto.FromString(plan.graph)
        inferred = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        kinds = {v.name: v.type.tensor_type.elem_type for v in (*inferred.value_info, *inferred.output)}
        present = [output.name for output in model.graph.output]
        for name in (*plan.outputs, *plan.debug):
            if name not in present:
                model.graph.output.append(onnx.helper.make_tensor_value_info(name, kinds[name], None))
                present.append(name)
        self._session = _session(model)
        self.inputs = input_shapes(model)
        declared = [output.name for output in onnx.load_from_string(plan.graph).graph.output]
        self.outputs = [*declared, *plan.outputs]
        order = [name for node in model.graph.node for name in node.output]
        self.debug = sorted(plan.debug, key=order.index)
        self.types: dict[str, DataType] = {v.name: ONNX[v.type.tensor_type.elem_type] for v in model.graph.input}
        self.types |= {name: ONNX[kinds[name]] for name in (*self.outputs, *self.debug)}
        self._open = _value_dependent(model)
        self._shapes: dict[tuple[tuple[str, Shape], ...], dict[str, Shape]] = {}
        self.dims = {**self.inputs, **self._output_dims(plan, inferred)}

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """All outputs and debug tensors, by name."""
        names = [*self.outputs, *(name for name in self.debug if name not in self.outputs)]
        return dict(zip(names, self._session.run(names, dict(inputs)), strict=True))

    def shapes(self, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
        """Of every output and debug tensor for inputs of these shapes; all -1 where it depends on values."""
        key = tuple(sorted(inputs.items()))
        if key not in self._shapes:
            found = self.run({name: np.zeros(shape, NUMPY[self.types[name]]) for name, shape in inputs.items()})
            self._shapes[key] = {
                name: (-1,) * value.ndim if name in self._open else value.shape for name, value in found.items()
            }
        return self._shapes[key]

    def _output_dims(self, plan: Plan, inferred: onnx.GraphProto) -> dict[str, Shape]:
        usual = {name: tuple(shapes[1]) for name, shapes in plan.profiles[0].items()} if plan.profiles else {}
        shapes = self.shapes({name: usual.get(name, shape) for name, shape in self.inputs.items()})
        if all(-1 not in shape for shape in self.inputs.values()):
            return {name: shapes[name] for name in self.outputs}
        known = {v.name: _shape(v) for v in (*inferred.value_info, *inferred.output)}
        return {
            name: known[name] if len(known[name]) == len(shapes[name]) else (-1,) * len(shapes[name])
            for name in self.outputs
        }


def input_shapes(model: ModelProto) -> dict[str, Shape]:
    """Shapes of the inputs, -1 for open dimensions."""
    constants = {tensor.name for tensor in model.graph.initializer}
    return {value.name: _shape(value) for value in model.graph.input if value.name not in constants}


def _shape(value: onnx.ValueInfoProto) -> Shape:
    dims = value.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)


def _session(model: ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.disable_quant_qdq", "1")  # float16 scales, and no kernels of its own
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _value_dependent(model: ModelProto) -> set[str]:
    """Tensors whose sizes depend on values: what those operators make, and whatever follows from it."""
    found: set[str] = set()
    for node in model.graph.node:
        if node.op_type in _VALUE_DEPENDENT_OPS or found.intersection(node.input):
            found.update(node.output)
    return found
