"""Reads pages of the fleet, and refuses those that are not closed, or in which anything of elsewhere could run."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_VOID = {"br", "hr", "img", "input", "link", "meta"}


class Checked(HTMLParser):
    """A page whose tags are closed, and whose scripts and links are its own server's.

    is_file: the page is one file for itself, with a script inside, and links to its own parts alone.
    """

    def __init__(self, text: str, is_file: bool = False) -> None:
        super().__init__()
        self.words, self.tags = "", set[str]()
        self._open, self._is_file = list[str](), is_file
        self.feed(text)
        assert self._open == []
        assert "\u202e" not in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        named = dict(attrs)
        for name in {"src", "href", "action"} & named.keys():
            assert re.match("#" if self._is_file else r"/(?!/)|data:,|#", named[name] or ""), named
        assert not {name for name in named if name.startswith("on")}
        assert self._is_file or ("style" not in named and (tag != "script" or named.get("src")))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += f" {data}"
