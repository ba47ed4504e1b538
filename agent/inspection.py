"""`tared inspect`: what is in an artefact, and the layers that the builder made of it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from calibrate.errors import TaredError
from engines.artefact import Artefact, check_runtime, read_artefact
from engines.backend import Backend, EngineError, ProfiledEngine
from engines.trt.layers import LAYERS_FILE, Layer, layers_from_json, with_times

_OURS = (".int8", ".dequantised", ".cast", ".half", ".float")  # nodes that engines/qdq.py and half.py put in
_FACTS = ("model_name", "int8_macs_share", "engine_bytes")


@dataclass(frozen=True)
class Inspection:
    """What is told of an artefact. layers: None where nobody asked."""

    artefact: Artefact
    layers: list[Layer] | None

    @property
    def facts(self) -> dict[str, Any]:
        """What it was made of, and what the builder could not do as it was told."""
        manifest = self.artefact.manifest
        inputs = manifest["inputs"]
        told = {"id": self.artefact.id, **{name: manifest.get(name) for name in _FACTS}}
        told |= {"precision": inputs["precision"], "backend": inputs["backend"], "flags": inputs.get("flags", {})}
        told |= {
            name: manifest[name] for name in ("verification_only", "without_int8", "float32") if manifest.get(name)
        }
        return told

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        layers = {} if self.layers is None else {"layers": [asdict(layer) for layer in self.layers]}
        return {**self.facts, **layers}


def inspect_artefact(path: Path, layers: bool, backend: Backend | None, key: bytes | None = None) -> Inspection:
    """Read an artefact; with a backend, run it and time its layers.

    Raises EngineError as `read_artefact`; `inspect.layers` for an engine whose runtime lists none, `inspect.time` for
    one that cannot time them.
    """
    artefact = read_artefact(path, key)
    if not layers:
        return Inspection(artefact, None)
    if LAYERS_FILE not in artefact.manifest["files"]:
        runtime = artefact.manifest["inputs"]["backend"]["runtime"]
        raise _unable("layers", f"an engine of {runtime}, which lists no layers")
    found = layers_from_json(artefact.read_file(LAYERS_FILE))
    if backend is not None:
        found = with_times(found, _times_ms(artefact, backend))
    return Inspection(artefact, found)


def _times_ms(artefact: Artefact, backend: Backend) -> dict[str, float]:
    check_runtime(artefact, backend.describe())
    with closing(backend.load(artefact.read_engine())) as engine:
        if not isinstance(engine, ProfiledEngine):
            raise _unable("time", f"an engine of {backend.name}, which does not time its layers")
        image = engine.inputs[0]
        shapes = artefact.manifest["inputs"]["spec"]["profiles"]
        shape = shapes[0][image.name]["opt"] if shapes else [size or 1 for size in image.shape]
        return engine.layer_times_ms(np.zeros(shape, image.dtype))


def print_inspection(inspection: Inspection, console: Console) -> None:
    """For people: the facts, then the table."""
    for name, fact in inspection.facts.items():
        console.print(f"{name:18} {fact}", highlight=False, markup=False)
    if inspection.layers is None:
        return
    timed = any(layer.time_ms is not None for layer in inspection.layers)
    table = Table("computes", "type", "reads", "writes", *(["ms"] if timed else []), "format", "tactic", box=None)
    for layer in inspection.layers:
        time_ms = "" if layer.time_ms is None else f"{layer.time_ms:.4f}"
        reads, writes = layer.precision, "/".join(dict.fromkeys(layer.outputs))
        table.add_row(
            _computed(layer), layer.kind, reads, writes, *([time_ms] if timed else []), layer.format, layer.tactic
        )
    console.print(table)


def _computed(layer: Layer) -> str:
    """The model's nodes in a layer, by name; where there are none but our own, the layer's name."""
    nodes = [node for node in layer.nodes if not node.endswith(_OURS)]
    return ", ".join(nodes) or layer.name


def _unable(code: str, found: str) -> TaredError:
    return EngineError(
        f"inspect.{code}", found, "an engine of tensorrt", "build it with --backend tensorrt, on the board"
    )
