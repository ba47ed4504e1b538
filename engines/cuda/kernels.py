"""Launch the kernels of calibrate/kernels.cu: histograms, the search for entropy thresholds, and preprocessing.

CudaExecutor runs them on a Gpu, with device memory from a pool; in the tests another executor runs them on the CPU.
DESCRIPTOR mirrors a struct of kernels.cu, and KernelGeometry its constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from calibrate.histogram import DEFAULT_BITS, MAX_RANGE_EXP, MIN_RANGE_EXP, AbsHistogram, range_exp_for
from engines.cuda.gpu import Gpu
from engines.errors import DeviceError
from engines.preprocessing import PIXEL_BYTES, ImageTransform, transform_table

Array = NDArray[Any]

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
_LEAST_BYTES = 256  # the smallest block of pooled memory
_PLAIN_SHARED_BYTES = 48 << 10  # a block gets more shared memory only if its kernel has requested it
_TABLES = 8  # sizes of frames whose tables are kept: cameras may take turns
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


def kernel_source() -> str:
    """The text of kernels.cu, from the installed package."""
    return (resources.files("calibrate") / "kernels.cu").read_text(encoding="utf-8")


@dataclass(frozen=True)
class CudaBuffer:
    """Device memory of a CudaExecutor, which has it back with the last reference, dropped on any thread.

    home: the executor's list of unused blocks of this size.
    source: what an upload may still be reading.
    """

    block: Any
    home: list[Any]
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    source: Array | None = None

    def __del__(self) -> None:
        self.home.append(self.block)

    @property
    def address(self) -> int:
        return int(self.block)


Argument = CudaBuffer | np.int32 | np.uint64  # a kernel's; the last is the address of another's memory


class CudaExecutor:
    """Runs the kernels of one KernelGeometry on a Gpu. Every call is queued on `stream`, PyCUDA's, None its default.

    Not thread-safe. The context must be current in every call, `close` too, and when the executor is dropped.

    Memory comes from a pool that is not ordered by streams: a buffer must outlive what is queued with it, since the
    next one may get its block at once. An allocation by the driver instead could wait for the GPU. PyCUDA has a pool
    too, but giving the first block back to that with no context current ends the process.

    Compiling takes nvcc and some seconds the first time; PyCUDA keeps the result in the user's cache (PYCUDA_CACHE_DIR
    overrules where). Raises DeviceError `cuda.compiler`; any use, as Gpu.working.
    """

    def __init__(self, gpu: Gpu, geometry: KernelGeometry | None = None) -> None:
        self.geometry = geometry or KernelGeometry()
        self._gpu = gpu
        self._unused: dict[int, list[Any]] = {}  # blocks, by size
        shared = self.geometry.shared_bytes()
        with gpu.working("kernels that load"):
            defines = [f"-D{name}={value}" for name, value in self.geometry.defines().items()]
            module = gpu.compile(kernel_source(), ["-O3", "-std=c++17", *defines])
            self._functions: dict[str, Any] = {}
            self._resident: dict[str, int] = {}
            for name, nbytes in shared.items():
                function = self._functions[name] = module.get_function(name)
                if _PLAIN_SHARED_BYTES < nbytes <= gpu.most_shared_bytes:
                    function.set_attribute(gpu.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, nbytes)
                self._resident[name] = gpu.resident_blocks(function, self.geometry.threads, nbytes)

    def resident_blocks(self, kernel: str) -> int:
        """Return how many blocks of a kernel the whole device runs at once; 0 where it cannot hold even one."""
        return self._resident[kernel]

    def upload(self, array: Array, stream: Any) -> CudaBuffer:
        """Return a copy on the device. The array must not change before the stream is past it."""
        buffer = self._buffer(array.shape, array.dtype, np.ascontiguousarray(array))
        if array.nbytes:
            with self._gpu.working("an upload"):
                self._gpu.driver.memcpy_htod_async(buffer.address, buffer.source, stream)
        return buffer

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> CudaBuffer:
        """Return memory with anything in it."""
        return self._buffer(shape, np.dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, stream: Any) -> CudaBuffer:
        buffer = self.empty(shape, dtype)
        with self._gpu.working("memory set to zero"):
            nbytes = int(np.prod(shape)) * buffer.dtype.itemsize
            self._gpu.driver.memset_d8_async(buffer.address, 0, nbytes, stream)
        return buffer

    def download(self, buffer: CudaBuffer, stream: Any) -> Array:
        """Return the buffer as an array of the shape and type it was made with; waits for the stream."""
        array: Array = np.empty(buffer.shape, buffer.dtype)
        with self._gpu.working("a download, after kernels without a fault"):
            self._gpu.driver.memcpy_dtoh_async(array, buffer.address, stream)
            (self._gpu.driver.Context if stream is None else stream).synchronize()
        return array

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], stream: Any) -> None:
        """Start a kernel by name with the geometry's threads and shared memory.

        Raises DeviceError: `cuda.kernel` where not even one block fits this GPU, else as Gpu.working.

        A fault inside the kernel appears in one of the calls that follow, the next download at the latest.
        """
        values = [np.intp(a.address) if isinstance(a, CudaBuffer) else a for a in arguments]
        block = (self.geometry.threads, 1, 1)
        shared = self.geometry.shared_bytes()[kernel]
        if self._resident[kernel] == 0:
            raise DeviceError(
                "cuda.kernel",
                f"at most {self._gpu.most_shared_bytes} bytes of shared memory for a block",
                f"{shared} for one of {kernel}",
                "choose fewer bins or tail octaves",
            )
        with self._gpu.working(f"a launch of {kernel}, {blocks} blocks of {block[0]} threads and {shared} bytes"):
            self._functions[kernel](*values, grid=(blocks, 1), block=block, shared=shared, stream=stream)

    def close(self) -> None:
        """Give kernels and memory back to the GPU, for good; buffers still alive keep theirs."""
        self._functions.clear()  # and with the last of them the module
        self._free_unused()

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], source: Array | None = None) -> CudaBuffer:
        """Return a buffer of at least this size, and at most a quarter more, so that similar sizes share blocks."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        step = max(1 << nbytes.bit_length() >> 3, _LEAST_BYTES)
        size = max(-(-nbytes // step), 1) * step
        unused = self._unused.setdefault(size, [])
        with self._gpu.working("device memory"):
            try:
                block = unused.pop() if unused else self._gpu.driver.mem_alloc(size)
            except self._gpu.driver.MemoryError:
                self._free_unused()
                block = self._gpu.driver.mem_alloc(size)
        return CudaBuffer(block, unused, shape, dtype, source)

    def _free_unused(self) -> None:
        for blocks in self._unused.values():
            while blocks:
                blocks.pop().free()


class DeviceHistograms:
    """Histograms of |x| of a fixed set of tensors, counted on the device that holds them.

    One launch counts all tensors of a frame. It has to know the range of each beforehand, so it takes a guess: that
    of the frame on which the guess last failed, in the middle of the octaves the kernel counts in full. Two tail
    octaves leave amax room to halve and to double, which it rarely leaves from frame to frame; and a guess that
    holds is not moved, so a tensor that swings within that room never misses. Those that do miss are counted again,
    alone, in a second launch: by then their exact amax is known, so there is no third.
    """

    def __init__(self, executor: CudaExecutor, elements: Sequence[int], dtypes: Sequence[np.dtype[np.generic]]) -> None:
        """elements, dtypes: of each tensor, in the order of `collect`; float32 or float16."""
        self._executor = executor
        self._elements = np.array(elements, np.int64)
        self._itemsize = np.array([np.dtype(dtype).itemsize for dtype in dtypes], np.int64)
        self._guesses = np.full(len(elements), _FIRST_GUESS, np.int64)

    def collect(self, addresses: Sequence[int], stream: object | None = None) -> list[AbsHistogram]:
        """Return the histogram of each tensor, given its address; waits for the stream.

        Addresses must be those of the tensors' allocations or else on 16-byte boundaries. The values must have been
        written on this stream or waited for, and must not change before the call returns. Raises DeviceError:
        `kernels.alignment`, and as CudaExecutor.launch.
        """
        where = np.array(addresses, np.uint64)
        crooked = np.flatnonzero(((where % _VECTOR_BYTES != 0) | (where == 0)) & (self._elements > 0))
        if crooked.size:
            raise DeviceError(
                "kernels.alignment",
                f"tensor {crooked[0]} at address {where[crooked[0]]:#x}",
                f"device memory on {_VECTOR_BYTES}-byte boundaries, as allocations are",
                "copy the tensor to an allocation of its own",
            )
        rows = self._count(np.arange(where.size), where, stream)
        amax = _amax(rows)
        needed = np.array([range_exp_for(float(value)) for value in amax], np.int64)
        room = self._executor.geometry.tail
        missed = np.flatnonzero((amax > 0) & ((needed < self._guesses) | (needed > self._guesses + room)))
        if missed.size:
            self._guesses[missed] = np.clip(needed[missed] - room // 2, MIN_RANGE_EXP, MAX_RANGE_EXP)
            rows[missed] = self._count(missed, where, stream)
        return [self._histogram(row, int(guess)) for row, guess in zip(rows, self._guesses, strict=True)]

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
    executor: CudaExecutor,
    counts: NDArray[np.int64],
    windows: NDArray[np.int32],
    stream: object | None = None,
    divergence: NDArray[np.float64] | None = None,
) -> NDArray[np.int32]:
    """Return the number of bins to keep of each histogram.

    That is the widest candidate whose KL divergence is within 1e-13 of the least.

    counts: (tensors, bins), of the executor's number of bins; the objective is calibrate.divergence.kl_divergence after
    NVIDIA's rule that bin 0 counts as bin 1. windows: (tensors, 2), the fewest and the most bins that may be kept,
    both inclusive, as calibrate.threshold.entropy_window has them. Fewer than 128 never compete. Returns (tensors,):
    where no candidate has a finite divergence, the most that may be kept.

    `divergence` (tensors, bins + 1), when given, receives every candidate's divergence in nats by bins kept, infinite
    for those that do not compete. Waits for the stream; raises ValueError for other shapes, and as CudaExecutor.launch.
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


class DevicePreprocess:
    """Turns frames that lie on the device into network inputs there.

    Holds the tables of a few transforms, each uploaded once: frames of sizes that take turns cost a launch each, and no
    allocation.
    """

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._tables: dict[ImageTransform, CudaBuffer] = {}

    def has_room(self, transform: ImageTransform) -> bool:
        """Return whether `run` gives up no table for it."""
        return transform in self._tables or len(self._tables) < _TABLES

    def run(
        self,
        transform: ImageTransform,
        frame_address: int,
        input_address: int,
        stream: object | None = None,
        row_bytes: int | None = None,
    ) -> None:
        """Queue on `stream` the network input of one frame.

        frame_address: of a BGR frame uint8 (frame_height, frame_width, 3) whose rows begin `row_bytes` apart, by
        default 3 * frame_width. input_address: receives what `transform` has as shape and type of the network input.
        Where it does not have room for the transform, all tables are given up: what was queued before must be done.

        Raises DeviceError as CudaExecutor.upload and launch do.
        """
        row_bytes = row_bytes or transform.frame_width * PIXEL_BYTES
        table = self._tables.get(transform)
        if table is None:
            if not self.has_room(transform):
                self._tables.clear()
            table = self._tables[transform] = self._executor.upload(transform_table(transform), stream)
        blocks = -(-transform.height * transform.width // self._executor.geometry.threads)
        arguments = (table, np.uint64(frame_address), np.int32(row_bytes), np.uint64(input_address))
        self._executor.launch("preprocess", blocks, arguments, stream)


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
