"""Parse an ONNX graph into TensorRT's network; whatever its parser refuses, or should have, becomes an error."""

from __future__ import annotations

from dataclasses import dataclass

from onnx import ModelProto, TensorProto

from engines.errors import EngineError
from engines.graph.topology import value_type
from engines.trt.api import Builder, INetworkDefinition, ITensor, OnnxParser
from engines.trt.log import messages
from engines.trt.release import TensorRtRelease

_UNSUPPORTED = "UNSUPPORTED"
_MOST_CHARACTERS = 400  # of a reason: behind it the parser lists consequences


@dataclass(frozen=True)
class ParsedNetwork:
    """A parsed network. The parser owns memory that the network refers to, and has to live as long."""

    definition: INetworkDefinition
    parser: OnnxParser

    def tensor(self, name: str) -> ITensor | None:
        """Return the tensor of an ONNX name, which the parser keeps for inputs and outputs of nodes."""
        network = self.definition
        for index in range(network.num_inputs):
            if network.get_input(index).name == name:
                return network.get_input(index)
        for index in range(network.num_layers):
            layer = network.get_layer(index)
            for output in range(layer.num_outputs):
                if layer.get_output(output).name == name:
                    return layer.get_output(output)
        return None


def parse(release: TensorRtRelease, builder: Builder, graph: ModelProto) -> ParsedNetwork:
    """Parse a graph strongly typed: every tensor has the type that the graph gives it, and no other.

    Raises EngineError, where it can with operator, node name and index:
        engine.double       double-precision inputs or outputs, which TensorRT would silently make float
        engine.unsupported  an operator that it does not have
        engine.graph        anything else that the parser refuses
        engine.empty        nothing was left to compute
    """
    for value in (*graph.graph.input, *graph.graph.output):
        if value_type(value).elem_type == TensorProto.DOUBLE:
            raise EngineError(
                "engine.double",
                f"'{value.name}' in double precision",
                "float32",
                "export the model in single precision",
            )
    trt = release.trt
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    log = messages(release)
    parser = trt.OnnxParser(network, log.logger)
    with log.recorded() as record:
        done = parser.parse(graph.SerializeToString())
    if not done or parser.num_errors:
        raise _refusal(release, parser, record.last_error)
    if network.num_layers == 0:  # it has taken an empty file for a model
        raise EngineError("engine.empty", "a network of no layers", "at least one layer", "check the model's outputs")
    return ParsedNetwork(network, parser)


def _refusal(release: TensorRtRelease, parser: OnnxParser, said: str) -> EngineError:
    if parser.num_errors == 0:
        return EngineError("engine.graph", said, f"a graph that {release.name} parses", "check the model with trtexec")
    error = parser.get_error(0)
    where = f"operator {error.node_operator()} in node '{error.node_name()}', number {error.node()} of the graph"
    reason = " ".join(error.desc().split())[:_MOST_CHARACTERS]
    if _UNSUPPORTED in str(error):  # its printed form names the kind of error; code() changed its type between releases
        return EngineError(
            "engine.unsupported",
            f"{where} ({reason})",
            f"operators that {release.name} has",
            "export the model without it, for instance with its decoding steps moved into the decoder",
        )
    return EngineError("engine.graph", f"{where}: {reason}", f"a graph that {release.name} parses", "see the node")
