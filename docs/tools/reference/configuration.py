"""The pages of config.yaml and MODEL.yaml: keys, types, ranges and defaults of the schema, the comments' meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from agent.cli.configuration import config_schema, model_example, model_schema
from agent.config import FIRST_KEYS
from agent.mqtt.endpoint import TlsFiles
from agent.vision.spec import ProfileShapes
from docs.tools.reference.docstrings import arguments
from docs.tools.reference.markdown import anchor, anchored, code, fenced, heading, page, paragraph, prose, table
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
files, unless a key says otherwise. A key of an earlier release that is gone is ignored, with a
warning."""
_MODEL = """\
Every key of MODEL.yaml, the description of one model. The same keys may stand in config.yaml under `model`.
`tared inspect MODEL.onnx -o MODEL.yaml` writes a file, and `tared check MODEL.yaml` tries it on a picture."""


def configuration_page() -> str:
    """Return the page of config.yaml."""
    schema = config_schema(_reference())
    return page("Configuration", _CONFIGURATION, _parts(schema, FIRST_KEYS))


def model_page() -> str:
    """Return the page of MODEL.yaml."""
    reference = _reference()
    return page("Model spec", _MODEL, [fenced(model_example(reference), "yaml"), *_parts(model_schema(reference))])


def _reference() -> str:
    return (ROOT / "config.yaml").read_text(encoding="utf-8")


@dataclass(frozen=True)
class _Section:
    """The keys of one section of a file.

    Attributes:
        path: The names that lead to it; empty for the top.
        schema: Of its model.
        leaves: The keys that hold values, with their schemas.
        inner: The paths of its inner sections, with the names of their models.
    """

    path: tuple[str, ...]
    schema: dict[str, Any]
    leaves: dict[str, dict[str, Any]]
    inner: dict[tuple[str, ...], str]

    def key(self, name: str) -> str:
        return ".".join((*self.path, name))


def _parts(schema: dict[str, Any], first: Sequence[str] = ()) -> Iterator[str]:
    """Yield the tables. first: the keys that stand before all sections, in this order."""
    sections = list(_sections(schema))
    links = {
        **{name: f"[section](#{anchor('.'.join(path))})" for each in sections for path, name in each.inner.items()},
        "ModelSpec": "[model spec](model-spec.md)",
        "CameraConfig": "[camera](#camera)",
        "ProfileShapes": "keys and [shapes](#profiles-shapes)",
    }
    if first:
        place = {section.key(name): (section, name) for section in sections for name in section.leaves}
        yield heading(2, "first-keys", "The keys that people set")
        yield table(_HEADS, [_row(*place[key], key, links) for key in first])
    for section in sections:
        path = section.path
        yield heading(2, ".".join(path) or "top-level-keys", None if path else "Keys of no section")
        if path and (text := _about(schema, path, section.schema)):
            yield text
        if above := [name for name in section.leaves if section.key(name) in first]:
            yield paragraph(f"Above: {', '.join(f'[{code(name)}](#{anchor(section.key(name))})' for name in above)}.")
        if rest := [name for name in section.leaves if section.key(name) not in first]:
            yield table(_HEADS, [_row(section, name, name, links) for name in rest])


def _sections(schema: dict[str, Any]) -> Iterator[_Section]:
    """Yield the sections in the order of the file, each before those within."""
    waiting: list[tuple[tuple[str, ...], dict[str, Any]]] = [((), schema)]
    if "ProfileShapes" in schema["$defs"] and "ModelSpec" not in schema["$defs"]:
        waiting.append((("profiles", "shapes"), schema["$defs"]["ProfileShapes"]))
    while waiting:
        section = _section(schema, *waiting.pop(0))
        yield section
        waiting = [(path, schema["$defs"][name]) for path, name in section.inner.items()] + waiting


def _section(schema: dict[str, Any], path: tuple[str, ...], node: dict[str, Any]) -> _Section:
    section = _Section(path, node, {}, {})
    for name, each in node["properties"].items():
        model = reference_of(each)
        is_section = model is not None and model != "ModelSpec" and "properties" in schema["$defs"][model]
        if is_section and model is not None:
            section.inner.update({(*path, name): model})
        may_be_null = any(choice.get("type") == "null" for choice in each.get("anyOf", ()))
        if not is_section or (may_be_null and name != "camera"):
            section.leaves[name] = each
    return section


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


def _row(section: _Section, name: str, title: str, links: dict[str, str]) -> tuple[str, ...]:
    """Return the row of a key. title: the name that is shown."""
    node = section.leaves[name]
    default = "required" if name in section.schema.get("required", ()) else code(_default(node))
    about = _cut(section.path, name, node.get("description", ""))
    has_heading = (reference_of(node) or "ModelSpec") != "ModelSpec"  # which has the anchor
    shown = code(title) if has_heading else anchored(title, section.key(name))
    return (shown, kind(node, links), bounds(node) or "", default, about)


def _default(node: dict[str, Any]) -> str:
    return json.dumps(node["default"]) if "default" in node else "{}"


def _cut(path: tuple[str, ...], name: str, text: str) -> str:
    """Return the meaning. Of MODEL.yaml, whose comments stand behind the keys, `required` has a column of its own."""
    return prose(text.removeprefix("required").lstrip(".: ") or _described(path, name))


def _described(path: tuple[str, ...], name: str) -> str:
    """Return what the docstring says of a key that no comment describes."""
    return arguments(_OF_DOCSTRINGS[path])[name]
