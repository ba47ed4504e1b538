"""What the C library keeps of freed memory, for a daemon that runs for years on a board."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

_LIBC = ctypes.CDLL(None)  # one: each has a class of its own, which only Python's search for circles takes away
_M_ARENA_MAX = -8  # malloc.h of glibc
_ARENAS = 2  # as many as threads that are busy at once on a small board


def limit_malloc_arenas() -> None:
    """Have threads share places to take memory from; those that have one already keep it. Nothing without glibc.

    By itself it makes one for each thread, up to eight for each core, and each keeps what that thread once needed at
    most: an hour's growth, with nothing held. Source: M_ARENA_MAX in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.mallopt(_M_ARENA_MAX, _ARENAS)


def release_free_memory() -> None:
    """Return whole free pages to the system, in a few milliseconds; nothing where the C library is not glibc.

    Its heap lets go of its end alone, and arrays of up to 32 MB lie there once others of their size were freed. Source:
    malloc_trim(3), and M_MMAP_THRESHOLD in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.malloc_trim(0)


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


def raise_interrupt(_name: str) -> None:
    """A handler that ends what is running as Ctrl-C does, through every `finally`."""
    raise KeyboardInterrupt


def notify_service_manager(message: str) -> None:
    """Tell systemd, e.g. READY=1, WATCHDOG=1, STOPPING=1; does nothing when started otherwise (sd_notify(3))."""
    address = os.environ.get("NOTIFY_SOCKET")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract namespace
        address = "\0" + address[1:]
    with (
        contextlib.suppress(OSError),  # a manager that has gone is no reason to go too
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel,
    ):
        channel.sendto(message.encode(), address)
