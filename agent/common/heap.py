"""Keep the heap small in a process that runs for years: glibc keeps much of the memory that was freed."""

from __future__ import annotations

import ctypes
from contextlib import suppress

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
