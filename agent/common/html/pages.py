"""Render templates: autoescaped, strict about names, with one style and one script for all pages.

A report is one file: it carries both, allowed by their hashes alone. Nothing else in it runs, and it fetches nothing.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agent.common.html.text import visible

_PACKAGE = "agent.common.html"
_LONGEST = 2000  # characters of one text


@cache
def resource(name: str) -> str:
    """Return the text of a file in `templates/`: `style.css`, `page.js`."""
    return (files(_PACKAGE) / "templates" / name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Table:
    """Rows of cells: a text, or what is shown and what it is sorted by.

    heads: the title of each column, and whether it holds numbers. filters: a field above it hides rows by their text.
    chosen: the rows that stand out.
    """

    heads: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    filters: bool = False
    chosen: Sequence[int] = ()


@dataclass(frozen=True)
class Figure:
    """A chart, and what its colours mean: colours by name."""

    title: str
    chart: Markup
    key: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Section:
    """A part of a report; what it does not have is left out. pictures: JPEG or PNG, each with the text below it."""

    title: str
    text: Sequence[str] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[tuple[bytes, str]] = ()


@cache
def environment(package: str = _PACKAGE) -> Environment:
    """Return the environment of a package's templates; those of this one are found after them."""
    loader = ChoiceLoader([PackageLoader(each) for each in dict.fromkeys((package, _PACKAGE))])
    made = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_shown, trim_blocks=True, lstrip_blocks=True
    )
    made.filters.update(visible=visible, picture=_picture)
    return made


def _shown(value: object) -> object:
    """Make every text visible that a template shows; markup of this package stays as it is."""
    return value if isinstance(value, Markup) else visible(value, _LONGEST)


def render_report(title: str, lead: str, sections: Sequence[Section], facts: Mapping[str, str] | None = None) -> str:
    """Return a report that is one HTML file.

    >>> page = render_report("<b>", "One sentence.", [])
    >>> "&lt;b&gt;" in page and "//" not in page.partition("<body>")[2].partition("<script>")[0]
    True
    """
    # The style and the script are files of this package: neither holds text that would end its element.
    style, script = Markup(resource("style.css")), Markup(resource("page.js"))
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    return (
        environment()
        .get_template("report.html")
        .render(
            title=title, lead=lead, facts=facts or {}, sections=sections,
            style=style, script=script, policy=policy, made=made,
        )
    )  # fmt: skip


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _picture(content: bytes) -> Markup:
    """Return a JPEG or PNG as the address by which the page that holds it shows it."""
    kind = "png" if content.startswith(b"\x89PNG") else "jpeg"
    return Markup("data:image/{};base64,{}").format(kind, base64.b64encode(content).decode())


def show_share(share: float | None) -> str:
    """Show a share in [0, 1] as a percentage; 0 % and 100 % only if exact."""
    if share is None:
        return ""
    percent = 100.0 * share
    if 0.0 < percent < 0.05:
        return "< 0.1 %"
    return "> 99.9 %" if 99.95 <= percent < 100.0 else f"{percent:.1f} %"


def show_bytes(size: float) -> str:
    """Show a size in the unit that fits."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def show_time(at: float) -> str:
    """Show Unix time in s, in UTC; the text is not broken at its ends of words."""
    return time.strftime("%Y\u2011%m\u2011%d\u00a0%H:%M:%S", time.gmtime(at))
