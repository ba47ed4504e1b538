"""Reads pages of `tared web`, and refuses those in which anything of elsewhere could run."""

from __future__ import annotations

import re
from html.parser import HTMLParser


class Checked(HTMLParser):
    """A page whose scripts and links are its own server's."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words = ""
        self.feed(text)
        assert "\u202e" not in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        for name in ("src", "href", "action"):
            assert re.match(r"/(?!/)|data:,|#", named.get(name) or "/"), named
        assert not {name for name in named if name.startswith("on") or name == "style"}
        assert tag != "script" or named.get("src")

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"
