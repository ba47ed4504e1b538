"""Many histograms merged into one in place: what `merge` computes, without a new array for each of them."""

from __future__ import annotations

import numpy as np

from calibrate.histogram import AbsHistogram, check_mergeable, empty_histogram


class HistogramSum:
    """Takes the memory of a histogram, whatever is added. Sums of parts, added up, are the sum of all."""

    def __init__(self, bits: int) -> None:
        empty = empty_histogram(bits)
        self._bits, self._counts, self._range_exp = bits, empty.counts, empty.range_exp
        self._amax, self._total, self._zeros, self._nonfinite = 0.0, 0, 0, 0

    def add(self, histogram: AbsHistogram) -> None:
        """Raises CalibrationError as `merge`; nothing of the histogram has been added then."""
        total, nonfinite = self._total + histogram.total, self._nonfinite + histogram.nonfinite
        check_mergeable(self._bits, histogram, total, nonfinite)
        counts = histogram.counts
        if histogram.range_exp > self._range_exp:
            self._counts, self._range_exp = self.result().widened(histogram.range_exp).counts, histogram.range_exp
        elif histogram.range_exp < self._range_exp:
            counts = histogram.folded(self._range_exp)
        below = self._counts[: counts.size]
        np.add(below, counts, out=below)
        self._amax = max(self._amax, histogram.amax)
        self._total, self._zeros, self._nonfinite = total, self._zeros + histogram.zeros, nonfinite

    def result(self) -> AbsHistogram:
        """A copy of the sum so far; of nothing, the empty histogram."""
        return AbsHistogram(self._counts.copy(), self._range_exp, self._amax, self._zeros, self._nonfinite)
