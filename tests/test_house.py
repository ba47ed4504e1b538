"""The house stays in order: rooms of a readable size, names used once, and a map that is true."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import ROOT

from agent.vision.answer import Answer
from agent.vision.registry import TASKS, task_class

PRODUCT = ("agent", "calibrate", "engines", "fleet")
MAP = ROOT / "docs" / "contributing" / "architecture.md"
JOURNEYS = {
    "A frame, ": 18,
    "A calibration, ": 20,
    "A change of engine, ": 48,
    "A plan, ": 12,
    "A command, ": 20,
}  # files at most
# Only these look into an answer, or compare the name of a task. `spec_guess` reads it in metadata of other projects.
TASK_HOMES = (
    "agent/vision/tasks/",
    "agent/vision/detections.py",
    "agent/vision/registry.py",
    "agent/inspection/spec_guess.py",
)
# `found` alone is a term: an error says what was found, what was expected, and the remedy.
# `ConfusedPair.of` is a key of plan.json.
KEPT = {"agent/validation/confusion.py: of"}
IDIOM = re.compile(r"(?:^|_)(?:told|tell|tells|asked|beside|look|looks|anew|news)(?:_|$)|^_?(?:over|of)$")


def modules() -> list[Path]:
    return [path for name in PRODUCT for path in sorted((ROOT / name).rglob("*.py"))]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def test_a_newcomer_sees_few_names_and_no_crowded_room() -> None:
    assert len([path for path in (ROOT / "agent").iterdir() if not path.name.startswith("__pycache__")]) <= 27
    rooms: dict[Path, int] = defaultdict(int)
    for path in modules():
        rooms[path.parent] += path.name not in ("__init__.py", "__main__.py")
    assert {room: count for room, count in rooms.items() if count > 16} == {}


def test_a_package_says_its_purpose_and_holds_nothing_else() -> None:
    for path in (path for path in modules() if path.name == "__init__.py"):
        tree = parsed(path)
        assert ast.get_docstring(tree), path
        # Importing `engines` first keeps ONNX Runtime from reporting elsewhere.
        assert len(tree.body) == 1 or path == ROOT / "engines" / "__init__.py", path


def test_no_public_class_name_stands_twice() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT))
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_names_are_those_of_the_field() -> None:
    idiom = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in modules()
        for name in defined_names(parsed(path))
        if IDIOM.search(name)
    }
    assert idiom == KEPT


def answer_classes(base: type[Any] = Answer) -> Iterator[str]:
    """Yield the names of all answers that a task of tared's own has."""
    for each in base.__subclasses__():
        if each.__module__.startswith("agent."):
            yield each.__name__
            yield from answer_classes(each)


def test_nothing_outside_the_tasks_asks_which_task_it_is() -> None:
    for task in TASKS:
        task_class(task)  # which imports its answers
    answers = set(answer_classes())
    assert {"Classification", "Poses", "OrientedBoxes", "DepthMap"} <= answers
    asked = []
    for path in modules():
        name = str(path.relative_to(ROOT))
        if name.startswith(TASK_HOMES):
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, (ast.Compare, ast.Dict, ast.MatchValue)):
                asking = node.keys if isinstance(node, ast.Dict) else ast.walk(node)
                constants = (each.value for each in asking if isinstance(each, ast.Constant))
                found = {each for each in constants if isinstance(each, str)} & set(TASKS)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in {"isinstance", "type"}:
                found = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & answers
            else:
                continue
            asked += [f"{name}:{node.lineno}"] if found else []
    assert asked == []


def test_every_file_on_the_map_is_there() -> None:
    named = re.findall(r"`((?:agent|calibrate|engines|fleet|tests)/[\w./]+)`", MAP.read_text(encoding="utf-8"))
    assert len(named) > 80
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_opens_few_files(journey: str) -> None:
    text = MAP.read_text(encoding="utf-8")
    (steps,) = re.findall(rf"^{re.escape(journey)}.*\n\n((?:(?:\d+\. |  ).*\n)+)", text, re.MULTILINE)
    assert 0 < len(set(re.findall(r"`([\w./]+\.py)`", steps))) <= JOURNEYS[journey]
