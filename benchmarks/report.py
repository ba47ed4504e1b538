"""What the benchmarks print: tables, bars with pass or FAIL, and the kind of machine they ran on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

from rich.console import Console
from rich.table import Table

# The feature that decides the time of INT8, as Linux names it.
_INSTRUCTIONS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimd", "asimddp", "i8mm")


@dataclass
class Section:
    """One table; `note` is printed below it."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    note: str = ""


@dataclass(frozen=True)
class Bar:
    """What was asked for and what was found; None where it was not measured."""

    what: str
    asked: str
    found: str
    passed: bool | None


def at_least(what: str, limit: float, value: float | None, unit: str = "x") -> Bar:
    """The bar that asks for `limit` or more."""
    return Bar(what, f">= {limit:g}{unit}", _shown(value, unit), None if value is None else value >= limit)


def at_most(what: str, limit: float, value: float | None, unit: str = "x") -> Bar:
    """The bar that allows `limit` and less."""
    return Bar(what, f"<= {limit:g}{unit}", _shown(value, unit), None if value is None else value <= limit)


def times(ratio: float | None) -> str:
    """A ratio as it is shown in tables."""
    return _shown(ratio, "x")


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def bars_section(bars: Sequence[Bar]) -> Section:
    verdicts = {True: "pass", False: "FAIL", None: "not measured"}
    return Section(
        "Bars",
        ("what", "asked", "found", ""),
        [(bar.what, bar.asked, bar.found, verdicts[bar.passed]) for bar in bars],
    )


def add_output_option(parser: argparse.ArgumentParser) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--markdown", action="store_true", help="tables to paste into RESULTS.md")
    output.add_argument("--json", action="store_true", help="one JSON object")


def publish(sections: Sequence[Section], options: argparse.Namespace) -> None:
    """Print the sections as the options say, then the machine's kind."""
    if options.json:
        tables = [vars(section) for section in sections]
        print(json.dumps({"tables": tables, "machine": machine()}))
        return
    console = Console(width=None if Console().is_terminal else 160)
    for section in sections:
        if options.markdown:
            print("\n".join(_markdown(section)))
            continue
        table = Table(title=section.title, caption=section.note or None, title_justify="left", caption_justify="left")
        for number, column in enumerate(section.columns):
            table.add_column(column, justify="right" if number and section.title != "Bars" else "left")
        for row in section.rows:
            table.add_row(*row)
        console.print(table)
    print(machine())


def _markdown(section: Section) -> list[str]:
    lines = [f"### {section.title}", "", _line(section.columns), "|---" * len(section.columns) + "|"]
    return [*lines, *map(_line, section.rows), "", *([section.note, ""] if section.note else [])]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine() -> str:
    """The kind of machine, the date and the commit, for RESULTS.md."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    cpu = {key.strip(): value.strip() for key, value in facts.items()}
    fastest = [name for name in _INSTRUCTIONS if name in cpu.get("flags", cpu.get("Features", "")).split()]
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()
    return (
        f"{platform.machine()}, {cpu.get('model name', 'CPU unknown')} with {' and '.join(fastest) or 'SSE at most'}, "
        f"{os.cpu_count()} cores, "
        f"Python {platform.python_version()} · {date.today()}, commit {commit or 'unknown'}"
    )
