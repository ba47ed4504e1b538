"""Inspect an ONNX file or an artefact, for `tared inspect`.

Of an ONNX file, `inspect_model` collects the facts and guesses a spec, which `spec_lines` and `write_spec` put into
words for the user to correct. Of an artefact, `inspect_artefact` collects its manifest and, on request, its layers and
their times.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from agent.common.errors import AgentError
from agent.common.redaction import shown
from agent.common.schema import validate
from agent.common.table import tabulate
from agent.inspection.graph_facts import GraphFacts, GraphTensor, read_facts
from agent.inspection.spec_guess import Guess, guess_head, guess_spec
from agent.vision.spec import ModelSpec
from calibrate.errors import TaredError
from engines.errors import EngineError
from engines.graph.constant_inputs import NO_CONSTANTS, Constants
from engines.graph.load import load_model
from engines.interface import Backend, ProfiledEngine
from engines.store.artefact import Artefact, check_runtime, read_artefact
from engines.trt.layers import LAYERS_FILE, Layer, layers_from_json, with_times

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class ModelInspection:
    """The inspection of an ONNX file.

    Args:
        guesses: the keys of its spec.
        refusal: why tared cannot use this graph as it is; empty if it can.
        classes: how many classes its outputs have; 0 where that cannot be known.
    """

    path: Path
    facts: GraphFacts
    guesses: tuple[Guess, ...]
    refusal: str
    classes: int

    def spec(self) -> ModelSpec:
        """Return the guessed spec. Raises ConfigError, as `validate`, and AgentError (`inspect.refused`)."""
        if self.refusal:
            found, expected = f"{self.path}: {self.refusal}", "a graph that tared can use"
            raise AgentError("inspect.refused", found, expected, f"see 'tared inspect {self.path}'")
        content: dict[str, Any] = {"path": str(self.path)}
        for guess in self.guesses:
            section, _, key = guess.key.rpartition(".")
            (content.setdefault(section, {}) if section else content)[key] = guess.value
        return validate(ModelSpec, content, f"the spec guessed of {self.path}")

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `--json`."""
        seen = {
            "inputs": [asdict(tensor) for tensor in self.facts.inputs],
            "outputs": [asdict(tensor) for tensor in self.facts.outputs],
            "layout": self.facts.layout,
            "producer": self.facts.producer,
            "opset": self.facts.opset,
        }
        guesses = [
            {"key": each.key, "value": each.value, "certainty": each.sureness, "reason": each.reason}
            for each in self.guesses
        ]
        return {"model": str(self.path), "seen": seen, "guesses": guesses, "refusal": self.refusal}


def inspect_model(path: Path) -> ModelInspection:
    """Inspect an ONNX file and guess its spec.

    Raises EngineError as `load_model` does. Only `model.input` becomes the inspection's `refusal` instead: the guesses
    help to export the model again.
    """
    refusal = _refusal(path, NO_CONSTANTS)
    facts = read_facts(path)
    constants = {name: value for name, value in facts.constants.items() if value is not None}
    if constants:
        refusal = _refusal(path, constants)
    head = guess_head(facts)
    return ModelInspection(path, facts, tuple(guess_spec(facts, head)), refusal, head.classes)


def _refusal(path: Path, constants: Constants) -> str:
    """Return why a graph with these constants cannot be used; empty if it can."""
    try:
        load_model(path, constants)
    except EngineError as error:
        if error.code != "model.input":
            raise
        return str(error)
    return ""


def write_spec(inspection: ModelInspection, path: Path, may_overwrite: bool) -> None:
    """Write the guessed spec to a file, every key with a comment.

    Raises AgentError:
        inspect.exists  there is a file already, which may not be overwritten
        inspect.output  the file cannot be written
    """
    try:
        with path.open("w" if may_overwrite else "x", encoding="utf-8") as file:
            file.write("\n".join(spec_lines(inspection, path.parent)) + "\n")
    except FileExistsError:
        expected, remedy = "a new file", "name another with -o, or replace it with --overwrite"
        raise AgentError("inspect.exists", f"{path} is there already", expected, remedy) from None
    except OSError as error:
        found = f"{path}: {error.strerror}"
        raise AgentError("inspect.output", found, "a writable folder with room", "name another with -o") from error


def spec_lines(inspection: ModelInspection, folder: Path) -> Iterator[str]:
    """Yield the lines of the guessed spec, for a file in this folder: facts as comments, and one behind each key."""
    facts = inspection.facts
    name = inspection.path.name
    yield f"# Guessed by 'tared inspect {_one_line(name)}'. Behind each key: how sure, and why. Correct what is wrong."
    for tensor in facts.inputs:
        yield f"# input {_shown(tensor)}"
    for output in facts.outputs:
        yield f"# output {_shown(output)}, by {_one_line(', '.join(dict.fromkeys(output.made_by)) or 'nothing')}"
    yield f"# made by {_one_line(facts.producer) or 'unknown'}, opset {facts.opset}"
    if inspection.refusal:
        yield f"# Not usable as it is: {_one_line(inspection.refusal)}"
    yield f"path: {one_line_yaml(os.path.relpath(inspection.path.resolve(), folder.resolve()))}"
    is_inside = False
    for guess in inspection.guesses:
        section, _, key = guess.key.rpartition(".")
        if section and not is_inside:
            yield f"{section}:"
        is_inside = bool(section)
        indent = "  " if section else ""
        yield f"{indent}{key}: {one_line_yaml(guess.value)}  # {guess.sureness}: {_one_line(guess.reason)}"
    if inspection.classes and "labels" not in [guess.key for guess in inspection.guesses]:
        yield f"# labels: labels.txt  # one name per line, {inspection.classes} in all: the graph has none"


def _shown(tensor: GraphTensor) -> str:
    shape = ", ".join("?" if side is None else str(side) for side in tensor.shape)
    return f"{_one_line(tensor.name)} {tensor.dtype} [{shape}]"


def one_line_yaml(value: object) -> str:
    """Write a value as YAML on one line."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and yaml.safe_load(value) == value  # 'no' is a word, and a boolean
        return value if is_plain else yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    if isinstance(value, list):
        return f"[{', '.join(map(one_line_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{one_line_yaml(key)}: {one_line_yaml(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def _one_line(text: str) -> str:
    """Return a text for a comment: YAML has no characters there that would steer a terminal."""
    return shown(" ".join(text.split()))


# The suffixes of nodes that engines/quantise/apply_plan.py and engines/half/convert.py put into a graph.
_OURS = (".int8", ".dequantised", ".cast", ".half", ".float")
_FACTS = ("model_name", "int8_macs_share", "engine_bytes")


@dataclass(frozen=True)
class ArtefactInspection:
    """The inspection of an artefact. layers: None where they were not requested."""

    artefact: Artefact
    layers: list[Layer] | None

    @property
    def facts(self) -> dict[str, Any]:
        """The artefact's inputs, and the requests that the builder could not fulfil."""
        manifest = self.artefact.manifest
        inputs = manifest["inputs"]
        limits = ("verification_only", "without_int8", "float32")
        return {
            "id": self.artefact.id,
            **{name: manifest.get(name) for name in _FACTS},
            "precision": inputs["precision"],
            "built_for": inputs["backend"],
            "flags": inputs.get("flags", {}),
            **{name: manifest[name] for name in limits if manifest.get(name)},
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON object of `--json`."""
        layers = {} if self.layers is None else {"built_layers": [asdict(layer) for layer in self.layers]}
        return {**self.facts, **layers}


def inspect_artefact(path: Path, layers: bool, backend: Backend | None, key: bytes | None = None) -> ArtefactInspection:
    """Read an artefact; with a backend, run it and time its layers.

    Raises EngineError as `read_artefact`, and:
        inspect.layers  the engine's runtime lists no layers
        inspect.time    the engine's runtime cannot time its layers
    """
    artefact = read_artefact(path, key)
    if not layers:
        return ArtefactInspection(artefact, None)
    if LAYERS_FILE not in artefact.manifest["files"]:
        runtime = artefact.manifest["inputs"]["backend"]["runtime"]
        raise _unable("layers", f"an engine of {runtime}, which lists no layers")
    listed = layers_from_json(artefact.read_file(LAYERS_FILE))
    if backend is not None:
        listed = with_times(listed, _times_ms(artefact, backend))
    return ArtefactInspection(artefact, listed)


def _times_ms(artefact: Artefact, backend: Backend) -> dict[str, float]:
    check_runtime(artefact, backend.describe())
    with closing(backend.load(artefact.read_engine())) as engine:
        if not isinstance(engine, ProfiledEngine):
            raise _unable("time", f"an engine of {backend.name}, which does not time its layers")
        image = engine.inputs[0]
        shapes = artefact.manifest["inputs"]["spec"]["profiles"]
        shape = shapes[0][image.name]["opt"] if shapes else [size or 1 for size in image.shape]
        return engine.layer_times_ms(np.zeros(shape, image.dtype))


def print_artefact_inspection(inspection: ArtefactInspection, console: Console) -> None:
    """Print an inspection for people: the facts, then the table of layers.

    A layer computes the model's nodes in it; where there are none but our own, its name stands in their place.
    """
    for name, fact in inspection.facts.items():
        console.print(f"{name:18} {fact}", highlight=False, markup=False)
    if inspection.layers is None:
        return
    timed = any(layer.time_ms is not None for layer in inspection.layers)
    heads, rows = ("computes", "type", "reads", "writes", *(["ms"] if timed else []), "format", "tactic"), []
    for layer in inspection.layers:
        time_ms = "" if layer.time_ms is None else f"{layer.time_ms:.4f}"
        reads, writes = layer.precision, "/".join(dict.fromkeys(layer.outputs))
        facts = (layer.kind, reads, writes, *([time_ms] if timed else []), layer.format, layer.tactic)
        nodes = ", ".join(node for node in layer.nodes if not node.endswith(_OURS))
        rows.append((nodes or layer.name, *facts))
    console.print(tabulate(heads, rows, console.width, prose=("computes", "tactic")))


def _unable(code: str, found: str) -> TaredError:
    remedy = "build it with --backend tensorrt, on the board"
    return EngineError(f"inspect.{code}", found, "an engine of tensorrt", remedy)
