"""Write Markdown that mkdocs-material and GitHub show alike: tables, anchors, texts with code in them."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120
_MARKS = re.compile(r"([\\*\[\]|{}])")
_CODE = re.compile(r"`[^`]+`")
_WORDS = ("e.g", "i.e")  # which look like names with a dot
_KEYS = re.compile(r"(?<![\w./'\"{-])([a-z_]+(?:\.[a-z_0-9]+)+|[a-z]+(?:_[a-z0-9]+)+)(?![\w/'\"({}=-])")


def page(title: str, introduction: str, parts: Iterable[str]) -> str:
    """Return a page; the introduction is wrapped."""
    written = "<!-- Written by `make generated` from the code. Change the code, not this page. -->"
    text = "\n\n".join([written, f"# {title}", introduction, *parts])
    return f"{text.rstrip()}\n"


def paragraph(text: str) -> str:
    """Wrap one paragraph of prose."""
    return textwrap.fill(" ".join(text.split()), WIDTH, break_long_words=False, break_on_hyphens=False)


def heading(depth: int, name: str, title: str | None = None) -> str:
    """Return a heading with an anchor that does not depend on how a site makes them from titles."""
    return f'{"#" * depth} <a id="{anchor(name)}"></a>{title or name}'


def anchor(name: str) -> str:
    """Return the id of a name: `camera.max_pixels` is at `#camera-max-pixels`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def anchored(name: str, id_of: str | None = None) -> str:
    """Return a name as code, with its anchor."""
    return f'<a id="{anchor(id_of or name)}"></a>{code(name)}'


def code(text: object) -> str:
    return f"`{text}`"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the cells are Markdown already, in one line each."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(each) + " |" for each in lines)


def prose(text: str) -> str:
    """Return plain text as Markdown: marks are escaped, names with dots or underscores are code."""
    shown, at = "", 0
    for found in _CODE.finditer(text):  # a text may have code in backticks already
        shown += _plain(text[at : found.start()]) + found[0].replace("|", "\\|")
        at = found.end()
    return shown + _plain(text[at:])


def _plain(text: str) -> str:
    parts = _KEYS.split(text)  # a name stands at every second place
    is_code = (bool(number % 2) and part not in _WORDS for number, part in enumerate(parts))
    return "".join(code(part) if found else _escaped(part) for found, part in zip(is_code, parts, strict=True))


def _escaped(text: str) -> str:
    return _MARKS.sub(r"\\\1", text).replace("<", "&lt;").replace("`", "\\`")


def fenced(text: str, language: str) -> str:
    return f"```{language}\n{text.rstrip()}\n```"


def as_json(value: object, indent: int = 0) -> str:
    """Return a value as JSON that fits the width of a page: what is too long for a line has a line for each member."""
    short = json.dumps(value, ensure_ascii=False)
    if len(short) + indent <= WIDTH - 20 or not isinstance(value, dict):
        return short
    pad = " " * (indent + 2)
    members = [f"{pad}{json.dumps(name)}: {as_json(member, indent + 2)}" for name, member in value.items()]
    return "{\n" + ",\n".join(members) + f"\n{' ' * indent}}}"
