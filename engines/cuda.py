"""The GPU through PyCUDA: its primary context, streams, and the Executor of kernels.cu. PyCUDA is imported here only.

Imported when a Gpu is opened, not before: a machine without PyCUDA or driver gets an error that names the remedy.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engines.kernels import Array, Buffer, DeviceError, Geometry, kernel_source

_NVCC = "/usr/local/cuda/bin/nvcc"  # where JetPack has it; a service's PATH does not lead there
_PLAIN_SHARED_BYTES = 48 << 10  # a block gets more only if its kernel has asked for it


class Gpu:
    """A GPU's primary context, the one that the CUDA runtime and TensorRT use too.

    Retained while this object lives; it creates no context of its own. Raises DeviceError: `cuda.pycuda` (not
    installed), `cuda.driver` (no driver library, or one that fails), `cuda.device` (no such device).
    """

    def __init__(self, ordinal: int = 0) -> None:
        self.driver = _driver()
        self._device = _device(self.driver, ordinal)
        with self.translated("cuda.device", "a GPU that accepts work", "see whether `nvidia-smi` or `tegrastats` runs"):
            self._context = self._device.retain_primary_context()

    @property
    def multiprocessors(self) -> int:
        return int(self._device.get_attribute(self.driver.device_attribute.MULTIPROCESSOR_COUNT))

    @contextmanager
    def current(self) -> Iterator[None]:
        """The context, current on the calling thread for the length of a `with`; free what belongs to it inside.

        Every thread needs its own; they nest.
        """
        self._context.push()
        try:
            yield
        finally:
            self.driver.Context.pop()

    def stream(self) -> Any:
        """A new stream. Hand `stream.handle` to TensorRT: PyCUDA can lend its streams, but not adopt another's."""
        with self.current():
            return self.driver.Stream()

    @contextmanager
    def translated(self, code: str, expected: str, remedy: str) -> Iterator[None]:
        """Turns PyCUDA's errors into DeviceError of this code."""
        try:
            yield
        except self.driver.Error as error:
            raise DeviceError(code, _first_line(error), expected, remedy) from error


@dataclass(frozen=True)
class CudaBuffer:
    """Device memory from the executor's pool; back in it with the last reference."""

    memory: Any
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]
    source: Array | None = None  # what an upload may still be reading

    @property
    def address(self) -> int:
        return int(self.memory)


class CudaExecutor:
    """Executor on a Gpu, whose context must be current in every call.

    Memory comes from a pool: an allocation by the driver could wait for the whole GPU. Compiling takes nvcc and some
    seconds the first time; PyCUDA keeps the result in the user's cache (PYCUDA_CACHE_DIR overrules where).
    Raises DeviceError: `cuda.compiler`, `cuda.kernel` (constants that this GPU has not enough shared memory for).
    """

    def __init__(self, gpu: Gpu, geometry: Geometry | None = None) -> None:
        self.geometry = geometry or Geometry()
        self.multiprocessors = gpu.multiprocessors
        self._gpu = gpu
        self._pool = _memory_pool()
        module = _compiled(gpu, self.geometry)
        self._functions = {name: self._function(module, name) for name in self.geometry.shared_bytes()}

    def upload(self, array: Array, stream: Any) -> CudaBuffer:
        buffer = self._allocate(array.shape, array.dtype, np.ascontiguousarray(array))
        if array.nbytes:
            with self._memory_errors():
                self._gpu.driver.memcpy_htod_async(buffer.address, buffer.source, stream)
        return buffer

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike, stream: Any) -> CudaBuffer:
        buffer = self._allocate(shape, np.dtype(dtype))
        with self._memory_errors():
            self._gpu.driver.memset_d8_async(buffer.address, 0, _nbytes(buffer), stream)
        return buffer

    def download(self, buffer: Buffer, stream: Any) -> Array:
        assert isinstance(buffer, CudaBuffer)  # one of this executor's
        array: Array = np.empty(buffer.shape, buffer.dtype)
        with self._launch_errors("a kernel before this download"):
            self._gpu.driver.memcpy_dtoh_async(array, buffer.address, stream)
            (self._gpu.driver.Context if stream is None else stream).synchronize()
        return array

    def launch(self, kernel: str, blocks: int, arguments: Sequence[Buffer | np.int32], stream: Any) -> None:
        """Raises DeviceError `cuda.launch`; a fault inside the kernel appears there or at the next download."""
        values = [np.intp(a.address) if isinstance(a, CudaBuffer) else a for a in arguments]
        block = (self.geometry.threads, 1, 1)
        shared = self.geometry.shared_bytes()[kernel]
        with self._launch_errors(f"{blocks} blocks of {block[0]} threads and {shared} bytes for {kernel}"):
            self._functions[kernel](*values, grid=(blocks, 1), block=block, shared=shared, stream=stream)

    def close(self) -> None:
        """Give the pool's memory back to the GPU; buffers still alive keep theirs."""
        self._pool.stop_holding()

    def _allocate(self, shape: tuple[int, ...], dtype: np.dtype[np.generic], source: Array | None = None) -> CudaBuffer:
        with self._memory_errors():
            memory = self._pool.allocate(max(int(np.prod(shape)) * dtype.itemsize, 1))
        return CudaBuffer(memory, shape, dtype, source)

    def _function(self, module: Any, name: str) -> Any:
        function = module.get_function(name)
        shared = self.geometry.shared_bytes()[name]
        if shared > _PLAIN_SHARED_BYTES:
            remedy = "choose fewer bins or tail octaves"
            with self._gpu.translated("cuda.kernel", f"{shared} bytes of shared memory for a block of {name}", remedy):
                attribute = self._gpu.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
                function.set_attribute(attribute, shared)
        return function

    def _memory_errors(self) -> Any:
        return self._gpu.translated("cuda.memory", "device memory for histograms", "free memory on the GPU")

    def _launch_errors(self, what: str) -> Any:
        return self._gpu.translated("cuda.launch", what, "restart the process: after a fault its context is lost")


def _driver() -> Any:
    """pycuda.driver, initialised."""
    if importlib.util.find_spec("pycuda") is None:
        raise DeviceError("cuda.pycuda", "no PyCUDA", "the package pycuda", "pip install 'tared[jetson]'")
    try:
        from pycuda import driver
    except ImportError as error:  # its extension module links against the driver
        raise DeviceError(
            "cuda.driver", _first_line(error), "the NVIDIA driver's libcuda.so.1", "install the driver, or JetPack"
        ) from error
    try:
        driver.init()
    except driver.Error as error:
        remedy = "see whether `nvidia-smi` or `tegrastats` runs; in a container, pass the device through"
        raise DeviceError("cuda.device", _first_line(error), "a CUDA device", remedy) from error
    return driver


def _device(driver: Any, ordinal: int) -> Any:
    count = driver.Device.count()
    if not 0 <= ordinal < count:
        raise DeviceError(
            "cuda.device", f"{count} CUDA devices", f"a device number {ordinal}", "choose one that is there"
        )
    return driver.Device(ordinal)


def _memory_pool() -> Any:
    from pycuda import tools

    return tools.DeviceMemoryPool()


def _compiled(gpu: Gpu, geometry: Geometry) -> Any:
    """kernels.cu as a module for the current device."""
    from pycuda import compiler

    options = ["-O3", "-std=c++17", *(f"-D{name}={value}" for name, value in geometry.defines().items())]
    remedy = "install the CUDA toolkit's nvcc; set PYCUDA_CACHE_DIR to a folder that can be written"
    try:
        return compiler.SourceModule(
            kernel_source(), nvcc=shutil.which("nvcc") or _NVCC, options=options, no_extern_c=True
        )
    except (gpu.driver.Error, OSError, RuntimeError) as error:
        raise DeviceError("cuda.compiler", _first_line(error), "nvcc to compile kernels.cu", remedy) from error


def _nbytes(buffer: CudaBuffer) -> int:
    return int(np.prod(buffer.shape)) * buffer.dtype.itemsize


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
