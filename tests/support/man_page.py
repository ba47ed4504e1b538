"""Prints tared's man page in troff, from the parsers: `make generated` writes docs/tared.1 with it."""

from __future__ import annotations

import os
from unittest import mock

from build_manpages.manpage import Manpage

from agent.cli.main import make_parser
from fleet.cli.main import GROUPS


def man_page() -> str:
    """Return the page; it depends on no machine, date or terminal."""
    with mock.patch.dict(os.environ, {"COLUMNS": "80", "SOURCE_DATE_EPOCH": "0"}):
        page = Manpage(make_parser(GROUPS))
    page.date, page.source, page.manual = "", "tared", "User Commands"
    page.description = "keeps a quantised vision model true on the board that runs it"
    return str(page)


if __name__ == "__main__":
    print(man_page(), end="")
