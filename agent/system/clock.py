"""Read the clock, and whether it follows a time server, as adjtimex(2) reports it."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

_TIME_ERROR = 5  # <linux/timex.h>
_STA_UNSYNC = 0x0040
# systemd-timesyncd creates this file once it has the time; needed by a service that must not call adjtimex.
_TIMESYNCD = Path("/run/systemd/timesync/synchronized")


class _Timex(ctypes.Structure):
    """struct timex of a machine with 64-bit longs."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        *((name, ctypes.c_long) for name in ("offset", "freq", "maxerror", "esterror")),
        ("status", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("constant", "precision", "tolerance", "seconds", "fraction", "tick")),
        *((name, ctypes.c_long) for name in ("ppsfreq", "jitter")),
        ("shift", ctypes.c_int),
        *((name, ctypes.c_long) for name in ("stabil", "jitcnt", "calcnt", "errcnt", "stbcnt")),
        ("tai", ctypes.c_int),
        ("_reserved", ctypes.c_int * 11),
    )


def unix_s() -> float:
    """Return the Unix time of this machine's clock; a simulated board has a clock of its own."""
    return time.time()


def is_synchronised() -> bool:
    """Return True if the clock follows a time server; False also if unknown.

    A clock that may be wrong by years must not decide whether a command has expired.
    """
    state = _Timex()  # with modes 0 the call only reads
    answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(state))
    if answer < 0:
        return _TIMESYNCD.exists()
    return answer != _TIME_ERROR and not state.status & _STA_UNSYNC
