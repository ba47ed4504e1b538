"""The passes over the data that a histogram is collected with: compiled where possible, in NumPy everywhere.

Both give the same bits; which one runs is a matter of speed alone (`COMPILED` says it). The compiled passes are forty
lines of C behind ctypes. numba nearly keeps up (measured: benchmarks/RESULTS.md), but costs every process
113 MiB of memory and every board 208 MB of disk, which is more than the rest of tared together; and its releases
trail Python's. What calls this splits its data over threads if it wants several: ctypes lets go of the GIL.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from calibrate.compiled import load

_TABLES = 4  # as in count.c
_CHUNK = 1 << 16  # elements per NumPy pass: the temporaries stay in the cache
_MAGNITUDE = np.int32(0x7FFFFFFF)

Values = NDArray[np.float32]


_LIBRARY = load()
COMPILED = _LIBRARY is not None


def survey(values: Values) -> tuple[float, int]:
    """The largest |x| of values (n,), contiguous, n < 2**31, and the number of zeros; inf for any value not finite."""
    if _LIBRARY is None:
        return survey_numpy(values)
    found = np.empty(2, np.int32)
    _LIBRARY.tared_survey(values.ctypes.data, values.size, found.ctypes.data)
    return _float_of(int(found[0])), int(found[1])


def count(values: Values, scale: float, bins: int) -> NDArray[np.int64]:
    """How many of values (n,) have floor(|x| * scale) = 0, 1, ... bins - 1: int64 (bins,).

    `scale` and `bins` are powers of two. All values must be finite and in the bins; contiguous, n < 2**31.
    """
    if _LIBRARY is None:
        return count_numpy(values, scale, bins)
    tables = np.zeros((_TABLES, bins), np.uint32)
    _LIBRARY.tared_count(values.ctypes.data, values.size, scale, bins, tables.ctypes.data)
    counts: NDArray[np.int64] = tables.sum(axis=0, dtype=np.int64)
    return counts


def _float_of(bits: int) -> float:
    """The magnitude that a float32's bits stand for, in integers: a thread may flush subnormals. NaN counts as inf."""
    exponent, significand = bits >> 23, bits & 0x7FFFFF
    if exponent == 0xFF:
        return math.inf
    return math.ldexp(significand | (1 << 23), exponent - 150) if exponent else math.ldexp(significand, -149)


def survey_numpy(values: Values) -> tuple[float, int]:
    """`survey` without the compiled pass."""
    bits, largest, zeros = values.view(np.int32), np.int32(0), 0
    for start in range(0, bits.size, _CHUNK):
        magnitude = bits[start : start + _CHUNK] & _MAGNITUDE
        largest = max(largest, magnitude.max())
        zeros += magnitude.size - int(np.count_nonzero(magnitude))
    return _float_of(int(largest)), zeros


def count_numpy(values: Values, scale: float, bins: int) -> NDArray[np.int64]:
    """`count` without the compiled pass."""
    counts = np.zeros(bins, np.int64)
    for start in range(0, values.size, _CHUNK):
        steps = np.abs(values[start : start + _CHUNK]) * np.float32(scale)
        counts += np.bincount(steps.astype(np.int32), minlength=bins)  # truncation is floor: no step is negative
    return counts
