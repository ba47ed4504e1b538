"""Names in messages exist: keys of config.yaml and of a model's spec, commands of `tared` and their options."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
from places import ROOT
from pydantic import BaseModel

from agent.cli.main import make_parser
from agent.config import Config
from agent.vision.spec import ModelSpec
from docs.tools.reference.errors import errors, hindrances
from fleet.cli.main import GROUPS

HOLE = "\0"  # where an f-string has a value
KEY = re.compile(rf"(?<![\w./{HOLE}-])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w/({HOLE}-])")
FILES = (
    "json",
    "jsonl",
    "yaml",
    "onnx",
    "so",
    "sqlite",
    "txt",
    "png",
    "npz",
    "py",
    "xml",
    "bin",
    "engine",
    "cache",
    "flatbuffers",
)
SQL = re.compile(r"\b(?:SELECT|INSERT|UPDATE|DELETE|CREATE|PRAGMA)\b")
OTHER_TOOLS = re.compile(r"\b(?:venv|pip|v4l2-ctl|groupadd|tritonserver|trtexec|TensorRT provider)\b")
# A command is in quotes, as 'tared check MODEL.yaml --frames SRC', or is all of a remedy.
COMMAND = re.compile(rf"(?:^|'|: |; )tared (?!cannot|installed with)([a-z][^';,){HOLE}]*)")
OPTION = re.compile(rf"(?<![\w-])(--[a-z][a-z-]*)(?![\w{HOLE}])")


class Message(NamedTuple):
    where: str
    text: str


def pages() -> Iterator[Message]:
    """Yield the commands and the names in backticks of the documentation."""
    for path in (ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{path.relative_to(ROOT)}:{number}"
            yield from (Message(where, part) for part in re.findall(r"`([^`]+)`", line))
            if line.startswith("    tared "):
                yield Message(where, re.sub(r"\s{2,}#.*", "", line.strip()))


@cache
def messages() -> tuple[Message, ...]:
    """Return every text in the source that is a sentence: it has a space. Docstrings and SQL are none."""
    folders = (ROOT / package for package in ("agent", "calibrate", "engines", "fleet"))
    return tuple(message for folder in folders for path in sorted(folder.rglob("*.py")) for message in _messages(path))


def _messages(path: Path) -> Iterator[Message]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | alone:
            text = node.value
        else:
            continue
        if " " in text and not SQL.search(text):
            yield Message(f"{path.relative_to(ROOT)}:{node.lineno}", text)


def models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that a field may hold, itself, in a list or in a mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from models(part)


def is_key(path: list[str], model: type[BaseModel]) -> bool:
    if path[0] not in model.model_fields:
        return False
    below = list(models(model.model_fields[path[0]].annotation))
    return len(path) == 1 or any(is_key(path[1:], each) for each in below)


def is_known(path: list[str]) -> bool:
    return any(is_key(path, model) for model in (Config, ModelSpec)) or (
        path[0] == "model" and is_key(path[1:], ModelSpec)
    )


@cache
def parsers() -> dict[tuple[str, ...], argparse.ArgumentParser]:
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {}

    def add(parser: argparse.ArgumentParser, words: tuple[str, ...]) -> None:
        found[words] = parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, each in action.choices.items():
                    add(each, (*words, name))

    add(make_parser(GROUPS), ())
    return found


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def fault_of_command(line: str) -> str | None:
    """Return what is wrong with the words behind `tared`; None if nothing is."""
    words = line.split()
    known: tuple[str, ...] = ()
    while words and (*known, words[0]) in parsers():
        known = (*known, words.pop(0))
    if not known:
        return f"no command '{line}'"
    unknown = {word.rstrip(".?") for word in words if word.startswith("-")} - options(parsers()[known])
    return f"'{' '.join(known)}' has no {', '.join(sorted(unknown))}" if unknown else None


def test_keys_of_messages_are_keys() -> None:
    sections = {*Config.model_fields, *ModelSpec.model_fields}
    named = [
        (message.where, key)
        for message in messages()
        if not OTHER_TOOLS.search(message.text)
        for key in KEY.findall(message.text)
        if key.split(".")[0] in sections and key.split(".")[-1] not in FILES
    ]
    assert len(named) > 60
    assert [(where, key) for where, key in named if not is_known(key.split("."))] == []


def test_names_in_the_documentation_are_keys_or_codes() -> None:
    sections, known = (
        {*Config.model_fields, *ModelSpec.model_fields},
        {each.code for each in (*errors(), *hindrances())},
    )
    named = [
        (page.where, page.text)
        for page in pages()
        if KEY.fullmatch(page.text) and page.text.split(".")[0] in sections and page.text.split(".")[-1] not in FILES
    ]
    assert len(named) > 60
    assert [(where, key) for where, key in named if not is_known(key.split(".")) and key not in known] == []


def test_commands_of_messages_are_commands() -> None:
    texts = (*messages(), *pages())
    named = [(message.where, line) for message in texts for line in COMMAND.findall(message.text)]
    assert len(named) > 100
    faults = [(where, fault_of_command(line)) for where, line in named]
    assert [(where, fault) for where, fault in faults if fault is not None] == []


def test_options_of_messages_are_options_of_some_command() -> None:
    ours = set[str]().union(*map(options, parsers().values()))
    named = [(message.where, option, message.text) for message in messages() for option in OPTION.findall(message.text)]
    assert len(named) > 40
    assert [
        (where, option, text) for where, option, text in named if option not in ours and not OTHER_TOOLS.search(text)
    ] == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("inspect MODEL.onnx -o model.yaml", None),
        ("inspect MODEL.onnx --write", "'inspect' has no --write"),
        ("fleet rollout run", None),
        ("dance", "no command 'dance'"),
    ],
)
def test_a_wrong_command_would_be_noticed(line: str, fault: str | None) -> None:
    assert fault_of_command(line) == fault
    assert is_known(["recalibration", "max_loss"])
    assert not is_known(["recalibration", "maximal_loss"])
