"""Launch the kernels of calibrate/kernels.cu: histograms and the search for entropy thresholds, on any Executor.

Nothing here knows CUDA: an Executor does, CudaExecutor on a GPU or, in the tests, one that runs the kernels on the CPU.
DESCRIPTOR mirrors a struct of kernels.cu, and KernelGeometry its constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from calibrate.histogram import DEFAULT_BITS, MAX_RANGE_EXP, MIN_RANGE_EXP, AbsHistogram, range_exp_for
from engines.errors import DeviceError

Array = NDArray[np.generic]

DESCRIPTOR = np.dtype(
    [
        ("data", "<u8"),
        ("elements", "<u8"),
        ("first_vector", "<u8"),
        ("scale", "<f4"),
        ("limit", "<u4"),
        ("is_half", "<u4"),
        ("unused", "<u4"),
    ]
)
"""One tensor of a launch: struct Tensor of kernels.cu, field by field."""

_VECTOR_BYTES = 16  # one load of the kernel, and the alignment that it needs
_MAX_BLOCK_VECTORS = 1 << 28  # a block counts in 32 bits, and a vector holds at most 8 values
_FIRST_GUESS = 2  # with two tail octaves good for amax in [2, 16), where most activations have it


@dataclass(frozen=True)
class KernelGeometry:
    """The constants that kernels.cu is compiled with; it says why these are the defaults.

    bits: log2 of the bins, 11 to 13. tail: octaves counted beyond the guessed range. threads: of a block, a power of
    two, from 128 to 1024 on a GPU.
    """

    bits: int = DEFAULT_BITS
    tail: int = 2
    threads: int = 512

    @property
    def bins(self) -> int:
        return 1 << self.bits

    @property
    def counters(self) -> int:
        """Bins and tail bins of a tensor; its row goes on with zeros, non-finite values and the bits of amax."""
        return self.bins + self.tail * self.bins // 2

    @property
    def row(self) -> int:
        return self.counters + 3

    def defines(self) -> Mapping[str, int]:
        """Preprocessor constants for the compiler."""
        return {"BITS": self.bits, "TAIL": self.tail, "THREADS": self.threads}

    def shared_bytes(self) -> Mapping[str, int]:
        """Dynamic shared memory of a block, by kernel; a GPU gives more than 48 KiB only when asked."""
        filled = -(-(self.bins + 1) * 2 // 8) * 8
        return {
            "abs_histogram": self.counters * 4,
            "entropy_search": (self.bins + 1) * 8 + self.threads * 8 + filled,
            "preprocess": 0,
        }


class Buffer(Protocol):
    """Device memory, freed with its last reference."""

    @property
    def address(self) -> int: ...


Argument = Buffer | np.int32 | np.uint64  # of a kernel; the last is an address of memory that is another's


class Executor(Protocol):
    """Runs the kernels of one KernelGeometry. Every call is queued on `stream`, the runtime's own object, None its
    default.

    Not thread-safe. On a GPU the context must be current on the calling thread. A buffer must outlive what is queued
    with it: the memory of one that is dropped may serve the next one at once, on whatever stream that is.
    """

    @property
    def geometry(self) -> KernelGeometry: ...

    def resident_blocks(self, kernel: str) -> int:
        """How many blocks of a kernel the whole device runs at once; 0 where it cannot hold even one."""
        ...

    def upload(self, array: Array, stream: object | None) -> Buffer:
        """A copy on the device. The array must not change before the stream is past it."""
        ...

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> Buffer:
        """Memory with anything in it."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, stream: object | None) -> Buffer: ...

    def download(self, buffer: Buffer, stream: object | None) -> Array:
        """The buffer as an array of the shape and type it was made with; waits for the stream."""
        ...

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], stream: object | None) -> None:
        """Start a kernel by name with the geometry's threads and shared memory. Raises DeviceError."""
        ...


def kernel_source() -> str:
    """The text of kernels.cu, from the installed package."""
    return (resources.files("calibrate") / "kernels.cu").read_text(encoding="utf-8")


class DeviceHistograms:
    """Histograms of |x| of a fixed set of tensors, counted on the device that holds them.

    One launch counts all tensors of a frame. It has to know the range of each beforehand, so it takes a guess: that
    of the frame on which the guess last failed, in the middle of the octaves the kernel counts in full. Two tail
    octaves leave amax room to halve and to double, which it rarely leaves from frame to frame; and a guess that
    holds is not moved, so a tensor that swings within that room never misses. Those that do miss are counted again,
    alone, in a second launch: by then their exact amax is known, so there is no third.
    """

    def __init__(self, executor: Executor, elements: Sequence[int], dtypes: Sequence[np.dtype[np.generic]]) -> None:
        """elements, dtypes: of each tensor, in the order of `collect`.

        Raises ValueError for other types than float32 and float16, and for more of the ones than of the others.
        """
        if len(elements) != len(dtypes):
            raise ValueError(f"{len(elements)} numbers of elements for {len(dtypes)} types")
        if unknown := {str(dtype) for dtype in dtypes} - {"float32", "float16"}:
            raise ValueError(f"DeviceHistograms takes float32 or float16, got {', '.join(sorted(unknown))}")
        self._executor = executor
        self._elements = np.array(elements, np.int64)
        self._itemsize = np.array([np.dtype(dtype).itemsize for dtype in dtypes], np.int64)
        self._guesses = np.full(len(elements), _FIRST_GUESS, np.int64)

    def collect(self, addresses: Sequence[int], stream: object | None = None) -> list[AbsHistogram]:
        """Return the histogram of each tensor, given its address; waits for the stream.

        Addresses must be those of the tensors' allocations or else on 16-byte boundaries. The values must have been
        written on this stream or waited for, and must not change before the call returns. Raises DeviceError:
        `kernels.alignment`, and as Executor.launch.
        """
        where = np.array(addresses, np.uint64)
        self._check(where)
        rows = self._count(np.arange(where.size), where, stream)
        amax = _amax(rows)
        needed = np.array([range_exp_for(float(value)) for value in amax], np.int64)
        room = self._executor.geometry.tail
        missed = np.flatnonzero((amax > 0) & ((needed < self._guesses) | (needed > self._guesses + room)))
        if missed.size:
            self._guesses[missed] = np.clip(needed[missed] - room // 2, MIN_RANGE_EXP, MAX_RANGE_EXP)
            rows[missed] = self._count(missed, where, stream)
        return [self._histogram(row, int(guess)) for row, guess in zip(rows, self._guesses, strict=True)]

    def _check(self, where: NDArray[np.uint64]) -> None:
        if where.shape != self._elements.shape:
            raise ValueError(f"{where.size} addresses for {self._elements.size} tensors")
        crooked = np.flatnonzero(((where % _VECTOR_BYTES != 0) | (where == 0)) & (self._elements > 0))
        if crooked.size:
            raise DeviceError(
                "kernels.alignment",
                f"tensor {crooked[0]} at address {where[crooked[0]]:#x}",
                f"device memory on {_VECTOR_BYTES}-byte boundaries, as allocations are",
                "copy the tensor to an allocation of its own",
            )

    def _count(self, tensors: NDArray[np.int64], where: NDArray[np.uint64], stream: object | None) -> NDArray[np.int64]:
        """Rows (tensors, geometry.row) of counters of the chosen tensors, by their present guesses."""
        geometry = self._executor.geometry
        table = self._descriptors(tensors, where)
        vectors = int(table["first_vector"][-1])
        if vectors == 0:
            return np.zeros((tensors.size, geometry.row), np.int64)
        buffer = self._executor.zeros((tensors.size, geometry.row), np.int64, stream)
        # As many blocks as run at once, if each thread finds a vector to load.
        resident = self._executor.resident_blocks("abs_histogram")
        blocks = max(min(resident, -(-vectors // geometry.threads)), -(-vectors // _MAX_BLOCK_VECTORS))
        arguments = (self._executor.upload(table, stream), np.int32(tensors.size), buffer)
        self._executor.launch("abs_histogram", blocks, arguments, stream)
        return self._executor.download(buffer, stream).astype(np.int64, copy=False)

    def _descriptors(self, tensors: NDArray[np.int64], where: NDArray[np.uint64]) -> NDArray[np.void]:
        """The kernel's table: a DESCRIPTOR a tensor and one more that holds the total."""
        geometry = self._executor.geometry
        guesses = self._guesses[tensors]
        limit_exp = np.minimum(guesses + geometry.tail, MAX_RANGE_EXP)
        vectors = -(-self._elements[tensors] * self._itemsize[tensors] // _VECTOR_BYTES)
        table = np.zeros(tensors.size + 1, DESCRIPTOR)
        table["first_vector"][1:] = np.cumsum(vectors)
        own = table[:-1]
        own["data"] = where[tensors]
        own["elements"] = self._elements[tensors]
        own["scale"] = np.ldexp(1.0, geometry.bits - guesses)
        own["limit"] = (limit_exp + 127) << 23  # the bits of a float32 that is a power of two
        own["is_half"] = self._itemsize[tensors] == 2
        return table

    def _histogram(self, row: NDArray[np.int64], guess: int) -> AbsHistogram:
        geometry = self._executor.geometry
        zeros, nonfinite = (int(count) for count in row[geometry.counters : geometry.counters + 2])
        amax = float(_amax(row))
        range_exp = range_exp_for(amax)
        counts = _widened(row[: geometry.counters], geometry.bins, range_exp - guess if amax > 0.0 else 0)
        counts[0] += zeros  # the kernel counts them apart
        return AbsHistogram(counts, range_exp, amax, zeros, nonfinite)


def search_entropy(
    executor: Executor,
    counts: NDArray[np.int64],
    windows: NDArray[np.int32],
    stream: object | None = None,
    divergence: NDArray[np.float64] | None = None,
) -> NDArray[np.int32]:
    """How many bins to keep of each histogram: the widest candidate whose KL divergence is within 1e-13 of the least.

    counts: (tensors, bins), of the executor's number of bins; the objective is calibrate.divergence.kl_divergence after
    NVIDIA's rule that bin 0 counts as bin 1. windows: (tensors, 2), the fewest and the most bins that may be kept,
    both inclusive, as calibrate.threshold.entropy_window has them. Fewer than 128 never compete. Returns (tensors,):
    where no candidate has a finite divergence, the most that may be kept, as in find_amax.

    `divergence` (tensors, bins + 1), when given, receives every candidate's divergence in nats by bins kept, infinite
    for those that do not compete. Waits for the stream; raises ValueError for other shapes, and as Executor.launch.
    """
    geometry = executor.geometry
    if counts.shape[1:] != (geometry.bins,) or windows.shape != (len(counts), 2):
        expected = f"(tensors, {geometry.bins}) and (tensors, 2)"
        raise ValueError(f"counts {counts.shape} and windows {windows.shape}, expected {expected}")
    if len(counts) == 0:
        return np.zeros(0, np.int32)
    curves = executor.empty((len(counts), geometry.bins + 1), np.float64)
    chosen = executor.zeros((len(counts),), np.int32, stream)
    histograms = executor.upload(counts.astype(np.int64, copy=False), stream)
    limits = executor.upload(windows.astype(np.int32, copy=False), stream)
    executor.launch("entropy_search", len(counts), (histograms, limits, curves, chosen), stream)
    if divergence is not None:
        divergence[...] = executor.download(curves, stream)
    kept = executor.download(chosen, stream).astype(np.int32, copy=False)
    return np.where(kept > 0, kept, windows[:, 1].clip(0, geometry.bins)).astype(np.int32, copy=False)


def _amax(rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the exact largest finite |x| of rows (..., row): their last counter holds its bits."""
    return rows[..., -1:].astype(np.uint32).view(np.float32)[..., 0]


def _widened(counters: NDArray[np.int64], bins: int, octaves: int) -> NDArray[np.int64]:
    """Return the counts (bins,) on a range that is wider by so many octaves; only resolution is lost.

    The bins fold into the lowest of the new range, each tail octave into one twice as wide as all below it.
    """
    parts = [counters[:bins].reshape(-1, 1 << octaves).sum(axis=1)]
    for octave, tail in enumerate(counters[bins:].reshape(-1, bins // 2)[:octaves]):
        parts.append(tail.reshape(-1, 1 << (octaves - 1 - octave)).sum(axis=1))
    return np.concatenate(parts)
