"""What the C library keeps of freed memory, for a daemon that runs for years on a board."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_LIBC = ctypes.CDLL(None)  # one: each has a class of its own, which only Python's search for circles takes away
_M_ARENA_MAX = -8  # malloc.h of glibc
_ARENAS = 2  # as many as threads that are busy at once on a small board


def share_arenas() -> None:
    """Have threads share places to take memory from; those that have one already keep it. Nothing without glibc.

    By itself it makes one for each thread, up to eight for each core, and each keeps what that thread once needed at
    most: an hour's growth, with nothing held. Source: M_ARENA_MAX in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.mallopt(_M_ARENA_MAX, _ARENAS)


def give_back() -> None:
    """Return whole free pages to the system, in a few milliseconds; nothing where the C library is not glibc.

    Its heap lets go of its end alone, and arrays of up to 32 MB lie there once others of their size were freed. Source:
    malloc_trim(3), and M_MMAP_THRESHOLD in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.malloc_trim(0)
