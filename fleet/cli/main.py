"""Start `tared`: the board's commands and the control room's, in one command line."""

from __future__ import annotations

from collections.abc import Sequence

from agent.cli import main as board
from fleet.cli.fleet import add_fleet
from fleet.cli.operator import add_operator

GROUPS = (add_operator, add_fleet)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, as `agent.cli.main.main` does."""
    return board.main(arguments, extra=GROUPS)
