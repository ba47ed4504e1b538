"""Scan and count |x|: by passes compiled from C, or by their twins in NumPy.

count.c is compiled with the package where there is a C compiler. `load` finds the compiled passes; `scan` and `count`
use them, or else the passes of the same name in NumPy, which give the same bits in more time. calibrate/histogram.py
calls `scan` for the range of an array, then `count` for its bins.
"""

from __future__ import annotations

import ctypes
import math
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_VERSION = 3  # as in count.c
_TABLES = 4  # as in count.c
_CHUNK = 1 << 16  # elements per NumPy pass. Larger: the temporaries leave the cache.
_MAGNITUDE = np.int32(0x7FFFFFFF)  # a float32's bits without the sign

Values = NDArray[np.float32]


def load() -> ctypes.CDLL | None:
    """Load the functions of count.c with their signatures.

    Returns:
        None if they were not compiled, or from another version of count.c.

    >>> library = load()
    >>> library is None or hasattr(library, "tared_count")
    True
    """
    stem = Path(__file__).parent / "_count"
    built = [path for path in (stem.with_name(stem.name + suffix) for suffix in EXTENSION_SUFFIXES) if path.exists()]
    if not built:
        return None
    try:
        library = ctypes.CDLL(str(built[0]))
        if ctypes.c_int32.in_dll(library, "tared_count_version").value != _VERSION:
            return None
    except (OSError, ValueError):  # a library of another machine, truncated, or without the symbol
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.tared_survey.argtypes = [pointer, size, pointer]
    library.tared_count.argtypes = [pointer, size, ctypes.c_float, ctypes.c_uint32, pointer]
    library.tared_survey.restype = library.tared_count.restype = None
    return library


LIBRARY = load()
COMPILED = LIBRARY is not None


def scan(values: Values) -> tuple[float, int]:
    """Return the largest |x| of values, inf if any is not finite, and the number of zeros.

    Args:
        values: float32 (n,), contiguous, n < 2**31.

    >>> scan(np.float32([0.0, -1.5, 0.5]))
    (1.5, 1)
    """
    if LIBRARY is None:
        return scan_numpy(values)
    result = np.empty(2, np.int32)
    LIBRARY.tared_survey(values.ctypes.data, values.size, result.ctypes.data)
    return _float_of(int(result[0])), int(result[1])


def count(values: Values, scale: float, bins: int) -> NDArray[np.int64]:
    """Count how many of the values have floor(|x| * scale) = 0, 1, ... bins - 1.

    Args:
        values: float32 (n,), contiguous, n < 2**31; all of them finite and inside the bins.
        scale: Bins for each unit of x, a power of two.
        bins: A power of two.

    Returns:
        int64 (bins,).

    >>> count(np.float32([0.1, -0.6, 0.7, 1.9]), scale=2.0, bins=4)
    array([1, 2, 0, 1])
    """
    if LIBRARY is None:
        return count_numpy(values, scale, bins)
    tables = np.zeros((_TABLES, bins), np.uint32)
    LIBRARY.tared_count(values.ctypes.data, values.size, scale, bins, tables.ctypes.data)
    counts: NDArray[np.int64] = tables.sum(axis=0, dtype=np.int64)
    return counts


def _float_of(bits: int) -> float:
    """Return the magnitude that a float32's bits stand for; NaN counts as inf.

    Computed in integers: the thread may flush subnormal numbers to zero.
    """
    exponent, significand = bits >> 23, bits & 0x7FFFFF
    if exponent == 0xFF:
        return math.inf
    return math.ldexp(significand | (1 << 23), exponent - 150) if exponent else math.ldexp(significand, -149)


def scan_numpy(values: Values) -> tuple[float, int]:
    """Do the same as `scan`, without the compiled pass.

    >>> scan_numpy(np.float32([0.0, np.inf]))
    (inf, 1)
    """
    bits, largest, zeros = values.view(np.int32), np.int32(0), 0
    for start in range(0, bits.size, _CHUNK):
        magnitude = bits[start : start + _CHUNK] & _MAGNITUDE
        largest = max(largest, magnitude.max())
        zeros += magnitude.size - int(np.count_nonzero(magnitude))
    return _float_of(int(largest)), zeros


def count_numpy(values: Values, scale: float, bins: int) -> NDArray[np.int64]:
    """Do the same as `count`, without the compiled pass.

    >>> values = np.float32([0.1, -0.6, 0.7, 1.9])
    >>> np.array_equal(count_numpy(values, 2.0, 4), count(values, 2.0, 4))
    True
    """
    counts = np.zeros(bins, np.int64)
    for start in range(0, values.size, _CHUNK):
        steps = np.abs(values[start : start + _CHUNK]) * np.float32(scale)
        counts += np.bincount(steps.astype(np.int32), minlength=bins)  # truncation is floor: no step is negative
    return counts
