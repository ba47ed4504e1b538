"""docs/telegraf/telegraf.conf: its expressions, looked up in documents of a board."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree.ElementTree import Element, SubElement

import pytest
from places import ROOT

CONF = ROOT / "docs/telegraf/telegraf.conf"


def inputs() -> list[dict[str, Any]]:
    """The sections that read MQTT."""
    tomllib = pytest.importorskip("tomllib")  # of Python 3.11
    found: list[dict[str, Any]] = tomllib.loads(CONF.read_text(encoding="utf-8"))["inputs"]["mqtt_consumer"]
    return found


def unanswered(kind: str, documents: Sequence[dict[str, Any]]) -> set[str]:
    """The paths of the section for this kind of document that lead nowhere in any of the documents."""
    (section,) = [each for each in inputs() if each["topics"] == [f"tared/v1/+/+/{kind}"]]
    wanted = {path for query in section["xpath"] for path in _paths(query)}
    trees = [_tree(document) for document in documents]
    return {path for path in wanted if not any(tree.find(path) is not None for tree in trees)}


def _paths(query: dict[str, Any]) -> Iterator[str]:
    """From the document's root, as ElementTree takes them."""
    selected = query.get("metric_selection", "").removeprefix("/")
    for expression in [query.get("timestamp", ""), *query.get("tags", {}).values(), *query["fields"].values()]:
        for path in re.findall(r"(?:number|string|sum)\(([a-z_0-9/*]+)\)", expression):
            yield path.removeprefix("/") if path.startswith("/") or not selected else f"{selected}/{path}"


def _tree(document: dict[str, Any]) -> Element:
    """A document as the parser sees it: keys are nodes."""

    def grow(node: Element, value: Any) -> None:
        for key, each in value.items() if isinstance(value, dict) else ():
            grow(SubElement(node, key), each)

    root = Element("document")
    grow(root, document)
    return root
