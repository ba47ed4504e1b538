"""Help, guesses and tables: every option says its unit and default, and all fits 80 columns without a cut id."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from man_page import man_page
from places import ROOT
from rich.console import Console

from agent.cli.main import make_parser
from agent.common.errors import AgentError
from agent.common.table import tabulate
from fleet.cli.main import GROUPS, main

UNITS = re.compile(
    r"\b(seconds?|days|devices|time|frames|threads|boards|share|loss|parts|accelerator|port|version|none below|random"
    r"|drawn)\b"
)


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from parsers(each)


ALL = {each.prog: each for each in parsers(make_parser(GROUPS))}


@pytest.mark.parametrize("prog", ALL)
def test_every_argument_says_what_it_is_its_unit_and_its_default(prog: str) -> None:
    parser = ALL[prog]
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            continue
        name = "/".join(action.option_strings) or action.dest
        shown = formatter._expand_help(action) if action.help else ""
        assert shown, f"{prog} {name} has no help"
        if not action.option_strings or action.nargs == 0:
            continue
        assert action.required or "(default: " in shown, f"{prog} {name} does not say its default"
        if action.default not in (None, "", [], float("inf")) and action.type is not None and "CPU" not in shown:
            assert f"(default: {action.default})" in shown or "(default: at the end" in shown, f"{prog} {name}"
        if "number.<locals>" in repr(action.type):
            assert UNITS.search(shown), f"{prog} {name} does not say its unit"


@pytest.mark.parametrize("prog", ALL)
def test_help_fits_80_columns(prog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, ALL[prog].format_help().splitlines())) <= 80


@pytest.mark.parametrize("words", [[], ["fleet"], ["fleet", "rollout"], ["store"], ["keys"]])
def test_without_a_command_the_help_is_shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out.startswith(" ".join(["usage: tared", *words]))


@pytest.mark.parametrize(
    ("words", "guess"),
    [
        (["calibrat"], "calibrate"),
        (["fleet", "rollot"], "rollout"),
        (["build", "m.yaml", "--precision", "in8"], "int8"),
        (["calibrate", "m.yaml", "--fraems", "clip.mp4"], "--frames"),
        (["store", "list", "--confg=x"], "--config"),
    ],
)
def test_a_misspelt_word_is_guessed(words: list[str], guess: str) -> None:
    with pytest.raises(AgentError) as caught:
        make_parser(GROUPS).parse_args(words)
    command = " ".join(["tared", *words[: 2 if words[0] in ("fleet", "store") else 1]])
    assert caught.value.code == "cli.arguments"
    assert caught.value.remedy.startswith(f"did you mean '{guess}'? see '")
    assert caught.value.remedy.endswith("--help'")
    assert guess.startswith("-") is (f"'{command} --help'" in caught.value.remedy) or guess == "int8"


@pytest.mark.parametrize("words", [["zzz"], ["calibrate", "m.yaml", "--zzz"]])
def test_a_word_that_is_like_no_other_gets_no_guess(words: list[str]) -> None:
    with pytest.raises(AgentError) as caught:
        make_parser(GROUPS).parse_args(words)
    assert caught.value.remedy.startswith("see '")


@pytest.mark.parametrize("width", [60, 80, 120, 240])
def test_no_cell_of_a_table_is_cut(width: int) -> None:
    heads = ("device", "engine", "state\nnow", "tags")
    rows = [("gate-" + "x" * 40, "0123456789abcdef", "degraded", "site=berlin ring=1 " * 4), ("a", "", "ok", "")]
    shown = Console(file=(text := io.StringIO()), width=width)
    shown.print(tabulate(heads, rows, width, prose=("tags",)))
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    words = text.getvalue().split()
    assert {"gate-" + "x" * 40, "0123456789abcdef", "degraded", "site=berlin"} <= {each.strip(";") for each in words}
    assert "…" not in text.getvalue()
    assert ("state now degraded" in text.getvalue()) == (width < 80 + 14)  # a narrow terminal gets blocks


# ---- completion, and the man page

TARED = Path(sys.executable).with_name("tared")


def completed(shell: str, script: str, *words: str) -> set[str]:
    """Return the shell's offers. script: reads the completion from stdin and prints the offers."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    code = subprocess.run([TARED, "completion", shell], check=True, capture_output=True, timeout=60).stdout
    environment = {**os.environ, "PATH": f"{TARED.parent}{os.pathsep}{os.environ['PATH']}"}
    run = [shell, "-c", script, *words]
    done = subprocess.run(run, check=True, input=code, capture_output=True, env=environment, timeout=60)
    return {line.split("\t")[0].strip() for line in done.stdout.decode().splitlines()}


BASH = """
source /dev/stdin
complete -p tared >/dev/null
COMP_LINE=$0 COMP_POINT=${#0} COMP_TYPE=9 COMP_WORDBREAKS=$' \\t\\n"'"'"'><=;|&(:'
_python_argcomplete tared
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize(("shell", "script"), [("bash", BASH), ("fish", "source -; complete -C $argv[1]")])
def test_a_shell_completes_commands_options_and_choices(shell: str, script: str) -> None:
    assert {"rollout", "report"} <= completed(shell, script, "tared fleet r")
    assert "--frames" in completed(shell, script, "tared calibrate --fr")
    assert {"int8", "fp16", "fp32"} <= completed(shell, script, "tared build --precision ")


def test_zsh_can_read_its_completion() -> None:
    assert completed("zsh", "zsh -n /dev/stdin && echo good") == {"good"}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="argparse of Python 3.13 writes options in another form")
def test_the_man_page_is_that_of_this_command_line() -> None:
    assert (ROOT / "docs/tared.1").read_text(encoding="utf-8") == man_page(), "run 'make generated'"


def test_the_man_page_is_one_to_groff() -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    page = ["groff", "-man", "-Tutf8", "-ww", str(ROOT / "docs/tared.1")]
    done = subprocess.run(page, check=True, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert "tared fleet rollout create" in done.stdout


@pytest.mark.parametrize("words", [["infer"], ["run", "-c", "none.yaml"], ["keys", "nwe"]])
def test_with_json_an_error_is_an_object(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 2
    shown = capsys.readouterr()
    error = json.loads(shown.out)["error"]
    assert error.keys() == {"code", "found", "expected", "remedy"}
    assert shown.err.startswith(f"error: {error['code']}: ")
