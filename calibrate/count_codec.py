"""Pack counts exactly, by Pco (the package pcodec): made for sequences of numbers, small and quick to read.

A count's neighbour differs from it by about its square root, so the differences are small, and as noisy as what was
counted: no dictionary finds anything in them. Pco finds intervals for the differences, and writes for each the interval
by an entropy code, and the place in it as it is.

The layout is Pco's own for pages inside another format: its header, the intervals, and one page. The number of counts
is not part of it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, wrapped

# Named, where Pco would else try several on a sample of the counts.
_CONFIG = ChunkConfig(delta_spec=DeltaSpec.try_consecutive(1), mode_spec=ModeSpec.classic())

Counts = NDArray[np.int64]


def pack(counts: Counts) -> bytes:
    """Pack counts into bytes that `unpack` reads back exactly.

    Args:
        counts: int64 (n,), n <= 65536.

    >>> counts = np.arange(4096)
    >>> len(pack(counts)) < 100, counts.nbytes             # neighbours differ by one
    (True, 32768)
    """
    if not counts.size:
        return b""  # Pco has no page without a number
    file = wrapped.FileCompressor()
    chunk = file.chunk_compressor(counts, _CONFIG)
    return b"".join((file.write_header(), chunk.write_meta(), chunk.write_page(0)))


def unpack(data: bytes, into: Counts) -> None:
    """Read counts that `pack` wrote into an array; counts from foreign bytes may be negative.

    Args:
        data: The bytes of `pack`.
        into: int64 (n,), overwritten; n has to be the number of counts that were packed.

    Raises ValueError for bytes of another layout; `into` may have been written by then.

    >>> counts = np.zeros(3, np.int64)
    >>> unpack(pack(np.array([5, 0, 7])), counts)
    >>> counts
    array([5, 0, 7])
    """
    end = 0
    if into.size:
        try:
            file, header = wrapped.FileDecompressor.new(data)
            chunk, meta = file.chunk_decompressor(data[header:], "i64")
            _, page = chunk.read_page_into(data[header + meta :], into.size, into)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        end = header + meta + page
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes behind the counts")
