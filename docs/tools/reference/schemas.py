"""Describe JSON Schemas, which pydantic makes of its models: the type and the range of a field, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from docs.tools.reference.markdown import code

_TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "null": "null"}

Schema = Mapping[str, Any]


def reference_of(node: Schema) -> str | None:
    """Return the name of the model that a field holds by itself, or null; None if it holds none."""
    names = [each["$ref"].rpartition("/")[2] for each in (node, *node.get("anyOf", ())) if "$ref" in each]
    return names[0] if len(names) == 1 else None


def kind(node: Schema, links: Mapping[str, str]) -> str:
    """Return the type of a field as Markdown. links: by the name of a model, how the page shows it."""
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        return links.get(name, name)
    if "anyOf" in node:
        return " or ".join(dict.fromkeys(kind(each, links) for each in node["anyOf"]))
    if "const" in node:
        return code(json.dumps(node["const"]).strip('"'))
    if "enum" in node:
        return ", ".join(code(each) for each in dict.fromkeys(str(each) for each in node["enum"]))
    if node.get("type") == "array":
        return _list(node, links)
    if node.get("type") == "object":
        inside = node.get("additionalProperties")
        return f"keys and {kind(inside, links)}" if isinstance(inside, Mapping) and inside else "keys and values"
    if node.get("format") == "path":
        return "path"
    return _TYPES.get(node.get("type", ""), "any JSON value")


def _list(node: Schema, links: Mapping[str, str]) -> str:
    if "prefixItems" in node:
        kinds = [kind(each, links) for each in node["prefixItems"]]
        return f"list of {len(kinds)} {kinds[0]}s" if len(set(kinds)) == 1 else f"list of {', '.join(kinds)}"
    inside = kind(node.get("items", {}), links)
    return f"list of {inside}s" if inside in ("integer", "number", "path") else f"list of {inside}"


def bounds(node: Schema) -> str:
    """Return the range of a field in words; empty if it has none."""
    found = [_bounds(each) for each in (node, *node.get("anyOf", ()))]
    inner = node.get("items")
    found += [f"each {words}" for words in [_bounds(inner) if isinstance(inner, Mapping) else ""] if words]
    return "; ".join(dict.fromkeys(each for each in found if each))


def _bounds(node: Schema) -> str:
    parts = [
        f"{words} {_number(node[key])}{unit}"
        for key, words, unit in (
            ("minimum", "at least", ""),
            ("exclusiveMinimum", "above", ""),
            ("maximum", "at most", ""),
            ("exclusiveMaximum", "below", ""),
            ("minItems", "at least", " items"),
            ("maxItems", "at most", " items"),
            ("minProperties", "at least", " keys"),
            ("maxProperties", "at most", " keys"),
            ("maxLength", "at most", " characters"),
        )
        if key in node and not (key in ("minItems", "maxItems") and "prefixItems" in node)
    ]
    if "minimum" in node and "maximum" in node and len(parts) == 2:
        return f"{_number(node['minimum'])} to {_number(node['maximum'])}"
    if "minItems" in node and node.get("minItems") == node.get("maxItems") and "prefixItems" not in node:
        return f"{node['minItems']} items"
    return ", ".join([*parts, *([f"pattern {code(node['pattern'])}".replace("|", "\\|")] if "pattern" in node else [])])


def _number(value: float) -> str:
    for power in (31, 53, 63):
        if value == 2**power:
            return f"2^{power}"
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else f"{value:.0f}"
