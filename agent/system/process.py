"""Control this process: its memory, its signals, and its messages to systemd.

The memory settings matter for a daemon that runs for years: glibc keeps much of the memory that was freed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_LIBC = ctypes.CDLL(None)  # only one: each makes a class of its own, which only the garbage collector frees
_M_ARENA_MAX = -8  # malloc.h of glibc
_ARENAS = 2  # as many as threads that are busy at once on a small board


def limit_malloc_arenas() -> None:
    """Let threads share malloc arenas; threads that have one already keep it. Without glibc this does nothing.

    By default glibc makes one arena per thread, up to eight per core. Each keeps the most that its thread ever needed:
    the process grows for an hour with nothing held. Source: M_ARENA_MAX in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.mallopt(_M_ARENA_MAX, _ARENAS)


def release_free_memory() -> None:
    """Return whole free pages to the system, in a few milliseconds. Without glibc this does nothing.

    By itself glibc returns only the end of its heap. Arrays of up to 32 MB lie in the heap once others of their size
    were freed. Source: malloc_trim(3), and M_MMAP_THRESHOLD in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.malloc_trim(0)


@contextmanager
def handling_signals(handle: Callable[[str], None]) -> Iterator[None]:
    """Call handle("SIGTERM" | "SIGINT") in the main thread while the block runs; then restore the handlers."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        handle(signal.Signals(number).name)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def raise_interrupt(_name: str) -> None:
    """Handle a signal as Ctrl-C: end what is running, through every `finally`."""
    raise KeyboardInterrupt


def notify_service_manager(message: str) -> None:
    """Send systemd a message such as READY=1 or WATCHDOG=1 (sd_notify(3)); without systemd this does nothing."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with (
        suppress(OSError),  # a service manager that has gone is no reason to stop
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        channel.sendto(message.encode(), address)
