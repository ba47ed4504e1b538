"""What the commands of the command line have in common: their parsers' manners, and how a result is printed."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

from agent.common.errors import AgentError


class Parser(argparse.ArgumentParser):
    """Refuses arguments in the form of all other errors."""

    def error(self, message: str) -> NoReturn:
        raise AgentError("cli.arguments", message, "arguments as documented", f"see '{self.prog} --help'")


def command(commands: Any, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    """A command's parser, which knows what runs it."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)
    return parser


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """The parser of a number from `low` to `high`."""

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
    """Print a result for people, or with --json as one object; the exit code of success."""
    if options.json:
        print(json.dumps(result))
    else:
        for key, value in result.items():
            print(f"{key:16} {value}")
    return 0
