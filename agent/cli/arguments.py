"""Share parsers and printing among all commands, the board's and the control room's."""

from __future__ import annotations

import argparse
import difflib
import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from agent.common.errors import AgentError

if TYPE_CHECKING:
    from rich.console import Console

Text: TypeAlias = str | Callable[[], str]

_PIPED_COLUMNS = 240  # width of a table that is piped on
_SAYS_DEFAULT = "(default: "
_CHOICE = re.compile(r"invalid choice: '([^']*)'")


class _LateHelp(argparse._StoreAction):
    """An argument whose help is made when it is shown, since what it lists takes long to import."""

    make: Callable[[], str]

    @property
    def help(self) -> str | None:
        return self.make()

    @help.setter
    def help(self, make: Any) -> None:
        self.make = make


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Show the default of each option that has one, unless its help already says it; flags have none to show."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, bool) or action.default in (None, "", []) or _SAYS_DEFAULT in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """Parse a command line; show the help if a command is missing, and guess a misspelt command, choice or option.

    Wrong arguments are reported in the form of all other errors (AgentError, `cli.arguments`).
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{"formatter_class": HelpFormatter, **options})
        self._given: list[str] = []

    def add_commands(self, title: str, metavar: str) -> Any:
        """Add subparsers; where none is chosen, the parser's help is what runs."""
        self.set_defaults(run=self._show_help)
        return self.add_subparsers(title=title, metavar=metavar)

    def _show_help(self, _: argparse.Namespace) -> int:
        self.print_help()
        return 0

    # argparse hands what a command's parser does not know to its parent, which does not know the command's options.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = list(sys.argv[1:] if args is None else args)
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        raise AgentError(
            "cli.arguments", message, "arguments as documented", f"{self._guess(message)}see '{self.prog} --help'"
        )

    def _guess(self, message: str) -> str:
        """Return a question that names the word meant: for a wrong choice, or the first option that is unknown."""
        names = [name for action in self._actions for name in action.option_strings]
        if found := _CHOICE.search(message):
            written, words = found[1], [str(each) for action in self._actions for each in action.choices or ()]
        else:
            given = (each.partition("=")[0] for each in self._given if each.startswith("--"))
            written, words = next((each for each in given if each not in names), ""), names
        close = difflib.get_close_matches(written, words, n=1)
        return f"did you mean '{close[0]}'? " if close else ""


def command(commands: Any, name: str, run: Callable[..., int], text: str) -> argparse.ArgumentParser:
    """Add a command with --json, and return its parser.

    Args:
        commands: argparse's subparsers.
        name: The word on the command line.
        run: Runs the command with the parsed options; returns the exit code.
        text: The help, and the description.
    """
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)
    return parser


def option(parser: Any, names: str, metavar: str, text: Text, kind: Callable[[str], object] = str, **more: Any) -> None:
    """Add an option that has a value, or an argument of a command.

    Args:
        parser: A parser, or a group of one.
        names: Separated by spaces.
        metavar: Stands for the value in the help.
        text: The help, or a function that returns it.
        kind: Makes the value from its text.
        more: As `add_argument` takes it, such as `default`.
    """
    late = {"action": _LateHelp} if callable(text) else {}
    parser.add_argument(*names.split(), type=kind, metavar=metavar, help=text, **late, **more)


def add_config_option(parser: argparse.ArgumentParser) -> None:
    """Add -c, the configuration of a daemon."""
    option(parser, "-c --config", "FILE", "the daemon's configuration", Path, default=Path("config.yaml"))


def number(kind: type[int] | type[float], low: float, high: float = math.inf) -> Callable[[str], float]:
    """Return a parser of numbers from `low` to `high`, for argparse's `type`.

    Args:
        low: The least number.
        high: The largest number; infinity: no limit.

    The parser raises argparse.ArgumentTypeError, which names the limits.

    >>> number(int, 1, 65535)("1883")
    1883
    """

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


def print_result(options: argparse.Namespace, result: dict[str, Any], show: Callable[[], object] | None = None) -> int:
    """Print a result, with --json as one object; return the exit code of success.

    Args:
        result: In JSON's types.
        show: Prints it for people; None: one `key value` a line.
    """
    if options.json:
        print(json.dumps(result))
    elif show is not None:
        show()
    else:
        for key, value in result.items():
            print(f"{key:16} {value}")
    return 0


def table_console() -> Console:
    """Return a console on stdout, wide where it is piped, so that no table is cut."""
    from agent.common.table import ShownConsole  # most commands print no table; its import is a third of their start

    return ShownConsole(width=None if sys.stdout.isatty() else _PIPED_COLUMNS)
