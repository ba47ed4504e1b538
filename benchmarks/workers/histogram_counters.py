"""fast-histogram, numba and PyTorch counting |x| over [0, limit), in an environment of their own.

|x| goes to memory that is there already: fresh pages cost more than the counting, and not always the same.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from fast_histogram import histogram1d
from numpy.typing import NDArray

Array = NDArray[Any]

torch.set_num_threads(1)
_data = _magnitude = np.empty(0, np.float32)


def load(x: Array) -> None:
    global _data, _magnitude
    _data, _magnitude = np.array(x), np.array(x)


def fast_histogram(bins: int, limit: float) -> Array:
    counts: Array = histogram1d(np.abs(_data, out=_magnitude), bins, (0.0, limit))
    return counts


def fast_histogram_direct(bins: int, limit: float) -> Array:
    """Of the data as it is: what is below zero is out of range and not counted."""
    counts: Array = histogram1d(_data, bins, (0.0, limit))
    return counts


def numba_loop(bins: int, limit: float) -> Array:
    counts: Array = _count(_data, np.float32(bins / limit), np.zeros(bins, np.int64))
    return counts


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]  # numba is in another environment
def _count(values: Array, scale: np.float32, counts: Array) -> Array:
    for value in values:
        counts[int(abs(value) * scale)] += 1
    return counts


def torch_histc(bins: int, limit: float) -> Array:
    magnitude = torch.abs(torch.from_numpy(_data), out=torch.from_numpy(_magnitude))
    counts: Array = torch.histc(magnitude, bins, 0.0, limit).numpy()
    return counts
