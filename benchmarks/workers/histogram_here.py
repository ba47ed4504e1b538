"""What NumPy and OpenCV offer for counting |x| over [0, limit), as constraints.txt pins them.

|x| goes to memory that is there already: fresh pages cost more than the counting, and not always the same.
"""

from __future__ import annotations

import cv2
import numpy as np

cv2.setNumThreads(1)
_CHUNK = 1 << 16  # elements: the temporaries of the bincount path stay in the cache
_data = _magnitude = np.empty(0, np.float32)


def load(x: np.ndarray) -> None:
    global _data, _magnitude
    _data, _magnitude = np.array(x), np.array(x)


def memory_copy(_bins: int, _limit: float) -> np.ndarray:
    """No histogram: what reading and writing the data once costs."""
    np.copyto(_magnitude, _data)
    return _magnitude[:1]


def numpy_histogram(bins: int, limit: float) -> np.ndarray:
    return np.histogram(np.abs(_data, out=_magnitude), bins, (0.0, limit))[0]


def numpy_bincount(bins: int, limit: float) -> np.ndarray:
    counts, scale = np.zeros(bins, np.int64), np.float32(bins / limit)
    for start in range(0, _data.size, _CHUNK):
        steps = (np.abs(_data[start : start + _CHUNK]) * scale).astype(np.int32)
        counts += np.bincount(steps, minlength=bins)
    return counts


def opencv(bins: int, limit: float) -> np.ndarray:
    image = np.abs(_data, out=_magnitude).reshape(-1, 4096)
    return cv2.calcHist([image], [0], None, [bins], [0.0, limit]).reshape(-1)
