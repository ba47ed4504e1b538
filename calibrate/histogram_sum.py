"""Many histograms merged into one in place: what `merge` computes, without a new array for each of them."""

from __future__ import annotations

from calibrate.histogram import AbsHistogram, check_mergeable, empty_histogram


class HistogramSum:
    """Takes the memory of a histogram, whatever is added. Sums of parts, added up, are the sum of all."""

    def __init__(self, bits: int) -> None:
        self._sum = empty_histogram(bits)
        self._total = 0

    @property
    def total(self) -> int:
        """Number of finite values counted."""
        return self._total

    def add(self, histogram: AbsHistogram) -> None:
        """Raises CalibrationError as `merge`; nothing of the histogram has been added then."""
        known, total = self._sum, self._total + histogram.total
        check_mergeable(known, histogram, total)
        range_exp = max(known.range_exp, histogram.range_exp)
        counts = known.widened(range_exp).counts
        folded = histogram.folded(range_exp)
        counts[: folded.size] += folded
        self._total = total
        self._sum = AbsHistogram(
            counts,
            range_exp,
            max(known.amax, histogram.amax),
            known.zeros + histogram.zeros,
            known.nonfinite + histogram.nonfinite,
        )

    def result(self) -> AbsHistogram:
        """A copy of the sum so far; of nothing, the empty histogram."""
        known = self._sum
        return AbsHistogram(known.counts.copy(), known.range_exp, known.amax, known.zeros, known.nonfinite)
