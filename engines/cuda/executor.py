"""Run the kernels on a GPU, with device memory from a pool.

CudaExecutor is the Executor of engines/cuda/kernels.py on a Gpu. A freed block stays in its DevicePool, for the next
request of about that size: an allocation by the driver could wait for the GPU. PyCUDA has a pool too, but giving the
first block back to that with no context current ends the process. Blocks come back to this one from any thread and any
context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engines.cuda.gpu import Gpu
from engines.cuda.kernels import Argument, Array, Buffer, KernelGeometry, kernel_source
from engines.errors import DeviceError

_LEAST_BYTES = 256  # the smallest block
_PLAIN_SHARED_BYTES = 48 << 10  # a block gets more shared memory only if its kernel has requested it


class DevicePool:
    """A pool that is not ordered by streams: memory that is dropped serves the next request at once.

    allocate: returns memory of so many bytes from the driver, with a method `free`.
    full: the exception that it raises when there is none.
    """

    def __init__(self, allocate: Callable[[int], Any], full: type[Exception]) -> None:
        self._allocate, self._full = allocate, full
        self._kept: dict[int, list[Any]] = {}

    def allocate(self, nbytes: int) -> PooledMemory:
        """Return memory of at least so many bytes, and at most a quarter more, so that similar sizes share blocks.

        When the device is full, all kept blocks go back to the driver first. Raises what `allocate` raises.
        """
        step = max(1 << nbytes.bit_length() >> 3, _LEAST_BYTES)
        size = max(-(-nbytes // step), 1) * step
        kept = self._kept.setdefault(size, [])
        if kept:
            return PooledMemory(kept.pop(), kept)
        try:
            return PooledMemory(self._allocate(size), kept)
        except self._full:
            self.clear()
            return PooledMemory(self._allocate(size), kept)

    def clear(self) -> None:
        """Give all unused blocks back to the driver."""
        for kept in self._kept.values():
            while kept:
                kept.pop().free()


class PooledMemory:
    """An allocation that goes back to its pool's list with the last reference to this object."""

    def __init__(self, allocation: Any, home: list[Any]) -> None:
        self.allocation = allocation
        self._home = home

    def __del__(self) -> None:
        self._home.append(self.allocation)


@dataclass(frozen=True)
class CudaBuffer:
    """Device memory from the executor's pool; back in it with the last reference, dropped on any thread."""

    memory: PooledMemory
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    source: Array | None = None  # what an upload may still be reading

    @property
    def address(self) -> int:
        return int(self.memory.allocation)


class CudaExecutor:
    """Executor on a Gpu, whose context must be current in every call, `close` too, and when the executor is dropped.

    Memory comes from a pool. Compiling takes nvcc and some seconds the first time; PyCUDA keeps the result in the
    user's cache (PYCUDA_CACHE_DIR overrules where). Raises DeviceError `cuda.compiler`; any use, as Gpu.working.
    """

    def __init__(self, gpu: Gpu, geometry: KernelGeometry | None = None) -> None:
        self.geometry = geometry or KernelGeometry()
        self._gpu = gpu
        self._pool = DevicePool(gpu.driver.mem_alloc, gpu.driver.MemoryError)
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
        return self._resident[kernel]

    def upload(self, array: Array, stream: Any) -> CudaBuffer:
        buffer = self._buffer(array.shape, array.dtype, np.ascontiguousarray(array))
        if array.nbytes:
            with self._gpu.working("an upload"):
                self._gpu.driver.memcpy_htod_async(buffer.address, buffer.source, stream)
        return buffer

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> CudaBuffer:
        return self._buffer(shape, np.dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, stream: Any) -> CudaBuffer:
        buffer = self.empty(shape, dtype)
        with self._gpu.working("memory set to zero"):
            nbytes = int(np.prod(shape)) * buffer.dtype.itemsize
            self._gpu.driver.memset_d8_async(buffer.address, 0, nbytes, stream)
        return buffer

    def download(self, buffer: Buffer, stream: Any) -> Array:
        assert isinstance(buffer, CudaBuffer)  # one of this executor's
        array: Array = np.empty(buffer.shape, buffer.dtype)
        with self._gpu.working("a download, after kernels without a fault"):
            self._gpu.driver.memcpy_dtoh_async(array, buffer.address, stream)
            (self._gpu.driver.Context if stream is None else stream).synchronize()
        return array

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Argument], stream: Any) -> None:
        """Raises DeviceError: `cuda.kernel` where not even one block fits this GPU, else as Gpu.working.

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
        self._pool.clear()

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], source: Array | None = None) -> CudaBuffer:
        with self._gpu.working("device memory"):
            memory = self._pool.allocate(int(np.prod(shape)) * dtype.itemsize)
        return CudaBuffer(memory, shape, dtype, source)
