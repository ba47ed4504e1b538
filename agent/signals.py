"""SIGTERM and SIGINT: who hears them, and for how long."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def handling_signals(handle: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, call handle("SIGTERM" | "SIGINT") in the main thread; afterwards all is as it was."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        handle(signal.Signals(number).name)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def interrupt(_name: str) -> None:
    """A handler that ends what is running as Ctrl-C does, through every `finally`."""
    raise KeyboardInterrupt
