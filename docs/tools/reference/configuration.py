"""The pages of config.yaml and MODEL.yaml: keys, types, ranges and defaults of the schema, the comments' meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from agent.cli.configuration import config_schema, model_example, model_schema
from agent.mqtt.endpoint import TlsFiles
from agent.vision.spec import ProfileShapes
from docs.tools.reference.docstrings import arguments
from docs.tools.reference.markdown import anchored, code, fenced, heading, page, paragraph, prose, table
from docs.tools.reference.schemas import bounds, kind, reference_of
from docs.tools.reference.source import ROOT

_HEADS = ("Key", "Type", "Range", "Default", "Meaning")
_OF_DOCSTRINGS: Mapping[tuple[str, ...], type[BaseModel]] = {
    ("mqtt", "tls"): TlsFiles,
    ("profiles", "shapes"): ProfileShapes,
}
_CONFIGURATION = """\
Every key of config.yaml: first those that people set, in the order in which they do, then the others by section.
`tared init` writes the first ones, `tared config --example` prints all, and `tared config --check FILE` reports all
errors of a file at once. Only `model` and `camera.source` are required.

Relative paths are relative to the folder of the file. Times are in seconds of capture time, which is media time for
files, unless a key says otherwise. Keys that a release has taken out are ignored, and named in the log and by --check."""
_MODEL = """\
Every key of MODEL.yaml, the description of one model. The same keys may stand in config.yaml under `model`.
`tared inspect MODEL.onnx -o MODEL.yaml` writes a file, and `tared check MODEL.yaml` tries it on a picture."""


def configuration_page() -> str:
    """Return the page of config.yaml."""
    schema = config_schema(_reference())
    return page("Configuration", _CONFIGURATION, _parts(schema))


def model_page() -> str:
    """Return the page of MODEL.yaml."""
    reference = _reference()
    return page("Model spec", _MODEL, [fenced(model_example(reference), "yaml"), *_parts(model_schema(reference))])


def _reference() -> str:
    return (ROOT / "config.yaml").read_text(encoding="utf-8")


def _parts(schema: dict[str, Any]) -> Iterator[str]:
    links = {
        "ModelSpec": "[model spec](model-spec.md)",
        "CameraConfig": "[camera](#camera)",
        "ProfileShapes": "keys and [shapes](#profiles-shapes)",
    }
    top, sections = _split(schema, schema, ())
    links |= {name: f"[section](#{'-'.join(path).replace('_', '-')})" for path, name in sections if name not in links}
    yield heading(2, "top-level-keys", "Keys of no section")
    yield table(_HEADS, [_row((), name, node, schema, links) for name, node in top])
    if "ProfileShapes" in schema["$defs"] and "ModelSpec" not in schema["$defs"]:
        sections.append((("profiles", "shapes"), "ProfileShapes"))
    while sections:
        path, name = sections.pop(0)
        node = schema["$defs"][name]
        leaves, inner = _split(schema, node, path)
        links |= {each: f"[section](#{'-'.join(deeper).replace('_', '-')})" for deeper, each in inner}
        yield heading(2, ".".join(path))
        if text := _about(schema, path, node):
            yield text
        if leaves:
            yield table(_HEADS, [_row(path, key, each, node, links) for key, each in leaves])
        sections = inner + sections


_Keyed = list[tuple[str, dict[str, Any]]]


def _split(
    schema: dict[str, Any], node: dict[str, Any], path: tuple[str, ...]
) -> tuple[_Keyed, list[tuple[tuple[str, ...], str]]]:
    """Return the keys of a section that hold values, and its inner sections with the names of their models."""
    leaves: _Keyed = []
    sections: list[tuple[tuple[str, ...], str]] = []
    for name, each in node["properties"].items():
        model = reference_of(each)
        is_section = model is not None and model != "ModelSpec" and "properties" in schema["$defs"][model]
        if is_section and model is not None:
            sections.append(((*path, name), model))
        may_be_null = any(choice.get("type") == "null" for choice in each.get("anyOf", ()))
        if not is_section or (may_be_null and name != "camera"):
            leaves.append((name, each))
    return leaves, sections


def _about(schema: dict[str, Any], path: tuple[str, ...], model: dict[str, Any]) -> str:
    """Return the comment above a section, else the first paragraphs of its class."""
    node = schema
    for name in path[:-1]:
        owner = reference_of(node["properties"][name])
        node = schema["$defs"][owner] if owner else node
    described = node.get("properties", {}).get(path[-1], {}).get("description")
    text: str = described if described and path != ("mqtt", "tls") else model.get("description", "")
    return "\n\n".join(_paragraphs(text))


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a docstring up to its arguments, whose meaning the table has."""
    for each in text.split("\n\n"):
        if each.startswith("Args:"):
            return
        lines = each.splitlines()
        if any(line.startswith("- ") for line in lines):
            items = "\n".join(lines).replace("\n  ", " ")
            at = items.index("- ")
            yield from filter(None, (items[:at].strip(), items[at:]))
        else:
            yield paragraph(prose(each))


def _row(
    path: tuple[str, ...], name: str, node: dict[str, Any], owner: dict[str, Any], links: dict[str, str]
) -> tuple[str, ...]:
    default = "required" if name in owner.get("required", ()) else code(_default(node))
    about = _cut(path, name, node.get("description", ""))
    is_section = (reference_of(node) or "ModelSpec") != "ModelSpec"  # whose heading has the anchor
    shown = code(name) if is_section else anchored(name, ".".join((*path, name)))
    return (shown, kind(node, links), bounds(node) or "", default, about)


def _default(node: dict[str, Any]) -> str:
    return json.dumps(node["default"]) if "default" in node else "{}"


def _cut(path: tuple[str, ...], name: str, text: str) -> str:
    """Return the meaning. Of MODEL.yaml, whose comments stand behind the keys, `required` has a column of its own."""
    return prose(text.removeprefix("required").lstrip(".: ") or _described(path, name))


def _described(path: tuple[str, ...], name: str) -> str:
    """Return what the docstring says of a key that no comment describes."""
    return arguments(_OF_DOCSTRINGS[path])[name]
