"""What the GPU benchmark measures, what the memory is filled with, and what has to be counted in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram, abs_histogram, merge

FRAME_BYTES, FRAME_TENSORS = 150_000_000, 100  # the activations of one frame of a mid-sized detector
FRAMES = 4  # taken in turns: 600 MB, that no second-level cache holds
POOL = 1 << 22  # different values; memory is filled with copies of them
_CHECKED = 5  # tensors of a frame compared with NumPy


@dataclass(frozen=True)
class Case:
    name: str
    frames: int
    tensors: int  # tensors per frame
    elements: int  # elements per tensor
    dtype: np.dtype[np.generic]
    data: str
    bits: int

    @property
    def tensor_bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    @property
    def frame_bytes(self) -> int:
        return self.tensors * self.tensor_bytes


FLOATS: tuple[np.dtype[Any], ...] = (np.dtype(np.float32), np.dtype(np.float16))


def cases(bits: list[int], large_bytes: int) -> Iterator[Case]:
    for width, dtype, data in product(bits, FLOATS, ("normal", "ReLU")):
        elements = FRAME_BYTES // FRAME_TENSORS // dtype.itemsize
        frame = f"{FRAME_TENSORS} of {FRAME_BYTES / FRAME_TENSORS / 1e6:.1f} MB"
        yield Case(frame, FRAMES, FRAME_TENSORS, elements, dtype, data, width)
        elements = large_bytes // dtype.itemsize // 8 * 8
        yield Case(f"1 of {large_bytes / 2**30:.2g} GiB", 1, 1, elements, dtype, data, width)


def values(case: Case) -> NDArray[Any]:
    """What the memory is filled with, over and over: a normal distribution, or what a ReLU makes of it."""
    normal = np.random.default_rng(0).standard_normal(POOL, np.float32)
    return (np.maximum(normal, 0) if case.data == "ReLU" else normal).astype(case.dtype)


def periodic_histogram(pool: NDArray[Any], offset: int, elements: int, bits: int) -> AbsHistogram:
    """Of so many values of the pool repeated for ever, from `offset`: merging is exact, so the repeats are counted."""
    repeats, rest = divmod(elements, pool.size)
    part = abs_histogram(np.roll(pool, -(offset % pool.size))[:rest], bits)
    if repeats == 0:
        return part
    whole = abs_histogram(pool, bits)
    return merge(part, AbsHistogram(whole.counts * repeats, whole.range_exp, whole.amax, whole.zeros * repeats, 0))


def agree(case: Case, frame: int, found: list[AbsHistogram], pool: NDArray[Any]) -> bool:
    """Whether a frame's histograms are abs_histogram's, for tensors from the first to the last."""
    for tensor in np.unique(np.linspace(0, case.tensors - 1, _CHECKED).astype(int)):
        start = (frame * case.tensors + tensor) * case.elements
        expected = periodic_histogram(pool, start, case.elements, case.bits)
        if not np.array_equal(found[tensor].counts, expected.counts) or _fields(found[tensor]) != _fields(expected):
            return False
    return True


def _fields(histogram: AbsHistogram) -> tuple[float, ...]:
    return histogram.range_exp, histogram.amax, histogram.zeros, histogram.nonfinite
