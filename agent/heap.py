"""Memory that a job took, given back to the board: the C library keeps what is freed, and a daemon runs for years."""

from __future__ import annotations

import ctypes
from contextlib import suppress

_LIBC = ctypes.CDLL(None)  # one: each has a class of its own, which only Python's search for circles takes away


def give_back() -> None:
    """Return whole free pages to the system, in a few milliseconds; nothing where the C library is not glibc.

    Its heap lets go of its end alone, and arrays of up to 32 MB lie there once others of their size were freed. Source:
    malloc_trim(3), and M_MMAP_THRESHOLD in mallopt(3).
    """
    with suppress(AttributeError):
        _LIBC.malloc_trim(0)
