"""Reach the GPU through PyCUDA: its primary context, streams, compiler and memory. PyCUDA is imported here only.

It is imported when a Gpu is opened, not before: without PyCUDA or a driver the error names the remedy. HostMemory and
DeviceMemory are the buffers of inputs and outputs; on a board, which shares its memory, the host's is mapped.
"""

from __future__ import annotations

import importlib.util
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from calibrate.errors import install_extra
from engines.errors import DeviceError

DRIVER = "libcuda.so.1"
_NVCC = "/usr/local/cuda/bin/nvcc"  # where JetPack has it; a service's PATH does not lead there
_SEE_IT_RUN = "see whether `nvidia-smi` or `tegrastats` runs"
_RESERVED_SHARED_BYTES = 1 << 10  # a block's part for the system, from compute capability 8 on
_WARP, _REGISTERS_TOGETHER = 32, 256  # a warp's registers come in so many at once
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for what others put on the default stream


class Gpu:
    """The first GPU's primary context, the one that the CUDA runtime and TensorRT use too; it creates none of its own.

    Retained until `close`, which is for the thread that made this: no other can release the context. Any thread may
    make it current. What belongs to it (streams, executors) has to be dropped inside a `with gpu.current()`: elsewhere
    PyCUDA can free it only on the thread that made the Gpu, and on any other leaks it with a warning.

    Raises DeviceError: `cuda.pycuda` (not installed), `cuda.driver` (no driver library, or one that fails),
    `cuda.device` (none that accepts work).
    """

    def __init__(self) -> None:
        self.driver = _driver()
        self._modules: dict[tuple[str, ...], Any] = {}
        # Of a module: nvcc's, and the driver's for code that it does not take. Other errors come from earlier faults.
        self._refusals = (self.driver.CompileError, self.driver.LogicError, self.driver.RuntimeError)
        try:
            self._device = self.driver.Device(0)
            self._context = self._device.retain_primary_context()
        except self.driver.Error as error:
            raise DeviceError("cuda.device", _first_line(error), "a GPU that accepts work", _SEE_IT_RUN) from error

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the context, outside every `current`; a second time does nothing. A fault may have done it before."""
        if self._context is not None and self._modules:
            with suppress(DeviceError), self.current():
                self._modules.clear()
        context, self._context = self._context, None
        if context is not None:
            context.detach()

    @property
    def multiprocessors(self) -> int:
        return self._attribute("MULTIPROCESSOR_COUNT")

    @property
    def integrated(self) -> bool:
        """True if the GPU works in the host's memory, as on a Jetson."""
        return self._attribute("INTEGRATED") == 1

    @property
    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        with self.current(), self.working("a device that reports its memory"):
            return int(self.driver.mem_get_info()[0])

    def describe(self) -> dict[str, str]:
        """Return what an engine that is built here depends on: model, compute capability, multiprocessors, driver."""
        version = self.driver.get_driver_version()
        return {
            "gpu": self._device.name(),
            "sm": "{}.{}".format(*self._device.compute_capability()),
            "multiprocessors": str(self.multiprocessors),
            "cuda": f"{version // 1000}.{version % 1000 // 10}",
        }

    @property
    def most_shared_bytes(self) -> int:
        """Shared memory of one block, at most."""
        return self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    def resident_blocks(self, function: Any, threads: int, shared: int) -> int:
        """Return how many blocks of a PyCUDA function run at once on the device; 0 if `shared` bytes are too many."""
        if shared > self.most_shared_bytes:
            return 0
        registers = function.get_attribute(self.driver.function_attribute.NUM_REGS) * _WARP
        registers += -registers % _REGISTERS_TOGETHER
        reserved = _RESERVED_SHARED_BYTES if self._device.compute_capability() >= (8, 0) else 0
        blocks: int = min(
            self._attribute("MAX_THREADS_PER_MULTIPROCESSOR") // threads,
            self._attribute("MAX_REGISTERS_PER_MULTIPROCESSOR") // (registers * threads // _WARP),
            self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR") // max(shared + reserved, 1),
        )
        return self.multiprocessors * max(blocks, 1)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the context current on the calling thread for a `with`; free what belongs to it inside.

        Every thread needs its own; they nest. Raises DeviceError `cuda.device` (closed), or as `working`.
        """
        if self._context is None:
            raise DeviceError("cuda.device", "a call to a closed Gpu", "calls before its `close`", "open another Gpu")
        with self.working("a context that can be used"):
            self._context.push()
        try:
            yield
        except BaseException:
            with suppress(self.driver.Error):  # after a fault it says the same again, and less
                self._leave()
            raise
        with self.working("a context that can be left"):
            self._leave()

    def stream(self) -> Any:
        """Return a new stream; it does not wait for the default one, nor that for it.

        Hand `stream.handle` to TensorRT: PyCUDA can lend its streams, but not adopt another's.
        """
        with self.current(), self.working("a new stream"):
            return self.driver.Stream(_NON_BLOCKING)

    @contextmanager
    def working(self, expected: str) -> Iterator[None]:
        """Raise errors of a GPU in use as DeviceError: `cuda.memory` when it is full, else `cuda.launch`.

        A fault inside a kernel stays, and any later call reports it, be it an upload or an allocation.
        """
        try:
            yield
        except self.driver.MemoryError as error:
            raise DeviceError("cuda.memory", _first_line(error), expected, "free memory on the GPU") from error
        except self.driver.Error as error:
            remedy = "restart the process: after a fault its context is lost"
            raise DeviceError("cuda.launch", _first_line(error), expected, remedy) from error

    def compile(self, source: str, options: Sequence[str]) -> Any:
        """Compile a CUDA source as a module for this device, whose context must be current; the module is kept.

        nvcc may mention what is no trouble, that a board will soon be too old for it, say: PyCUDA makes that a warning.
        Raises DeviceError (`cuda.compiler`).
        """
        from pycuda import compiler

        key = (source, *options)
        if key not in self._modules:
            remedy = "install the nvcc of this driver's CUDA; set PYCUDA_CACHE_DIR to a folder that can be written"
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "The CUDA compiler succeeded", UserWarning)
                    made = compiler.SourceModule(source, nvcc=nvcc_path() or _NVCC, options=options, no_extern_c=True)
            except (*self._refusals, OSError) as error:
                raise DeviceError("cuda.compiler", _first_line(error), "nvcc to compile kernels.cu", remedy) from error
            self._modules[key] = made
        return self._modules[key]

    def _leave(self) -> None:
        try:
            self.driver.Context.pop()
        except self.driver.Error:
            self.close()  # PyCUDA still has the context on its own stack, and would abort the process at its end
            raise

    def _attribute(self, name: str) -> int:
        return int(self._device.get_attribute(getattr(self.driver.device_attribute, name)))


def nvcc_path() -> str | None:
    """Return the path of the compiler of kernels.cu; None if there is none."""
    return shutil.which("nvcc") or shutil.which(_NVCC)


def _driver() -> Any:
    """pycuda.driver, initialised."""
    if importlib.util.find_spec("pycuda") is None:
        raise DeviceError("cuda.pycuda", "no PyCUDA", "the package pycuda", install_extra("jetson"))
    try:
        from pycuda import driver
    except ImportError as error:  # its extension module links against the driver, and a CUDA's libraries
        found = _first_line(error)
        if DRIVER.partition(".")[0] in found:
            remedy = "install the driver, or JetPack"
            raise DeviceError("cuda.driver", found, f"the NVIDIA driver's {DRIVER}", remedy) from error
        remedy = "build it again: pip install --force-reinstall --no-cache-dir --no-binary pycuda pycuda"
        raise DeviceError("cuda.pycuda", found, "a PyCUDA that was built for this machine's CUDA", remedy) from error
    try:
        driver.init()
    except driver.Error as error:
        remedy = f"{_SEE_IT_RUN}; in a container, pass the device through"
        raise DeviceError("cuda.device", _first_line(error), "a CUDA device", remedy) from error
    return driver


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


class DeviceMemory:
    """`nbytes` that only the GPU sees. The context must be current when this is made and when it is dropped."""

    def __init__(self, gpu: Gpu, nbytes: int) -> None:
        with gpu.working("device memory"):
            self._device: Any = gpu.driver.mem_alloc(max(nbytes, 1))
        self.address = int(self._device)


class HostMemory:
    """`nbytes` on the host, page-locked, and where the GPU sees them: the same, when they are mapped on a board.

    The context must be current in every call, and when this is dropped. Raises DeviceError (`cuda.memory`).
    """

    def __init__(self, gpu: Gpu, nbytes: int, mapped: bool = True) -> None:
        self._gpu = gpu
        mapped = mapped and gpu.integrated
        flags = gpu.driver.host_alloc_flags.DEVICEMAP if mapped else 0
        with gpu.working("page-locked memory"):
            self._host: Any = gpu.driver.pagelocked_empty(max(nbytes, 1), np.uint8, mem_flags=flags)
            self._device: Any = None if mapped else gpu.driver.mem_alloc(max(nbytes, 1))
            self.address = int(self._host.base.get_device_pointer() if self._device is None else self._device)

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> NDArray[np.generic]:
        """The first bytes as an array, without a copy."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        view: NDArray[np.generic] = self._host[:nbytes].view(dtype).reshape(shape)
        return view

    def upload(self, nbytes: int, stream: Any) -> None:
        """Queue the first bytes for the GPU; they must not change before the stream is past it."""
        if self._device is not None:
            with self._gpu.working("an upload"):
                self._gpu.driver.memcpy_htod_async(self.address, self._host[:nbytes], stream)

    def download(self, nbytes: int, stream: Any) -> None:
        """Queue the first bytes for the host; they are there once the stream is past it."""
        if self._device is not None:
            with self._gpu.working("a download"):
                self._gpu.driver.memcpy_dtoh_async(self._host[:nbytes], self.address, stream)
