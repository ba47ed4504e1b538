"""What a person at the terminal sees: live progress on a terminal, plain lines elsewhere; always on stderr."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn

_PLAIN_PERIOD_S = 2.0  # between plain progress lines

console = Console(stderr=True, highlight=False, soft_wrap=True)


class Task:
    """One running piece of work; `update` is cheap and may be called for every frame."""

    def __init__(self, title: str, total: int | None, bar: Progress | None) -> None:
        self._title = title
        self._total = total
        self._bar = bar
        self._row = bar.add_task(title, total=total, note="") if bar else None
        self._printed = time.monotonic()

    def update(self, done: int, note: str = "") -> None:
        """`done` of `total` units; `note` is what else there is to say right now."""
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, completed=done, note=note)
        elif time.monotonic() - self._printed >= _PLAIN_PERIOD_S:
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


def say(text: str) -> None:
    """One line on stderr, above any running progress."""
    console.print(text, markup=False, emoji=False)


class ConsoleHandler(logging.Handler):
    """Log lines as systemd's journal likes them, key=value, without tearing a progress bar apart."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            say(self.format(record))
        except Exception:  # a log line must never take the daemon down
            self.handleError(record)


def set_up_logging(level: str) -> None:
    """Route all of logging to stderr at `level`."""
    handler = ConsoleHandler()
    handler.setFormatter(logging.Formatter("level=%(levelname)s at=%(name)s %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
