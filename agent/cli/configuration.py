"""Print the JSON Schemas of config.yaml and model.yaml, or the reference config.yaml, or check one: `tared config`.

A schema's keys, types, bounds and defaults are those of the pydantic models that read the files; its descriptions are
the comments of the reference config.yaml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.cli.arguments import command, option, print_result

if TYPE_CHECKING:  # imported when the command runs, as in offline.py
    from pydantic import BaseModel

    from agent.config import Config

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_MODEL_BLOCK = re.compile(r"(?m)^#\n((?:^#   .*\n)+)^model:")

KeyPath = tuple[str, ...]


def load_board_config(path: Path, root: Path = Path("/")) -> Config:
    """Load config.yaml as the daemon that starts with it does: a service has the state directory that systemd names.

    Raises ConfigError as `load_config`.
    """
    from agent.config import load_config
    from agent.system.service_unit import SystemdService

    service = SystemdService.from_config(path, root)
    if service is not None:
        os.environ.setdefault("STATE_DIRECTORY", str(root / service.state_path))
    return load_config(path)


def add_configuration(commands: Any) -> None:
    """Add `tared config`."""
    config = command(commands, "config", _config, "print the JSON Schema or the reference of config.yaml, or check one")
    shown = config.add_mutually_exclusive_group(required=True)
    which = "print the JSON Schema of config.yaml, or of model.yaml (default: config)"
    shown.add_argument("--schema", nargs="?", const="config", choices=("config", "model"), help=which)
    shown.add_argument("--example", action="store_true", help="print the reference config.yaml: every key, its default")
    checked = "report all errors of a file at once (default: config.yaml)"
    option(shown, "--check", "FILE", checked, Path, nargs="?", const=Path("config.yaml"))


def _config(options: argparse.Namespace) -> int:
    """Run `tared config`: print a schema or the reference, or check a file."""
    from agent.system.service_unit import shipped_path

    reference = shipped_path("config.yaml").read_text(encoding="utf-8")
    if options.check is not None:
        return _check(options)
    if options.schema is None:
        return print_result(options, {"example": reference}, lambda: print(reference, end=""))
    schema = config_schema if options.schema == "config" else model_schema
    print(json.dumps(schema(reference), indent=1))
    return 0


def _check(options: argparse.Namespace) -> int:
    """Run `tared config --check`: report all errors of a file at once, or that it is valid.

    Raises ConfigError (`config.invalid` among others) for a file with errors.
    """
    from agent.config import check_config

    config = check_config(options.check)
    cameras = [camera.name for camera in config.every_camera]
    result = {"file": str(options.check), "model": str(config.model.path), "camera_names": cameras}
    valid = f"{options.check} is valid: model {config.model.path}, cameras {', '.join(cameras)}"
    return print_result(options, result, lambda: print(valid))


def config_schema(reference: str) -> dict[str, Any]:
    """Return the JSON Schema of config.yaml.

    Args:
        reference: Text of the reference config.yaml, whose comments describe the keys.
    """
    from agent.config import Config

    schema = _schema(Config, "tared's config.yaml", comments(reference))
    inline = schema["properties"]["model"]
    schema["properties"]["model"] = {
        "anyOf": [{"type": "string"}, {"$ref": inline["$ref"]}],  # `load_config` reads a path before it validates
        "description": inline.get("description", ""),
    }
    return schema


def model_schema(reference: str) -> dict[str, Any]:
    """Return the JSON Schema of model.yaml.

    Args:
        reference: Text of the reference config.yaml, which holds a model.yaml in its comments.
    """
    from agent.vision.spec import ModelSpec

    return _schema(ModelSpec, "a model's spec for tared", comments(model_example(reference)))


def model_example(reference: str) -> str:
    """Return the model.yaml that stands in a comment of the reference config.yaml."""
    block = _MODEL_BLOCK.search(reference)
    assert block is not None, "the reference config.yaml shows a model.yaml"
    return "".join(f"{line[4:]}\n" for line in block[1].splitlines())


def _schema(model: type[BaseModel], title: str, described: Mapping[KeyPath, str]) -> dict[str, Any]:
    schema = model.model_json_schema()
    for path, text in described.items():
        node = _find(schema, path)
        if node is not None and text:
            node["description"] = text
    return {"$schema": _DRAFT, **schema, "title": title}


def _find(schema: dict[str, Any], path: KeyPath) -> dict[str, Any] | None:
    """Return the schema of a key; None for a key of an open mapping."""
    node = schema
    for name in path:
        choices = [node, *node.get("anyOf", ())]
        name_of = next((each["$ref"].rpartition("/")[2] for each in choices if "$ref" in each), None)
        properties = (schema["$defs"][name_of] if name_of else node).get("properties", {})
        if name not in properties:
            return None
        node = properties[name]
    return node


def comments(text: str) -> dict[KeyPath, str]:
    """Return the comments of each key of a YAML file: above it, or above the keys right before it, and behind it.

    A comment behind a key goes on in lines that hold nothing but a comment in the same column.
    """
    found: dict[KeyPath, str] = {}
    path: list[tuple[int, str]] = []
    above, after_key, column = "", False, -1
    for line in text.splitlines():
        key = re.match(r"( *)(\w+):(.*)", line)
        if key:
            depth = len(key[1])
            path = [(level, name) for level, name in path if level < depth] + [(depth, key[2])]
            behind = key[3].partition("#")[2]
            found[tuple(name for _, name in path)] = f"{above} {behind}".strip()
            column = line.find("#") if behind else -1
        elif line.find("#") == column >= 0 and not line[:column].strip():
            found[tuple(name for _, name in path)] += f" {line[column:].strip(' #')}"
            continue
        elif re.match(r" *# ?\S", line):  # further in stands an example
            above = "" if after_key else above
            above += " " + line.strip(" #")
        elif not line.strip():
            above = ""
        after_key = key is not None
    return found
