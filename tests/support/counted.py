"""Histograms of which a test knows the counts alone."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram


def counted(counts: NDArray[np.integer], bin_width: float = 1.0) -> AbsHistogram:
    """Return the histogram of 2**k counts, none of a zero, and the largest at the end of its bin.

    bin_width: a power of two.
    """
    whole = counts.astype(np.int64)
    used = int(np.flatnonzero(whole)[-1]) + 1 if whole.any() else 0
    return AbsHistogram(whole, round(math.log2(whole.size * bin_width)), used * bin_width, 0, 0)
