"""tared's threshold search, called as the other workers are."""

from __future__ import annotations

import numpy as np

from calibrate.histogram import AbsHistogram
from calibrate.threshold import histogram_amax


def amax(counts: np.ndarray, method: str) -> np.ndarray | float:
    """In bins: of one histogram, or of several, one after the other. Values may reach the end of the last bin."""
    if counts.ndim == 2:
        return np.array([amax(row, method) for row in counts])
    return histogram_amax(AbsHistogram(counts, counts.size.bit_length() - 1, float(counts.size), 0, 0), method)
