"""Count |x| exactly, in histograms that merge without loss: AbsHistogram.

The bins are 2**k equal steps over [0, 2**range_exp), so the bin of a value is floor(|x| * 2**(k - range_exp)):
a multiplication by a power of two, exact in floating point. Doubling the range folds pairs of bins. Counts are
integers. Hence merging is exact, associative and commutative: over batches, days, cameras and boards, in any
order and any grouping, the bits are the same.

On the wire a histogram is a header, then the counts as count_codec.py packs them: 4096 bins of a real tensor in some
2 KiB (benchmarks/RESULTS.md). HistogramSum adds up any number of histograms in the memory of one.

Read in this order: AbsHistogram, `abs_histogram` (count), `merge` (add), `to_bytes` and `from_bytes` (transfer).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from calibrate.count_codec import pack, unpack
from calibrate.errors import CalibrationError
from calibrate.native import count, scan

DEFAULT_BITS = 12
MIN_BITS, MAX_BITS = 2, 16  # within them 2**(bits - range_exp) is a normal float32, and foreign bytes stay small
MIN_RANGE_EXP = -100  # below it |x| * 2**(k - range_exp) would overflow float32's exponent for subnormal data
MAX_RANGE_EXP = 128  # 2**128 is the first power of two beyond every finite float32
# Elements counted at a time. More: the second pass no longer finds them in the cache, and copies of them are large.
_PIECE = 1 << 20
_LARGEST = float(np.finfo(np.float32).max)
_MAX_TOTAL = 1 << 63  # int64 counts hold fewer values than this together; the same for those not finite

Counts = NDArray[np.int64]

_MAGIC = b"tAH3"
_HEADER = struct.Struct("<4sBxhIdQQ")  # magic, bits, range_exp, bins used, amax, zeros, nonfinite
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all before it


@dataclass(frozen=True, eq=False)
class AbsHistogram:
    """Hold counts of |x| over `2**bits` equal bins of [0, 2**range_exp).

    Args:
        counts: int64 (2**bits,); zeros are counted in bin 0 *and* in `zeros`.
        range_exp: Exponent of the end of the range, in [-100, 128].
        amax: The exact largest finite |x| (a float32 value); 0.0 when nothing finite was seen.
        zeros: Number of values that are exactly zero.
        nonfinite: Number of NaN and infinite values; they are in no bin.

    >>> x = np.array([0.0, -0.5, 1.5, np.inf], np.float32)
    >>> histogram = abs_histogram(x, bits=2)
    >>> histogram.counts.tolist(), histogram.bin_width         # four bins of 0.5 over [0, 2)
    ([1, 1, 0, 1], 0.5)
    >>> histogram.amax, histogram.zeros, histogram.nonfinite
    (1.5, 1, 1)
    """

    counts: NDArray[np.int64]
    range_exp: int
    amax: float
    zeros: int
    nonfinite: int

    def __eq__(self, other: object) -> bool:
        """Equal in every part, to the bit."""
        if not isinstance(other, AbsHistogram):
            return NotImplemented
        parts, others = ((h.range_exp, h.amax, h.zeros, h.nonfinite) for h in (self, other))
        return parts == others and np.array_equal(self.counts, other.counts)

    @property
    def bits(self) -> int:
        """log2 of the number of bins."""
        return int(self.counts.size).bit_length() - 1

    @property
    def bin_width(self) -> float:
        """Width of one bin, in the units of x."""
        return math.ldexp(1.0, self.range_exp - self.bits)

    @property
    def total(self) -> int:
        """Number of finite values counted."""
        return int(np.add.reduce(self.counts))

    def widened(self, range_exp: int) -> AbsHistogram:
        """Return the same data on the range [0, 2**range_exp), to the bit as if it had been counted on that range.

        Raises ValueError for a narrower range, or one beyond 2**128.
        """
        fold = range_exp - self.range_exp
        if fold < 0 or range_exp > MAX_RANGE_EXP:
            raise ValueError(f"a histogram only widens, to 128 at most: range_exp {self.range_exp} -> {range_exp}")
        if fold == 0:
            return self
        folded = self.counts
        for _ in range(min(fold, self.bits)):
            folded = folded[0::2] + folded[1::2]
        counts = np.zeros_like(self.counts)
        counts[: folded.size] = folded
        return AbsHistogram(counts, range_exp, self.amax, self.zeros, self.nonfinite)


def empty_histogram(bits: int = DEFAULT_BITS) -> AbsHistogram:
    """Return the identity of `merge`: nothing seen, on the narrowest range.

    Args:
        bits: log2 of the number of bins, 2 to 16.

    >>> seen = abs_histogram(np.float32([0.5, 3.0]))
    >>> merge(empty_histogram(), seen) == seen
    True
    """
    return AbsHistogram(np.zeros(1 << bits, np.int64), MIN_RANGE_EXP, 0.0, 0, 0)


def range_exp_for(amax: float) -> int:
    """Return the smallest e with amax < 2**e, clamped to [-100, 128].

    >>> range_exp_for(0.75), range_exp_for(1.0), range_exp_for(0.0)
    (0, 1, -100)
    """
    _, exponent = math.frexp(amax)  # amax = m * 2**exponent, 0.5 <= m < 1
    return min(max(exponent, MIN_RANGE_EXP), MAX_RANGE_EXP) if amax > 0.0 else MIN_RANGE_EXP


def abs_histogram(x: NDArray[np.floating], bits: int = DEFAULT_BITS) -> AbsHistogram:
    """Count |x| of an array.

    Args:
        x: float16 or float32, of any shape; it must not change meanwhile.
        bits: log2 of the number of bins, 2 to 16.

    Raises ValueError for float64, whose values need not survive the rounding to float32, and for `bits` outside 2..16.

    >>> first, second = np.float32([0.5, 3.0]), np.float32([0.25])
    >>> merge(abs_histogram(first), abs_histogram(second)) == abs_histogram(np.concatenate((first, second)))
    True
    """
    if x.dtype not in (np.float32, np.float16) or not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"abs_histogram takes float32 or float16 and 2 to 16 bits, got {x.dtype} and {bits}")
    flat = np.ascontiguousarray(x).reshape(-1)
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    with np.errstate(invalid="ignore"):  # a signalling NaN of float16; it is counted like any other
        return merge_all((_piece(piece.astype(np.float32, copy=False), bits) for piece in pieces), bits)


def _piece(values: NDArray[np.float32], bits: int) -> AbsHistogram:
    """Count a piece in two passes: the range, then the counts."""
    amax, zeros = scan(values)
    size = values.size
    if not np.isfinite(amax):
        values = values[np.isfinite(values)]
        amax, _ = scan(values)
    range_exp = range_exp_for(amax)
    counts = count(values, 2.0 ** (bits - range_exp), 1 << bits)
    return AbsHistogram(counts, range_exp, amax, zeros, size - values.size)


def merge(a: AbsHistogram, b: AbsHistogram) -> AbsHistogram:
    """Return the histogram of both data sets together; exact, associative, commutative.

    Raises CalibrationError:
        histogram.bits      the two have different numbers of bins
        histogram.overflow  together they count 2**63 values or more

    >>> night, day = abs_histogram(np.float32([0.25, 0.5])), abs_histogram(np.float32([8.0]))
    >>> both = merge(night, day)
    >>> both.total, both.amax, both.range_exp
    (3, 8.0, 4)
    """
    _check_mergeable(a.bits, b, a.total + b.total, a.nonfinite + b.nonfinite)
    range_exp = max(a.range_exp, b.range_exp)
    return AbsHistogram(
        a.widened(range_exp).counts + b.widened(range_exp).counts,
        range_exp,
        max(a.amax, b.amax),
        a.zeros + b.zeros,
        a.nonfinite + b.nonfinite,
    )


def _check_mergeable(bits: int, histogram: AbsHistogram, total: int, nonfinite: int) -> None:
    """Raise, as `merge` does, unless a histogram merges with another of `bits` to so many values, finite and not."""
    if histogram.bits != bits:
        raise CalibrationError(
            "histogram.bits",
            f"histograms of {1 << bits} and {histogram.counts.size} bins",
            "the same number of bins in both",
            "count both with the same `bits` of abs_histogram: boards that run one release of tared do",
        )
    if total >= _MAX_TOTAL or nonfinite >= _MAX_TOTAL:
        raise CalibrationError(
            "histogram.overflow",
            f"{total} values to count, {nonfinite} not finite",
            "fewer than 2**63",
            "start a new histogram: more values change no scale",
        )


def merge_all(histograms: Iterable[AbsHistogram], bits: int = DEFAULT_BITS) -> AbsHistogram:
    """Merge any number of histograms; without any, return the empty one of `bits`.

    Raises CalibrationError (`histogram.bits`, `histogram.overflow`) as `merge` does.

    >>> merge_all(abs_histogram(np.float32([value])) for value in (0.5, 1.0, 2.0)).total
    3
    """
    remaining = iter(histograms)
    return reduce(merge, remaining, next(remaining, empty_histogram(bits)))


def merge_into(known: dict[str, AbsHistogram], seen: Mapping[str, AbsHistogram]) -> None:
    """Merge histograms, tensor by tensor, into `known`; tensors that `known` lacks are added to it.

    Raises CalibrationError (`histogram.bits`, `histogram.overflow`) as `merge` does.

    >>> known = {"conv1": abs_histogram(np.float32([0.5]))}
    >>> merge_into(known, {"conv1": abs_histogram(np.float32([1.0])), "conv2": abs_histogram(np.float32([2.0]))})
    >>> {name: histogram.total for name, histogram in known.items()}
    {'conv1': 2, 'conv2': 1}
    """
    for name, histogram in seen.items():
        known[name] = merge(known[name], histogram) if name in known else histogram


def merged(one: Mapping[str, AbsHistogram], other: Mapping[str, AbsHistogram]) -> dict[str, AbsHistogram]:
    """Return the histograms of both, merged tensor by tensor; neither argument changes.

    Raises CalibrationError (`histogram.bits`, `histogram.overflow`) as `merge` does.

    >>> day, night = ({"conv1": abs_histogram(np.float32([value]))} for value in (4.0, 0.5))
    >>> merged(day, night)["conv1"].total, day["conv1"].total
    (2, 1)
    """
    total = dict(one)
    merge_into(total, other)
    return total


def nbytes(histograms: Mapping[str, AbsHistogram]) -> int:
    """Return the bytes that the counts take in memory.

    >>> nbytes({"conv1": empty_histogram(bits=12)})            # 4096 counts of 8 bytes
    32768
    """
    return sum(histogram.counts.nbytes for histogram in histograms.values())


def to_bytes(histogram: AbsHistogram) -> bytes:
    """Pack a histogram, exactly: `from_bytes` gives back an equal one.

    >>> histogram = abs_histogram(np.float32([0.25, 0.5, 0.5]))
    >>> from_bytes(to_bytes(histogram)) == histogram
    True
    """
    used = int(np.flatnonzero(histogram.counts)[-1]) + 1 if histogram.counts.any() else 0
    header = _HEADER.pack(
        _MAGIC,
        histogram.bits,
        histogram.range_exp,
        used,
        histogram.amax,
        histogram.zeros,
        histogram.nonfinite,
    )
    content = header + pack(histogram.counts[:used])
    return content + _CHECKSUM.pack(zlib.crc32(content))


def from_bytes(content: bytes) -> AbsHistogram:
    """Read the histogram that `to_bytes` wrote.

    Raises CalibrationError:
        histogram.damaged   foreign, truncated or changed bytes, or parts that do not fit each other

    >>> content = to_bytes(abs_histogram(np.float32([0.25, 0.5])))
    >>> from_bytes(content).total
    2
    >>> try:
    ...     from_bytes(content[:-1])
    ... except CalibrationError as error:
    ...     print(error.code)
    histogram.damaged
    """
    body, checksum = content[: -_CHECKSUM.size], content[-_CHECKSUM.size :]
    if len(body) < _HEADER.size or checksum != _CHECKSUM.pack(zlib.crc32(body)):
        raise _damaged(f"{len(content)} bytes whose checksum is not theirs")
    magic, bits, range_exp, used, amax, zeros, nonfinite = _HEADER.unpack_from(body)
    if magic != _MAGIC or not MIN_BITS <= bits <= MAX_BITS or used > 1 << bits:
        raise _damaged(f"a header of {magic!r} with {used} of 2**{bits} bins")
    counts = np.empty(1 << bits, np.int64)
    counts[used:] = 0
    filled = counts[:used]
    try:
        unpack(body[_HEADER.size :], filled)
    except ValueError as error:
        raise _damaged(f"counts that are none ({error})") from error
    if used and not counts[used - 1]:
        raise _damaged(f"{used} bins of which the last is empty")
    if not _countable(filled):
        raise _damaged("counts that are negative, or more than int64 holds")
    return _fitting(AbsHistogram(counts, range_exp, amax, zeros, nonfinite), used)


def checked(histogram: AbsHistogram) -> AbsHistogram:
    """Return the histogram, if its parts fit each other.

    Meant for histograms from outside: one that was counted here fits by construction.

    Raises CalibrationError (`histogram.damaged`) if they do not.

    >>> from dataclasses import replace
    >>> histogram = abs_histogram(np.float32([0.25, 0.5]))
    >>> checked(histogram) is histogram
    True
    >>> try:
    ...     checked(replace(histogram, amax=3.0))              # beyond the last bin that has counts
    ... except CalibrationError as error:
    ...     print(error.code)
    histogram.damaged
    """
    counts = histogram.counts
    sound = (
        counts.dtype == np.int64 and counts.ndim == 1 and counts.size in {1 << b for b in range(MIN_BITS, MAX_BITS + 1)}
    )
    if not sound or not _countable(counts):
        raise _damaged(f"{counts.dtype} counts of shape {counts.shape}, or negative, or more than int64 holds")
    return _fitting(histogram, int(np.flatnonzero(counts)[-1]) + 1 if counts.any() else 0)


def _countable(counts: Counts) -> bool:
    """Return True if no count is negative, and int64 holds all of them together."""
    bits = int(np.bitwise_or.reduce(counts))  # at least the largest, and negative where one of them is: in one pass
    return bits >= 0 and (counts.size * bits < _MAX_TOTAL or sum(counts.tolist()) < _MAX_TOTAL)


def _fitting(histogram: AbsHistogram, used: int) -> AbsHistogram:
    """Check the parts of a histogram whose counts are sound and end before bin `used`. Raises as `checked`."""
    amax, range_exp, zeros, first = histogram.amax, histogram.range_exp, histogram.zeros, int(histogram.counts[0])
    if not (0.0 <= amax <= _LARGEST and amax == float(np.float32(amax))):
        raise _damaged(f"amax {amax}, which is no float32")
    if not range_exp_for(amax) <= range_exp <= MAX_RANGE_EXP:
        raise _damaged(f"amax {amax} on a range of 2**{range_exp}")
    if int(math.ldexp(amax, histogram.bits - range_exp)) != max(used - 1, 0):
        raise _damaged(f"amax {amax}, and bin {max(used - 1, 0)} is the last with counts")
    if not (0 <= zeros <= first and 0 <= histogram.nonfinite < _MAX_TOTAL):
        raise _damaged(f"{zeros} zeros in a first bin of {first}, {histogram.nonfinite} not finite")
    if (amax == 0.0) != (used <= 1 and first == zeros):
        raise _damaged(f"amax {amax}, and {histogram.total - zeros} values that are not zero")
    return histogram


def _damaged(found: str) -> CalibrationError:
    return CalibrationError(
        "histogram.damaged", found, "a histogram as tared writes it", "transfer or collect it again"
    )


class HistogramSum:
    """Add up any number of histograms, in the memory of one; sums may be added to sums.

    Args:
        bits: log2 of the number of bins of every histogram, 2 to 16.

    >>> total = HistogramSum(bits=12)
    >>> for frame in (np.float32([0.5]), np.float32([3.0])):
    ...     total.add(abs_histogram(frame))
    >>> total.result() == abs_histogram(np.float32([0.5, 3.0]))
    True
    """

    def __init__(self, bits: int) -> None:
        empty = empty_histogram(bits)
        self._bits, self._counts, self._range_exp = bits, empty.counts, empty.range_exp
        self._amax, self._total, self._zeros, self._nonfinite = 0.0, 0, 0, 0

    def add(self, histogram: AbsHistogram) -> None:
        """Add a histogram.

        Raises CalibrationError (`histogram.bits`, `histogram.overflow`) as `merge` does, and has added nothing then.
        """
        total, nonfinite = self._total + histogram.total, self._nonfinite + histogram.nonfinite
        _check_mergeable(self._bits, histogram, total, nonfinite)
        if histogram.range_exp > self._range_exp:
            self._counts = self.result().widened(histogram.range_exp).counts
            self._range_exp = histogram.range_exp
        folded = histogram.counts
        for _ in range(min(self._range_exp - histogram.range_exp, self._bits)):
            folded = folded[0::2] + folded[1::2]
        self._counts[: folded.size] += folded
        self._amax = max(self._amax, histogram.amax)
        self._total, self._zeros, self._nonfinite = total, self._zeros + histogram.zeros, nonfinite

    def result(self) -> AbsHistogram:
        """Return a copy of the sum so far; before the first, the empty histogram."""
        return AbsHistogram(self._counts.copy(), self._range_exp, self._amax, self._zeros, self._nonfinite)
