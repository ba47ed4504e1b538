"""`tared inspect MODEL.onnx`: what a graph says, the spec guessed from it, and that spec as a file to correct."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from agent.errors import AgentError
from agent.graph_facts import GraphFacts, GraphOutput, GraphTensor, read_facts
from agent.model_guess import guess_head
from agent.spec_guess import Guess, guess_spec
from engines.backend import EngineError
from engines.graph import load_model

_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]*")


@dataclass(frozen=True)
class ModelInspection:
    """facts: what was seen. guesses: the spec. refusal: why tared cannot take this graph as it is; empty if it can.

    classes: how many its outputs have; 0 where that cannot be known.
    """

    path: Path
    facts: GraphFacts
    guesses: tuple[Guess, ...]
    refusal: str
    classes: int

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        seen = {
            "inputs": [asdict(tensor) for tensor in self.facts.inputs],
            "outputs": [asdict(tensor) for tensor in self.facts.outputs],
            "layout": self.facts.layout,
            "producer": self.facts.producer,
            "opset": self.facts.opset,
        }
        guesses = [asdict(guess) for guess in self.guesses]
        return {"model": str(self.path), "seen": seen, "guesses": guesses, "refusal": self.refusal}


def inspect_model(path: Path) -> ModelInspection:
    """Look at an ONNX file and guess its spec.

    Raises EngineError as `load_model` does, but for `model.input`, which is told: to guess on helps to export it again.
    """
    refusal = ""
    try:
        load_model(path)
    except EngineError as error:
        if error.code != "model.input":
            raise
        refusal = str(error)
    facts = read_facts(path)
    head = guess_head(facts)
    return ModelInspection(path, facts, guess_spec(facts, head), refusal, head.classes)


def write_spec(inspection: ModelInspection, path: Path, may_overwrite: bool) -> None:
    """The guessed spec as a file, every key with a comment. Raises AgentError: `inspect.exists`, `inspect.output`."""
    try:
        with path.open("w" if may_overwrite else "x", encoding="utf-8") as file:
            file.write("\n".join(_lines(inspection, path.parent)) + "\n")
    except FileExistsError:
        expected, remedy = "a new file", "name another with -o, or say --overwrite"
        raise AgentError("inspect.exists", f"{path} is there already", expected, remedy) from None
    except OSError as error:
        found = f"{path}: {error.strerror}"
        raise AgentError("inspect.output", found, "a file that can be written", "name another with -o") from error


def print_model_inspection(inspection: ModelInspection, console: Console) -> None:
    """For people: what was seen, then what was guessed."""
    facts = inspection.facts
    rows = [("input", _shown(tensor)) for tensor in facts.inputs]
    rows += [("output", f"{_shown(output)}, by {_makers(output)}") for output in facts.outputs]
    rows += [("made by", f"{facts.producer or 'unknown'}, opset {facts.opset}")]
    rows += [("refused", inspection.refusal)] if inspection.refusal else []
    for name, fact in rows:
        console.print(f"{name:10} {fact}", highlight=False, markup=False)
    table = Table("key", "guess", "how sure", "why", box=None)
    for guess in inspection.guesses:
        table.add_row(guess.key, _yaml(guess.value), guess.sureness, guess.reason)
    console.print(table, highlight=False, markup=False)


def _shown(tensor: GraphTensor) -> str:
    return f"{tensor.name} {tensor.dtype} [{', '.join('?' if side is None else str(side) for side in tensor.shape)}]"


def _makers(output: GraphOutput) -> str:
    return ", ".join(dict.fromkeys(output.made_by)) or "nothing"


def _lines(inspection: ModelInspection, folder: Path) -> Iterator[str]:
    name = inspection.path.name
    yield f"# Guessed by 'tared inspect {_one_line(name)}'. Behind each key: how sure, and why. Correct what is wrong."
    if inspection.refusal:
        yield f"# Not usable as it is: {_one_line(inspection.refusal)}"
    yield f"path: {_yaml(os.path.relpath(inspection.path.resolve(), folder.resolve()))}"
    is_inside = False
    for guess in inspection.guesses:
        section, _, key = guess.key.rpartition(".")
        if section and not is_inside:
            yield f"{section}:"
        is_inside = bool(section)
        yield f"{'  ' if section else ''}{key}: {_yaml(guess.value)}  # {guess.sureness}: {_one_line(guess.reason)}"
    if inspection.classes and "labels" not in [guess.key for guess in inspection.guesses]:
        yield f"# labels: labels.txt  # one name per line, {inspection.classes} in all: the graph has none"


def _yaml(value: object) -> str:
    """A value as YAML on one line."""
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and yaml.safe_load(value) == value  # 'no' is a word, and a boolean
        return value if is_plain else yaml.safe_dump(value, default_style='"', width=math.inf).strip()
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_yaml(key)}: {_yaml(each)}' for key, each in value.items())}}}"
    return json.dumps(value)


def _one_line(text: str) -> str:
    return " ".join(text.split())
