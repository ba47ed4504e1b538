"""AbsHistogram: exact, mergeable counts of |x| on a power-of-two range.

The bins are 2**k equal steps over [0, 2**range_exp), so the bin of a value is floor(|x| * 2**(k - range_exp)):
a multiplication by a power of two, exact in floating point. Doubling the range folds pairs of bins. Counts are
integers. Hence merging is exact, associative and commutative: over batches, days, cameras and boards, in any
order and any grouping, the bits are the same.

On the wire a histogram is a header, then the differences of neighbouring counts: they are small where the counts are
large, so LZMA packs their bytes well: 4096 bins of a real tensor into under 2 KiB (benchmarks/RESULTS.md).
"""

from __future__ import annotations

import lzma
import math
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from calibrate.collect import count, survey
from calibrate.errors import CalibrationError

DEFAULT_BITS = 12
MIN_BITS, MAX_BITS = 2, 16  # within them 2**(bits - range_exp) is a normal float32, and foreign bytes stay small
MIN_RANGE_EXP = -100  # below it |x| * 2**(k - range_exp) would overflow float32's exponent for subnormal data
MAX_RANGE_EXP = 128  # 2**128 is the first power of two beyond every finite float32
_PIECE = 1 << 20  # elements collected at a time: the second pass finds them in the cache, and copies of them stay small
_MAX_TOTAL = 1 << 63  # values that int64 counts can hold together; the same for those not finite

_MAGIC = b"tAH1"
_HEADER = struct.Struct("<4sBBhIdQQ")  # magic, bits, bytes per difference, range_exp, bins used, amax, zeros, nonfinite
_CHECKSUM = struct.Struct("<I")  # CRC-32 of all before it
# A dictionary of twice 4096 bins of 8 bytes. The context of neighbouring bytes says nothing about counts: it is off.
_LZMA = [{"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 1 << 16, "lc": 0, "lp": 0, "pb": 0}]


@dataclass(frozen=True, eq=False)
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
        return float(np.ldexp(1.0, self.range_exp - self.bits))

    @property
    def total(self) -> int:
        """Number of finite values counted."""
        return int(self.counts.sum())

    def widened(self, range_exp: int) -> AbsHistogram:
        """The same data on the range [0, 2**range_exp); equal to having collected on that range from the start.

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
    """The identity of `merge`: nothing seen, on the narrowest range."""
    return AbsHistogram(np.zeros(1 << bits, np.int64), MIN_RANGE_EXP, 0.0, 0, 0)


def range_exp_for(amax: float) -> int:
    """The smallest e with amax < 2**e, clamped to [-100, 128]."""
    _, exponent = math.frexp(amax)  # amax = m * 2**exponent, 0.5 <= m < 1
    return min(max(exponent, MIN_RANGE_EXP), MAX_RANGE_EXP) if amax > 0.0 else MIN_RANGE_EXP


def abs_histogram(x: NDArray[np.floating], bits: int = DEFAULT_BITS) -> AbsHistogram:
    """Histogram of |x| for an array of any shape, float16 or float32.

    float64 input is refused with ValueError: its values need not survive the rounding to float32. So are `bits` outside
    of 2 to 16. Nobody may write to x meanwhile.
    """
    if x.dtype not in (np.float32, np.float16) or not MIN_BITS <= bits <= MAX_BITS:
        raise ValueError(f"abs_histogram takes float32 or float16 and 2 to 16 bits, got {x.dtype} and {bits}")
    flat = np.ascontiguousarray(x).reshape(-1)
    pieces = (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
    with np.errstate(invalid="ignore"):  # a signalling NaN of float16; it is counted like any other
        return merge_all((_piece(piece.astype(np.float32, copy=False), bits) for piece in pieces), bits)


def _piece(values: NDArray[np.float32], bits: int) -> AbsHistogram:
    """Two passes: the range, then the counts."""
    amax, zeros = survey(values)
    size = values.size
    if not np.isfinite(amax):
        values = values[np.isfinite(values)]
        amax, _ = survey(values)
    range_exp = range_exp_for(amax)
    counts = count(values, 2.0 ** (bits - range_exp), 1 << bits)
    return AbsHistogram(counts, range_exp, amax, zeros, size - values.size)


def merge(a: AbsHistogram, b: AbsHistogram) -> AbsHistogram:
    """The histogram of both data sets together; exact, associative, commutative.

    Raises CalibrationError: `histogram.bits` when the two have different numbers of bins, `histogram.overflow` when
    they count 2**63 values or more together.
    """
    if a.bits != b.bits:
        raise CalibrationError(
            "histogram.bits",
            f"histograms of {a.counts.size} and {b.counts.size} bins",
            "the same number of bins in both",
            "collect both with the same setting of calibration.bins",
        )
    if max(a.total + b.total, a.nonfinite + b.nonfinite) >= _MAX_TOTAL:
        raise CalibrationError(
            "histogram.overflow",
            f"{a.total + b.total} values to count, {a.nonfinite + b.nonfinite} not finite",
            "fewer than 2**63",
            "start a new histogram: these have long settled",
        )
    range_exp = max(a.range_exp, b.range_exp)
    return AbsHistogram(
        a.widened(range_exp).counts + b.widened(range_exp).counts,
        range_exp,
        max(a.amax, b.amax),
        a.zeros + b.zeros,
        a.nonfinite + b.nonfinite,
    )


def merge_all(histograms: Iterable[AbsHistogram], bits: int = DEFAULT_BITS) -> AbsHistogram:
    """`merge` over any number of histograms; of none, the empty one."""
    remaining = iter(histograms)
    return reduce(merge, remaining, next(remaining, empty_histogram(bits)))


def merge_into(known: dict[str, AbsHistogram], seen: Mapping[str, AbsHistogram]) -> None:
    """Merge histograms by tensor into those that are known so far."""
    for name, histogram in seen.items():
        known[name] = merge(known[name], histogram) if name in known else histogram


def merged(one: Mapping[str, AbsHistogram], other: Mapping[str, AbsHistogram]) -> dict[str, AbsHistogram]:
    """Those of both, by tensor."""
    together = dict(one)
    merge_into(together, other)
    return together


def nbytes(histograms: Mapping[str, AbsHistogram]) -> int:
    """What their counts take."""
    return sum(histogram.counts.nbytes for histogram in histograms.values())


def to_bytes(histogram: AbsHistogram) -> bytes:
    """The compact exact form: `from_bytes` gives back an equal histogram."""
    used = int(np.flatnonzero(histogram.counts)[-1]) + 1 if histogram.counts.any() else 0
    differences = np.diff(histogram.counts[:used].astype(np.uint64), prepend=np.uint64(0))
    zigzag = (differences << np.uint64(1)) ^ (differences.view(np.int64) >> 63).view(np.uint64)  # the sign comes last
    width = (int(zigzag.max(initial=0)).bit_length() + 7) // 8
    planes = zigzag.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :width].T  # the noisy low bytes, then the calm ones
    header = _HEADER.pack(
        _MAGIC,
        histogram.bits,
        width,
        histogram.range_exp,
        used,
        histogram.amax,
        histogram.zeros,
        histogram.nonfinite,
    )
    content = header + lzma.compress(planes.tobytes(), lzma.FORMAT_RAW, filters=_LZMA)
    return content + _CHECKSUM.pack(zlib.crc32(content))


def from_bytes(content: bytes) -> AbsHistogram:
    """Read what `to_bytes` wrote.

    Raises CalibrationError (`histogram.damaged`) for anything else: foreign, cut, changed, or not a histogram at all.
    """
    body, checksum = content[: -_CHECKSUM.size], content[-_CHECKSUM.size :]
    if len(body) < _HEADER.size or checksum != _CHECKSUM.pack(zlib.crc32(body)):
        raise _damaged(f"{len(content)} bytes whose checksum is not theirs")
    magic, bits, width, range_exp, used, amax, zeros, nonfinite = _HEADER.unpack_from(body)
    if magic != _MAGIC or not MIN_BITS <= bits <= MAX_BITS or width > 8 or used > 1 << bits:
        raise _damaged(f"a header of {magic!r} with {used} of 2**{bits} bins in {width} bytes each")
    planes = _decompressed(body[_HEADER.size :], used * width)
    zigzag = np.zeros((used, 8), np.uint8)
    zigzag[:, :width] = np.frombuffer(planes, np.uint8).reshape(width, used).T
    values = zigzag.reshape(-1).view("<u8")
    differences = (values >> np.uint64(1)) ^ (np.uint64(0) - (values & np.uint64(1)))
    counts = np.zeros(1 << bits, np.int64)
    counts[:used] = np.cumsum(differences, dtype=np.uint64).view(np.int64)
    return checked(AbsHistogram(counts, range_exp, amax, zeros, nonfinite))


def _decompressed(data: bytes, size: int) -> bytes:
    """Exactly `size` bytes, and never more: a few bytes of LZMA can stand for gigabytes."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_LZMA)
    try:
        planes = decompressor.decompress(data, max_length=size + 1)
    except lzma.LZMAError as error:
        raise _damaged(f"counts that do not decompress ({error})") from error
    if len(planes) != size or not decompressor.eof or decompressor.unused_data:
        raise _damaged(f"counts of {len(planes)} bytes or more, where the header says {size}")
    return planes


def checked(histogram: AbsHistogram) -> AbsHistogram:
    """The histogram, when its parts fit each other. Raises CalibrationError (`histogram.damaged`) otherwise.

    For what comes from outside: a histogram that was collected here fits by construction.
    """
    counts, amax = histogram.counts, histogram.amax
    sound = (
        counts.dtype == np.int64 and counts.ndim == 1 and counts.size in {1 << b for b in range(MIN_BITS, MAX_BITS + 1)}
    )
    if not sound or (counts < 0).any() or sum(counts.tolist()) >= _MAX_TOTAL:
        raise _damaged(f"{counts.dtype} counts of shape {counts.shape}, or negative, or more than int64 holds")
    if not (0.0 <= amax <= float(np.finfo(np.float32).max) and amax == float(np.float32(amax))):
        raise _damaged(f"amax {amax}, which is no float32")
    if not range_exp_for(amax) <= histogram.range_exp <= MAX_RANGE_EXP:
        raise _damaged(f"amax {amax} on a range of 2**{histogram.range_exp}")
    used = int(np.flatnonzero(counts)[-1]) if counts.any() else 0
    if int(amax / histogram.bin_width) != used:
        raise _damaged(f"amax {amax}, and bin {used} is the last with counts")
    if not (0 <= histogram.zeros <= counts[0] and 0 <= histogram.nonfinite < _MAX_TOTAL):
        raise _damaged(f"{histogram.zeros} zeros in a first bin of {counts[0]}, {histogram.nonfinite} not finite")
    return histogram


def _damaged(found: str) -> CalibrationError:
    return CalibrationError(
        "histogram.damaged", found, "a histogram as tared writes it", "transfer or collect it again"
    )
