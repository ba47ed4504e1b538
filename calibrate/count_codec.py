"""Pack counts exactly, by Rice codes of the differences between neighbours in blocks of 64; small and quick to read.

A count's neighbour differs from it by about its square root, so the differences are small, and as noisy as what was
counted: no dictionary finds anything in them. A Rice code (Rice & Plaunt 1971; Golomb 1966) writes the lowest `width`
bits of each as they are and the rest in unary. On histograms of real networks that is a tenth longer than LZMA of the
same differences, and read fifteen times as fast (benchmarks/RESULTS.md).

The layout, bits from the lowest on:

1. the size of the remainders in bytes, uint32;
2. a width per block, one byte; a block of width 255 has no difference but 0 and takes nothing else;
3. the remainders, block by block, in 8 * width bytes each;
4. the unary parts: zeros, ended by a one.

Differences are zigzag numbers: 0, -1, 1, -2, ... The last block is filled up with zeros.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from calibrate.native import LIBRARY, address

_BLOCK = 64
_SAME = 255
_SIZE = struct.Struct("<I")
_PADDING = bytes(16)  # the compiled pass may read as much behind the end
_MAX_TOTAL = 1 << 63  # int64 counts hold fewer values than this together

Counts = NDArray[np.int64]
Words = NDArray[np.uint64]


def pack(counts: Counts) -> bytes:
    """Pack counts, int64 (n,), none negative."""
    values = np.zeros(-(-counts.size // _BLOCK) * _BLOCK, np.uint64)
    differences = np.diff(counts, prepend=np.int64(0))
    values[: counts.size] = ((differences << 1) ^ (differences >> 63)).view(np.uint64)
    blocks = values.reshape(-1, _BLOCK)
    widths = _widths(blocks)
    low = [np.empty(0, np.uint8)] * len(blocks)
    for width in np.unique(widths[(widths != _SAME) & (widths != 0)]):
        places = np.flatnonzero(widths == width)
        bits = (blocks[places, :, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1)
        packed = np.packbits(bits.astype(np.uint8).reshape(len(places), -1), axis=1, bitorder="little")
        for place, row in zip(places, packed, strict=True):
            low[place] = row
    remainders = b"".join(row.tobytes() for row in low)
    filled = widths != _SAME
    quotients = (blocks[filled] >> widths[filled, None].astype(np.uint64)).reshape(-1).astype(np.int64)
    ends = np.cumsum(quotients + 1)
    unary = np.zeros(int(ends[-1]) if ends.size else 0, np.uint8)
    unary[ends - 1] = 1
    parts = _SIZE.pack(len(remainders)), widths.tobytes(), remainders, np.packbits(unary, bitorder="little").tobytes()
    return b"".join(parts)


def unpack(data: bytes, into: Counts) -> None:
    """Read counts that `pack` wrote, as many as `into`, int64 (n,), has room for.

    Raises ValueError for bytes of another layout, and for counts that are negative, or 2**63 and more together.
    """
    if LIBRARY is None:
        into[:] = unpack_numpy(data, into.size)
    elif LIBRARY.tared_unpack(data + _PADDING, len(data), address(into), into.size):
        raise ValueError("other bytes, or too many counts")


def unpack_numpy(packed: bytes, size: int) -> Counts:
    """Do what `unpack` does for `size` counts, without the compiled pass."""
    if len(packed) < _SIZE.size:
        raise ValueError("too short")
    (remainders,) = _SIZE.unpack_from(packed)
    count, data = -(-size // _BLOCK), np.frombuffer(packed, np.uint8)[_SIZE.size :]
    widths, low, high = data[:count], data[count : count + remainders], data[count + remainders :]
    filled = widths != _SAME
    sizes = np.where(filled, widths, 0).astype(np.int64) * 8
    if widths.size < count or (widths[filled] > 63).any() or low.size < remainders or sizes.sum() != remainders:
        raise ValueError("other bytes")
    values = np.zeros((count, _BLOCK), np.uint64)
    values[filled] = _quotients(high, widths[filled].astype(np.uint64)) | _remainders(low, sizes[filled])
    zigzag = values.reshape(-1)
    differences = (zigzag[:size] >> np.uint64(1)) ^ (np.uint64(0) - (zigzag[:size] & np.uint64(1)))
    counts = np.cumsum(differences, dtype=np.uint64).view(np.int64)
    if zigzag[size:].any() or (counts < 0).any() or exact_sum(counts) >= _MAX_TOTAL:
        raise ValueError("counts behind the last, negative, or too many")
    return counts


def exact_sum(counts: Counts) -> int:
    """Return the sum of counts (n,), also if int64 does not hold it."""
    safe = counts.size * max(int(counts.max(initial=0)), -int(counts.min(initial=0))) < _MAX_TOTAL
    return int(counts.sum()) if safe else sum(counts.tolist())


def _widths(blocks: Words) -> NDArray[np.uint8]:
    """Return per block (n, 64) the width that takes the fewest bits, of those around the logarithm of its mean."""
    mean = blocks.astype(np.float64).mean(axis=1)
    near = np.maximum(np.log2(np.maximum(mean, 1.0)).astype(np.int64) + np.arange(-1, 2)[:, None], 0)
    quotients = blocks >> near[..., None].astype(np.uint64)
    lengths = quotients.astype(np.float64).sum(axis=2) + _BLOCK * near
    widths = np.take_along_axis(near, lengths.argmin(axis=0)[None], axis=0)[0]
    return np.where(mean > 0.0, np.minimum(widths, 63), _SAME).astype(np.uint8)


def _quotients(high: NDArray[np.uint8], widths: Words) -> Words:
    """Return per filled block its unary parts, shifted to their place in the values: (blocks, 64).

    Raises ValueError for parts of another number or size.
    """
    ones = np.flatnonzero(np.unpackbits(high, bitorder="little"))
    if ones.size != widths.size * _BLOCK or high.size * 8 - (ones[-1] + 1 if ones.size else 0) >= 8:
        raise ValueError("other unary parts")
    quotients = (np.diff(ones, prepend=-1) - 1).astype(np.uint64).reshape(-1, _BLOCK)
    if (quotients.max(axis=1, initial=0) >> np.minimum(64 - widths, 63)).any():
        raise ValueError("more than 64 bits")
    return quotients << widths[:, None]


def _remainders(low: NDArray[np.uint8], sizes: NDArray[np.int64]) -> Words:
    """Return per filled block, whose remainders take `sizes` bytes, the lowest bits of its values: (blocks, 64)."""
    values = np.zeros((sizes.size, _BLOCK), np.uint64)
    begins = np.cumsum(sizes) - sizes
    for size in np.unique(sizes[sizes > 0]):
        places, width = np.flatnonzero(sizes == size), int(size) // 8
        rows = low[begins[places, None] + np.arange(size)]
        bits = np.unpackbits(rows, axis=1, bitorder="little").reshape(len(places), _BLOCK, width)
        values[places] = (bits.astype(np.uint64) << np.arange(width, dtype=np.uint64)).sum(axis=2, dtype=np.uint64)
    return values
