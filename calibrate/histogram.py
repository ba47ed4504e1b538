"""AbsHistogram: exact, mergeable counts of |x| on a power-of-two range.

The bins are 2**k equal steps over [0, 2**range_exp), so the bin of a value is floor(|x| * 2**(k - range_exp)):
a multiplication by a power of two, exact in floating point. Doubling the range folds pairs of bins. Counts are
integers. Hence merging is exact, associative and commutative: over batches, days, cameras and boards, in any
order and any grouping, the bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.errors import CalibrationError

DEFAULT_BITS = 12
MIN_RANGE_EXP = -100  # below it |x| * 2**(k - range_exp) would overflow float32's exponent for subnormal data
MAX_RANGE_EXP = 128  # 2**128 is the first power of two beyond every finite float32
_CHUNK = 1 << 16  # elements per pass: the temporaries stay in the cache


@dataclass(frozen=True)
class AbsHistogram:
    """Counts of |x| over `2**bits` equal bins of [0, 2**range_exp).

    counts: int64 (2**bits,); zeros are counted in bin 0 *and* in `zeros`.
    amax: the exact largest finite |x| (float32 value), 0.0 when nothing finite was seen.
    nonfinite: number of NaN and infinite values; they are in no bin.
    """

    counts: NDArray[np.int64]
    range_exp: int
    amax: float
    zeros: int
    nonfinite: int

    @property
    def bits(self) -> int:
        """log2 of the number of bins."""
        return int(self.counts.size).bit_length() - 1

    @property
    def bin_width(self) -> float:
        """Width of one bin, in the units of x."""
        return float(np.ldexp(1.0, self.range_exp - self.bits))

    @property
    def total(self) -> int:
        """Number of finite values counted."""
        return int(self.counts.sum())

    def widened(self, range_exp: int) -> AbsHistogram:
        """The same data on the range [0, 2**range_exp); equal to having collected on that range from the start."""
        fold = range_exp - self.range_exp
        if fold < 0:
            raise ValueError(f"a histogram only widens: range_exp {self.range_exp} -> {range_exp}")
        counts = np.zeros_like(self.counts)
        group = 1 << min(fold, self.bits)
        folded = self.counts.reshape(-1, group).sum(axis=1)
        counts[: folded.size] = folded
        return AbsHistogram(counts, range_exp, self.amax, self.zeros, self.nonfinite)


def empty_histogram(bits: int = DEFAULT_BITS) -> AbsHistogram:
    """The identity of `merge`: nothing seen, on the narrowest range."""
    return AbsHistogram(np.zeros(1 << bits, np.int64), MIN_RANGE_EXP, 0.0, 0, 0)


def range_exp_for(amax: float) -> int:
    """The smallest e with amax < 2**e, clamped to [-100, 128]."""
    _, exponent = np.frexp(np.float32(amax))  # amax = m * 2**exponent, 0.5 <= m < 1
    return int(np.clip(exponent, MIN_RANGE_EXP, MAX_RANGE_EXP)) if amax > 0.0 else MIN_RANGE_EXP


def abs_histogram(x: NDArray[np.floating], bits: int = DEFAULT_BITS) -> AbsHistogram:
    """Histogram of |x| for an array of any shape, float16 or float32.

    float64 input is refused with ValueError: its values need not survive the rounding to float32.
    """
    if x.dtype not in (np.float32, np.float16):
        raise ValueError(f"abs_histogram takes float32 or float16, got {x.dtype}")
    flat = x.reshape(-1)
    amax, nonfinite = _finite_amax(flat)
    range_exp = range_exp_for(amax)
    scale = np.float32(np.ldexp(1.0, bits - range_exp))
    counts = np.zeros(1 << bits, np.int64)
    zeros = 0
    for start in range(0, flat.size, _CHUNK):
        magnitude = np.abs(flat[start : start + _CHUNK].astype(np.float32, copy=False))
        if nonfinite:
            magnitude = magnitude[np.isfinite(magnitude)]
        zeros += magnitude.size - int(np.count_nonzero(magnitude))
        bins = (magnitude * scale).astype(np.int32)  # truncation is floor: the values are not negative
        counts += np.bincount(bins, minlength=counts.size)
    return AbsHistogram(counts, range_exp, amax, zeros, nonfinite)


def _finite_amax(flat: NDArray[np.floating]) -> tuple[float, int]:
    """Largest finite |x| and the number of non-finite values."""
    if flat.size == 0:
        return 0.0, 0
    amax = float(max(flat.max(), -flat.min()))  # NaN and inf come through, and only then is the slow path taken
    if np.isfinite(amax):
        return amax, 0
    finite = flat[np.isfinite(flat)]
    amax = float(np.abs(finite).max()) if finite.size else 0.0
    return amax, int(flat.size - finite.size)


def merge(a: AbsHistogram, b: AbsHistogram) -> AbsHistogram:
    """The histogram of both data sets together; exact, associative, commutative.

    Raises CalibrationError (`histogram.bits`) when the two have different numbers of bins.
    """
    if a.bits != b.bits:
        raise CalibrationError(
            "histogram.bits",
            f"histograms of {a.counts.size} and {b.counts.size} bins",
            "the same number of bins in both",
            "collect both with the same setting of calibration.bins",
        )
    range_exp = max(a.range_exp, b.range_exp)
    wide_a, wide_b = a.widened(range_exp), b.widened(range_exp)
    return AbsHistogram(
        wide_a.counts + wide_b.counts,
        range_exp,
        max(a.amax, b.amax),
        a.zeros + b.zeros,
        a.nonfinite + b.nonfinite,
    )


def merge_all(histograms: Iterable[AbsHistogram], bits: int = DEFAULT_BITS) -> AbsHistogram:
    """`merge` over any number of histograms; of none, the empty one."""
    merged = empty_histogram(bits)
    for histogram in histograms:
        merged = merge(merged, histogram)
    return merged
