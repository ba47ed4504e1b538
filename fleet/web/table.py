"""Keep the rows of the fleet's table as HTML: each is made once for each change of its board.

A thousand boards that report every few seconds would otherwise cost a page's server more than it has. A page is sent
the rows that have changed since its `mark`.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from markupsafe import Markup

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.html.pages import environment
from fleet.web.boards import LiveBoards
from fleet.web.views import fleet_row, state_of

PACKAGE = "fleet.web"  # has the templates


@dataclass(frozen=True)
class _Row:
    """A row as HTML. serial: of its newest change."""

    key: tuple[int, str]  # the board's version, and its state, which also the clock changes
    html: Markup
    serial: int


class FleetTable:
    """The rows by board. For the thread that serves the pages."""

    def __init__(self, boards: LiveBoards, clock: Clock = SYSTEM_CLOCK) -> None:
        self._boards, self._clock = boards, clock
        self._template = environment(PACKAGE).get_template("fleet_row.html")
        self._rows: dict[str, _Row] = {}
        self._serial = 0
        self._instance = secrets.token_hex(4)  # a mark of another process means nothing here

    @property
    def mark(self) -> str:
        """Stands for all changes so far."""
        return f"{self._instance}.{self._serial}"

    def rows_since(self, mark: str = "") -> Markup:
        """Return the rows that have changed since a mark, in the order of the boards' names; all, for one unknown."""
        self._update(self._clock.wall_s())
        instance, _, serial = mark.partition(".")
        known = int(serial) if instance == self._instance and serial.isascii() and serial.isdigit() else 0
        return Markup().join(row.html for _, row in sorted(self._rows.items()) if row.serial > known)

    def _update(self, now: float) -> None:
        for name in self._boards.names():
            board, row = self._boards.get(name), self._rows.get(name)
            if board is None:
                continue
            key = board.version, state_of(board, now)[0]
            if row is None or row.key != key:
                self._serial += 1
                html = Markup(self._template.render(row=fleet_row(name, board, now)))
                self._rows[name] = _Row(key, html, self._serial)
