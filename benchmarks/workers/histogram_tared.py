"""tared's histogram of |x|, on one thread and on two."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from calibrate.histogram import AbsHistogram, abs_histogram, merge

_POOL = ThreadPoolExecutor(2)
_data = np.empty(0, np.float32)


def load(x: np.ndarray) -> None:
    global _data
    _data = np.array(x)


def facts() -> bool:
    """Are the compiled passes there?"""
    from calibrate.native import COMPILED

    return COMPILED


def one_thread(bits: int) -> np.ndarray:
    return abs_histogram(_data, bits).counts


def two_threads(bits: int) -> np.ndarray:
    """Each half on a thread of its own; merging is exact."""
    first, second = _POOL.map(lambda half: abs_histogram(half, bits), np.array_split(_data, 2))
    merged: AbsHistogram = merge(first, second)
    return merged.counts
