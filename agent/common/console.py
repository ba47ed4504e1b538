"""What a person at the terminal sees: live progress on a terminal, plain lines elsewhere; always on stderr.

Under systemd stderr is the journal, which keeps times itself: lines bear their priority there (sd-daemon(3)), and
progress, which is a line every other second, is left out.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

_PLAIN_PERIOD_S = 2.0  # between plain progress lines

_NOTICE, _ERROR = 5, 3  # syslog(3)
_PRIORITIES = {logging.CRITICAL: 2, logging.ERROR: _ERROR, logging.WARNING: 4, logging.INFO: 6, logging.DEBUG: 7}

console = Console(stderr=True, highlight=False, soft_wrap=True)


def goes_to_journal() -> bool:
    """Whether systemd has connected stderr with the journal, and nobody has redirected it since (systemd.exec(5))."""
    stream = os.environ.get("JOURNAL_STREAM", "")
    try:
        stderr = os.fstat(2)
    except OSError:  # closed
        return False
    return stream == f"{stderr.st_dev}:{stderr.st_ino}"


class Task:
    """One running piece of work; `update` is cheap and may be called for every frame."""

    def __init__(self, title: str, total: int | None, bar: Progress | None) -> None:
        self._title = title
        self._total = total
        self._bar = bar
        self._row = bar.add_task(title, total=total, note="") if bar else None
        self._printed = time.monotonic()
        self._told = not goes_to_journal()

    def update(self, done: int, note: str = "") -> None:
        """`done` of `total` units; `note` is what else there is to say right now."""
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=done, note=note)
        elif self._told and time.monotonic() - self._printed >= _PLAIN_PERIOD_S:
            self._printed = time.monotonic()
            of = f"/{self._total}" if self._total else ""
            say(f"{self._title}: {done}{of} {note}".rstrip())


@contextmanager
def progress(title: str, total: int | None = None) -> Iterator[Task]:
    """Show a piece of work while the block runs; `total` None means that nobody knows how long it is."""
    if not console.is_terminal:
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


def say(text: str, priority: int = _NOTICE) -> None:
    """One line on stderr, above any running progress. priority: syslog(3)'s, for the journal."""
    if goes_to_journal():
        text = "\n".join(f"<{priority}>{line}" for line in text.splitlines())
    console.print(text, markup=False, emoji=False)


def say_error(text: str) -> None:
    """As `say`, of what ends the program."""
    say(text, _ERROR)


class ConsoleHandler(logging.Handler):
    """Log lines, key=value, without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record), _PRIORITIES.get(record.levelno, _NOTICE))
        except Exception:  # a log line must never take the daemon down
            self.handleError(record)


def set_up_logging(level: str) -> None:
    """Route all of logging to stderr at `level`."""
    handler = ConsoleHandler()
    handler.setFormatter(logging.Formatter("level=%(levelname)s at=%(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
