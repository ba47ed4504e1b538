"""fast-histogram, numba and PyTorch counting |x| over [0, limit), in an environment of their own.

|x| goes to memory that is there already: fresh pages cost more than the counting, and not always the same.
"""

from __future__ import annotations

import numba
import numpy as np
import torch
from fast_histogram import histogram1d

torch.set_num_threads(1)
_data = _magnitude = np.empty(0, np.float32)


def load(x: np.ndarray) -> None:
    global _data, _magnitude
    _data, _magnitude = np.array(x), np.array(x)


def fast_histogram(bins: int, limit: float) -> np.ndarray:
    return histogram1d(np.abs(_data, out=_magnitude), bins, (0.0, limit))


def fast_histogram_direct(bins: int, limit: float) -> np.ndarray:
    """Of the data as it is: what is below zero is out of range and not counted."""
    return histogram1d(_data, bins, (0.0, limit))


def numba_loop(bins: int, limit: float) -> np.ndarray:
    return _count(_data, np.float32(bins / limit), np.zeros(bins, np.int64))


@numba.njit(nogil=True)
def _count(values: np.ndarray, scale: np.float32, counts: np.ndarray) -> np.ndarray:
    for value in values:
        counts[int(abs(value) * scale)] += 1
    return counts


def torch_histc(bins: int, limit: float) -> np.ndarray:
    magnitude = torch.abs(torch.from_numpy(_data), out=torch.from_numpy(_magnitude))
    return torch.histc(magnitude, bins, 0.0, limit).numpy()
