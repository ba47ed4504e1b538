"""The fake's network and parser: an ONNX graph, kept as it is, and the tensors somebody marked in it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import onnx
from google.protobuf.message import DecodeError
from onnx import ModelProto, NodeProto

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt

_TWICE = (
    "INetworkDefinition::markOutput: Error Code 4: API Usage Error (Failed attempt to set a tensor {name} as "
    "network-level output as it was already set as network-level output.)"
)
_INPUT = (
    "INetworkDefinition::markOutput: Error Code 4: API Usage Error (Failed attempt to set a tensor {name} as "
    "network-level output. It was previously set as a network-level input. Tensor can't be both input and output at "
    "network level.)"
)


class ITensor:
    __slots__ = ("__weakref__", "name", "network")

    def __init__(self, network: INetworkDefinition, name: str) -> None:
        self.network, self.name = weakref.ref(network), name


class ILayer:
    __slots__ = ("_outputs", "name")

    def __init__(self, network: INetworkDefinition, node: NodeProto) -> None:
        self.name = node.name
        self._outputs = [ITensor(network, name) for name in node.output if name]

    @property
    def num_outputs(self) -> int:
        return len(self._outputs)

    def get_output(self, index: int) -> ITensor:
        return self._outputs[index]


class INetworkDefinition:
    """debug, outputs: the tensors that were marked, `outputs` beside those of the graph."""

    __slots__ = ("__weakref__", "_inputs", "_layers", "_parser", "_world", "debug", "model", "outputs")

    def __init__(self, world: FakeTensorRt, flags: int) -> None:
        typed = int(world.module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
        world.require(world.is_always_typed or flags >> typed & 1, "a network that is not strongly typed")
        self._world = world
        self._parser: Any = None
        self._layers: list[ILayer] = []
        self._inputs: list[ITensor] = []
        self.model = ModelProto()
        self.debug: list[str] = []
        self.outputs: list[str] = []

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def get_layer(self, index: int) -> ILayer:
        return self._layers[index]

    def get_input(self, index: int) -> ITensor:
        return self._inputs[index]

    def mark_debug(self, tensor: ITensor) -> bool:
        self._check(tensor)
        if tensor.name not in self.debug:
            self.debug.append(tensor.name)
        return True

    def mark_output(self, tensor: ITensor) -> None:
        self._check(tensor)
        if any(tensor.name == name for name in self.input_names()):
            self._world.error(_INPUT.format(name=tensor.name))
        elif tensor.name in (*self.outputs, *(output.name for output in self.model.graph.output)):
            self._world.error(_TWICE.format(name=tensor.name))
        else:
            self.outputs.append(tensor.name)

    def input_names(self) -> list[str]:
        return [tensor.name for tensor in self._inputs]

    def fill(self, parser: OnnxParser, model: ModelProto) -> None:
        """The graph that the parser has read. It owns part of it, so it must live as long."""
        self.model = model
        self._parser = weakref.ref(parser)
        constants = {tensor.name for tensor in model.graph.initializer}
        self._inputs = [ITensor(self, value.name) for value in model.graph.input if value.name not in constants]
        self._layers = [ILayer(self, node) for node in model.graph.node]

    def check_parser(self) -> None:
        owned = self._parser is None or self._parser() is not None
        self._world.require(owned, "a network used after its parser was freed")

    def _check(self, tensor: ITensor) -> None:
        self.check_parser()
        self._world.require(tensor.network() is self, f"tensor '{tensor.name}' of another network")


class ParserError:
    """Printed as TensorRT prints it: with the name of the kind, which code() gives as number or enumeration."""

    def __init__(self, kind: str, reason: str, function: str, index: int = -1, node: NodeProto | None = None) -> None:
        self._kind, self._reason, self._function = kind, reason, function
        self._index, self._node = index, node or NodeProto()

    def desc(self) -> str:
        return self._reason

    def node(self) -> int:
        return self._index

    def node_name(self) -> str:
        return str(self._node.name)

    def node_operator(self) -> str:
        return str(self._node.op_type)

    def __str__(self) -> str:
        where = f"In node {self._index} with name: {self._node.name} and operator: {self._node.op_type} "
        return f"{where if self._index >= 0 else ''}({self._function}): {self._kind}: {self._reason}"


class OnnxParser:
    def __init__(self, world: FakeTensorRt, network: INetworkDefinition, logger: Any) -> None:
        world.register(logger, "Parser")
        if not isinstance(network, INetworkDefinition):
            raise TypeError(f"incompatible constructor arguments: {network!r}")
        self._world, self._network = world, network
        self._errors: list[ParserError] = []

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> ParserError:
        return self._errors[index]

    def parse(self, model: bytes) -> bool:
        """True for an empty file too."""
        if not isinstance(model, bytes):
            raise TypeError("parse(): incompatible function arguments")
        try:
            graph = ModelProto.FromString(model)
        except DecodeError:
            reason = "Failed to parse the ONNX model."
            self._errors.append(ParserError("MODEL_DESERIALIZE_FAILED", reason, "deserializeOnnxModel"))
        else:
            self._check_nodes(graph)
        for error in self._errors:
            self._world.error(f"ModelImporter.cpp: ERROR: {error}")
        if not self._errors:
            self._network.fill(self, graph)
        return not self._errors

    def _check_nodes(self, graph: ModelProto) -> None:
        """Strongly typed, there is no node that ONNX's type inference refuses."""
        try:
            onnx.shape_inference.infer_shapes(graph, check_type=True, strict_mode=True, data_prop=True)
        except onnx.shape_inference.InferenceError as raised:
            named = [(index, node) for index, node in enumerate(graph.graph.node) if node.name in str(raised)]
            index, node = named[0] if named else (-1, NodeProto())
            reason = " ".join(str(raised).split())
            self._errors.append(ParserError("INVALID_NODE", reason, "parseNode", index, node))
