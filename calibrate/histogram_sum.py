"""Many histograms merged into one in place: what `merge` computes, without a new array for each of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrate.compiled import address, load
from calibrate.histogram import AbsHistogram, check_mergeable, empty_histogram

_MOST = (1 << 63) - 1  # values that int64 counts hold together
_LIBRARY = load()

Counts = NDArray[np.int64]


class HistogramSum:
    """Takes the memory of a histogram, whatever is added. Sums of parts, added up, are the sum of all."""

    def __init__(self, bits: int) -> None:
        empty = empty_histogram(bits)
        self._bits, self._counts, self._range_exp = bits, empty.counts, empty.range_exp
        self._amax, self._total, self._zeros, self._nonfinite = 0.0, 0, 0, 0

    def add(self, histogram: AbsHistogram) -> None:
        """Raises CalibrationError as `merge`; nothing of the histogram has been added then."""
        nonfinite = self._nonfinite + histogram.nonfinite
        check_mergeable(self._bits, histogram, self._total, nonfinite)
        counts, range_exp = self._counts, self._range_exp
        if histogram.range_exp > range_exp:
            counts, range_exp = self.result().widened(histogram.range_exp).counts, histogram.range_exp
        added = _add(counts, histogram.counts, min(range_exp - histogram.range_exp, self._bits), _MOST - self._total)
        if added < 0:
            check_mergeable(self._bits, histogram, self._total + histogram.total, nonfinite)
        self._counts, self._range_exp = counts, range_exp
        self._amax = max(self._amax, histogram.amax)
        self._total, self._zeros, self._nonfinite = self._total + added, self._zeros + histogram.zeros, nonfinite

    def result(self) -> AbsHistogram:
        """A copy of the sum so far; of nothing, the empty histogram."""
        return AbsHistogram(self._counts.copy(), self._range_exp, self._amax, self._zeros, self._nonfinite)


def _add(into: Counts, counts: Counts, fold: int, room: int) -> int:
    """Add counts (n,), each 2**fold neighbours as one, to the first of `into` (n,); their total.

    -1 where that is more than `room`: then nothing is added.
    """
    if _LIBRARY is None:
        return add_numpy(into, counts, fold, room)
    try:
        where = address(counts)
    except (TypeError, ValueError):  # counts that may not be written, or are every other one of more
        return add_numpy(into, counts, fold, room)
    return int(_LIBRARY.tared_add(address(into), where, counts.size, fold, room))


def add_numpy(into: Counts, counts: Counts, fold: int, room: int) -> int:
    """`_add` without the compiled pass."""
    total = int(np.add.reduce(counts))
    if total > room:
        return -1
    for _ in range(fold):
        counts = counts[0::2] + counts[1::2]
    below = into[: counts.size]
    np.add(below, counts, out=below)
    return total
