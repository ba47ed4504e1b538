"""The page of the command line: every command with its usage and options, from the parsers; the exit codes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator

from agent.cli.main import EXIT_CODES, make_parser
from docs.tools.reference.markdown import anchored, code, fenced, heading, page, prose, table
from fleet.cli.main import GROUPS

_INTRODUCTION = """\
Every command of `tared`. Options may stand before or behind the other arguments. `tared COMMAND --help` shows the same
on a terminal. `tared completion` prints the code by which a shell completes commands and options. The manual page is
`docs/tared.1`."""
_DEFAULT = re.compile(r"\s*\(default: (.*?)\)(?=$|[;.,])")


def command_line_page() -> str:
    """Return the page."""
    parser = make_parser(GROUPS)
    commands = list(_commands(parser))
    index = table(
        ("Command", "Meaning"), [(f"[{code(each.prog)}](#{_id(each)})", prose(text)) for each, text in commands]
    )
    parts = [index, heading(2, "exit-codes", "Exit codes"), table(("Code", "Meaning"), _exit_codes())]
    for each, text in commands:
        parts += [heading(2, each.prog), prose(text), fenced(_usage(each), "text"), _options(each)]
    return page("Command line", _INTRODUCTION, [part for part in parts if part])


def _exit_codes() -> Iterator[tuple[str, str]]:
    for status, meaning in EXIT_CODES.items():
        yield anchored(str(status), f"exit {status}"), prose(meaning)


def _id(parser: argparse.ArgumentParser) -> str:
    return parser.prog.replace(" ", "-")


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield every command that runs something, with its description."""
    groups = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    if not groups:
        yield parser, parser.description or ""
    for group in groups:
        for each in group.choices.values():
            yield from _commands(each)


def _arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [each for each in parser._actions if not isinstance(each, argparse._HelpAction)]


def _usage(parser: argparse.ArgumentParser) -> str:
    """Return the usage; argparse's own depends on the width of the terminal and the version of Python."""
    options = [each for each in _arguments(parser) if each.option_strings]
    words = [_word(each) if each.required else f"[{_word(each)}]" for each in options]
    words += [_place(each) for each in _arguments(parser) if not each.option_strings]
    lines, indent = [parser.prog], " " * (len(parser.prog) + 1)
    for word in words:
        if len(lines[-1]) + 1 + len(word) > 100:
            lines.append(f"{indent}{word}")
        else:
            lines[-1] += f" {word}"
    return "\n".join(lines)


def _word(option: argparse.Action) -> str:
    """Return an option as the usage shows it, by its first name."""
    return " ".join(filter(None, (option.option_strings[0], _value(option))))


def _value(action: argparse.Action) -> str:
    """Return what stands for the value of an option; empty for a flag."""
    if action.nargs == 0:
        return ""
    name = action.metavar if isinstance(action.metavar, str) else None
    if name is None:
        name = "{" + ",".join(map(str, action.choices)) + "}" if action.choices is not None else action.dest.upper()
    return {"?": f"[{name}]", "*": f"[{name} ...]", "+": f"{name} [{name} ...]"}.get(str(action.nargs), name)


def _place(action: argparse.Action) -> str:
    return _value(action)


def _options(parser: argparse.ArgumentParser) -> str:
    rows = []
    for each in _arguments(parser):
        names = ", ".join(map(code, each.option_strings)) or code(_value(each))
        value = code(_value(each)) if each.option_strings and _value(each) else ""
        text, default = _described(parser, each)
        about = f"{prose(text)}{' Required.' if each.required and each.option_strings else ''}"
        rows.append((names, value.replace("|", "\\|"), prose(default), about))
    return table(("Option", "Value", "Default", "Meaning"), rows)


def _described(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str]:
    """Return the help of an option without the default, and the default."""
    formatter = parser._get_formatter()
    shown = " ".join(formatter._expand_help(action).split()) if action.help else ""
    default = _DEFAULT.search(shown)
    return (_DEFAULT.sub("", shown), default[1]) if default else (shown, "")
