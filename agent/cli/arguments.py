"""Share parsers and printing among all commands, the board's and the control room's."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from agent.common.errors import AgentError

if TYPE_CHECKING:
    from rich.console import Console

_PIPED_COLUMNS = 240  # of a table that is piped on


class Parser(argparse.ArgumentParser):
    """Reports wrong arguments in the form of all other errors (AgentError, `cli.arguments`)."""

    def error(self, message: str) -> NoReturn:
        raise AgentError("cli.arguments", message, "arguments as documented", f"see '{self.prog} --help'")


def command(commands: Any, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    """Add a command with --json, and return its parser.

    Args:
        commands: argparse's subparsers.
        run: runs the command with the parsed options; returns the exit code.
        text: the help, and the description.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)
    return parser


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers from `low` to `high`, for argparse's `type`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not low <= value <= high:
            bound = "up" if high == math.inf else f"to {high}"
            raise argparse.ArgumentTypeError(f"expected a number from {low} {bound}, got '{text}'")
        return value

    return parse


def print_result(options: argparse.Namespace, result: dict[str, Any]) -> int:
    """Print a result for people, or with --json as one object; return the exit code of success."""
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:16} {value}")
    return 0


def table_console() -> Console:
    """A console on stdout, wide where it is piped, so that no table is cut."""
    from rich.console import Console  # most commands print no table, and its import takes a third of their start

    return Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS)
