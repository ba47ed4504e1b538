"""Show progress, messages and log lines on stderr: live on a terminal, as plain lines elsewhere.

Under systemd stderr is the journal. Lines then begin with their priority (sd-daemon(3)), and progress is left out: it
would be a line every other second.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.logfmt import JsonFormatter, LogfmtFormatter
from agent.common.table import ShownConsole

_PLAIN_PERIOD_S = 2.0  # between plain progress lines

_NOTICE, _ERROR = 5, 3  # syslog(3)
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: _ERROR, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}

console = ShownConsole(stderr=True, highlight=False, soft_wrap=True)


def goes_to_journal() -> bool:
    """Return True if systemd has connected stderr with the journal, and it still is (systemd.exec(5))."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        stderr = os.fstat(2)
    except OSError:  # stderr is closed
        return False
    return stream == f"{stderr.st_dev}:{stderr.st_ino}"


class _Style:
    """The form of the lines that are written.

    is_json: one JSON object a line, for a collector of logs; then no progress is shown.
    """

    is_json = False


class Task:
    """The progress of one piece of work; `update` is cheap and may be called for every frame."""

    def __init__(self, title: str, total: int | None, bar: Progress | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self._title = title
        self._total = total
        self._bar = bar
        self._clock = clock
        self._row = bar.add_task(title, total=total, note="") if bar else None
        self._printed_s = self._clock.monotonic_s()
        self._prints_lines = not (goes_to_journal() or _Style.is_json)

    def update(self, done: int, note: str = "") -> None:
        """Show that `done` of `total` units are done, with a note."""
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=done, note=note)
        elif self._prints_lines and self._clock.monotonic_s() - self._printed_s >= _PLAIN_PERIOD_S:
            self._printed_s = self._clock.monotonic_s()
            total = f"/{self._total}" if self._total else ""
            say(f"{self._title}: {done}{total} {note}".rstrip())


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Task]:
    """Show the progress of the block while it runs; total: units in all, None if unknown."""
    if not console.is_terminal or _Style.is_json:
        yield Task(title, total, None)
        return
    columns: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed}" + (f"/{total}" if total else "")),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    ]
    with Progress(*columns, console=console) as bar:
        yield Task(title, total, bar)


@contextmanager
def stage(title: str) -> Iterator[Callable[[float, str], None]]:
    """Show the progress of the block in percent; yield the function that takes the share done, and a note."""
    with progress(title, 100) as bar:
        yield lambda fraction, doing: bar.update(round(100 * fraction), doing)


def say(text: str, priority: int = _NOTICE) -> None:
    """Print one line on stderr, above any running progress. priority: of syslog(3), for the journal."""
    _print(json.dumps({"msg": text}) if _Style.is_json else text, priority)


def _print(text: str, priority: int) -> None:
    if goes_to_journal():
        text = "\n".join(f"<{priority}>{line}" for line in text.splitlines())
    console.print(text, markup=False, emoji=False)


def say_error(text: str) -> None:
    """Print an error that ends the program, as `say`."""
    say(text, _ERROR)


class ConsoleHandler(logging.Handler):
    """Prints log lines without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            _print(self.format(record), _PRIORITIES.get(record.levelno, _NOTICE))
        except Exception:  # a log line must never end the daemon
            self.handleError(record)


def set_up_logging(level: str, style: Literal["logfmt", "json"] = "logfmt") -> None:
    """Send all log records of `level` and above to stderr, as logfmt or as JSON objects."""
    _Style.is_json = style == "json"
    handler = ConsoleHandler()
    handler.setFormatter(JsonFormatter() if _Style.is_json else LogfmtFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
