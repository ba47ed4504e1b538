"""List what the builder made of a graph, one row a layer: from the engine inspector or, without a GPU, from the log."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from engines.errors import EngineError

LISTING = "Layers:"  # how the log's message begins that lists an engine's layers, given detailed profiling verbosity
LAYERS_FILE = "layers.json"
_FIELD = re.compile(r"(Name|LayerType|TacticName|Metadata): ([^,\n]*)")
_TENSOR = re.compile(r"\{ Name: (.*?), Dimensions: .*?Datatype: (\w+), Format: (.*?) \}")
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_REFORMAT = re.compile(r"Reformatting CopyNode for (?:Input|Output) Tensor \d+ to (.*)")
_COMPUTES = re.compile("conv|correlation|gemm|matmul|matrix|fusion", re.IGNORECASE)
_TYPES = {"FP32": "Float", "FP16": "Half", "BF16": "BFloat16", "INT8": "Int8", "INT32": "Int32", "INT64": "Int64"}
_TYPES |= {name: name for name in (*_TYPES.values(), "Bool", "Int8")}


@dataclass(frozen=True)
class Layer:
    """One layer of an engine.

    nodes: names of the ONNX nodes it computes, in no particular order. inputs, outputs: types of its activations as
    TensorRT writes them ("Int8", "Half", "Float"); constants: of its weights and scales. format: how its first output
    lies in memory. time_ms: mean over some inferences, None where it was not measured.
    """

    name: str
    kind: str
    nodes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    format: str = ""
    tactic: str = ""
    time_ms: float | None = None

    @property
    def precision(self) -> str:
        """The narrowest type it reads: that of its arithmetic, where it computes."""
        order = ("Int8", "Half", "BFloat16", "Float")
        read = {*self.inputs, *self.constants} or set(self.outputs)
        return next((name for name in order if name in read), next(iter(sorted(read)), ""))


def layers_from_log(listing: str) -> list[Layer]:
    """Read the log's listing of TensorRT and TensorRT-RTX: one line a layer after its first."""
    return [_from_line(line) for line in listing.splitlines()[1:] if line.startswith("Name: ")]


def layers_from_inspector(text: str) -> list[Layer]:
    """Read EngineInspector.get_engine_information in JSON. Raises EngineError (`engine.layers`) for anything else."""
    try:
        rows = json.loads(text)["Layers"]
        return [_from_row(row) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            "engine.layers",
            f"an inspector that answers {text[:60]!r}",
            "JSON with Layers",
            "build the engine with this tared",
        ) from error


def layers_to_json(layers: Sequence[Layer]) -> bytes:
    """Write what `layers_from_json` reads: a file of an artefact."""
    return (json.dumps([asdict(layer) for layer in layers], indent=1) + "\n").encode()


def layers_from_json(content: bytes) -> list[Layer]:
    """Read what `layers_to_json` wrote. Raises EngineError (`engine.layers`) for anything else."""
    try:
        names = ("nodes", "inputs", "constants", "outputs")
        return [Layer(**{**row, **{name: tuple(row[name]) for name in names}}) for row in json.loads(content)]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(
            "engine.layers", f"a {LAYERS_FILE} that cannot be read: {error}", "a list of layers", "build it again"
        ) from error


def with_times(layers: Sequence[Layer], times_ms: dict[str, float]) -> list[Layer]:
    """Return the layers with measured times, by layer name."""
    return [replace(layer, time_ms=times_ms.get(layer.name)) for layer in layers]


def nodes_by_layer(layers: Sequence[Layer]) -> dict[str, tuple[str, ...]]:
    """Return the ONNX nodes of every layer, by its name. A reformatting has those of the layer that it is named for."""
    nodes = {layer.name: layer.nodes for layer in layers}
    reformats = {name: _REFORMAT.match(name) for name, own in nodes.items() if not own}
    return nodes | {name: nodes.get(match[1], ()) for name, match in reformats.items() if match}


def without_int8(layers: Sequence[Layer], quantised: Sequence[str]) -> dict[str, str]:
    """Return the nodes that read INT8 in the graph and whose layers multiply in another type, with the reason.

    A node that no such layer mentions was fused without a trace, or folded: it is left out.
    """
    reasons = {}
    for node in quantised:
        own = [layer for layer in layers if node in layer.nodes and _COMPUTES.search(layer.kind)]
        if own and not any("Int8" in (*layer.inputs, *layer.constants) for layer in own):
            reasons[node] = f"no INT8 kernel: it ran as {own[0].precision} ({own[0].tactic or own[0].kind})"
    return reasons


def _from_line(line: str) -> Layer:
    head, _, rest = line.partition(", Inputs: ")
    inputs, _, rest = rest.partition(", Constants: ")
    constants, _, rest = rest.partition(", Outputs: ")
    outputs, _, tail = rest.partition(", TacticName: ")
    fields = dict(_FIELD.findall(f"{head}, TacticName: {tail}"))
    written = _TENSOR.findall(outputs)
    read, held, made = (tuple(kind for _, kind, _ in _TENSOR.findall(part)) for part in (inputs, constants, outputs))
    return Layer(
        fields.get("Name", ""),
        fields.get("LayerType", ""),
        tuple(dict.fromkeys(_NODE.findall(tail))),
        read,
        held,
        made,
        format=written[0][2] if written else "",
        tactic=fields.get("TacticName", ""),
    )


def _from_row(row: dict[str, Any]) -> Layer:
    constants = [row[key] for key in ("Weights", "Bias") if isinstance(row.get(key), dict) and row[key].get("Count")]
    constants += row.get("Constants", [])
    outputs = row.get("Outputs", [])
    return Layer(
        str(row["Name"]),
        str(row.get("LayerType", "")),
        tuple(dict.fromkeys(_NODE.findall(str(row.get("Metadata", ""))))),
        tuple(map(_type, row.get("Inputs", []))),
        tuple(map(_type, constants)),
        tuple(map(_type, outputs)),
        format=_format(outputs[0]) if outputs else "",
        tactic=str(row.get("TacticName", "")),
    )


def _format(tensor: dict[str, Any]) -> str:
    return str(tensor.get("Format/Datatype") or tensor.get("Format") or "")


def _type(tensor: dict[str, Any]) -> str:
    """Return the type of a tensor: its own field, or a word of its format ("Row major linear FP16 format")."""
    name = str(tensor.get("Datatype") or tensor.get("Type") or "")
    words = [name] if name else _format(tensor).rstrip(".").split()
    return next((_TYPES[word] for word in reversed(words) if word in _TYPES), name)
