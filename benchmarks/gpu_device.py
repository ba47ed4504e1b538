"""A GPU as the benchmark needs it: memory, copies, times by CUDA events, and the peers on the same memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.gpu_timing import Run
from engines.cuda.gpu import Gpu
from engines.cuda.kernels import CudaExecutor, KernelGeometry

_GATE_BYTES = 2 << 30
_FAST_DOUBLES = 2  # float32 operations to one of float64: 2 on a V100, A100, H200; 32 and more on others


@dataclass(frozen=True)
class View:
    """Device memory as others understand it: the CUDA array interface."""

    address: int
    elements: int
    dtype: np.dtype[np.generic]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.elements,), "typestr": self.dtype.str, "data": (self.address, False), "version": 3}


class CudaDevice:
    """A Gpu whose context is current. Everything is queued on the default stream, as CuPy and PyTorch do."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._driver = gpu, gpu.driver
        self.free_bytes, _ = self._driver.mem_get_info()
        self._gate_bytes = min(_GATE_BYTES, self.free_bytes // 32)
        self._gate = self.allocate(2 * self._gate_bytes)
        device = self._driver.Context.get_device()
        version = self._driver.get_driver_version()
        self.name = (
            f"{device.name()}, {gpu.multiprocessors} multiprocessors, CUDA {version // 1000}.{version % 1000 // 10}"
        )
        ratio = device.get_attribute(self._driver.device_attribute.SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO)
        self.data_centre = ratio <= _FAST_DOUBLES  # the search computes in float64

    def executor(self, bits: int) -> CudaExecutor:
        return CudaExecutor(self._gpu, KernelGeometry(bits))

    def allocate(self, nbytes: int) -> Any:
        """Memory, freed with its last reference; int() of it is the address."""
        return self._driver.mem_alloc(nbytes)

    def upload(self, address: int, values: NDArray[np.generic]) -> None:
        self._driver.memcpy_htod(address, values)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        self._driver.memcpy_dtod_async(target, source, nbytes, None)

    def milliseconds(self, run: Run, times: int, gate: int) -> tuple[float, bool]:
        """Of one run, from so many in a row, each given its number; and whether the GPU never waited for the host.

        So many copies go first. While they keep the GPU busy the host queues the rest, and its own pace does not count
        if it is done before they are.
        """
        start, stop = self._driver.Event(), self._driver.Event()
        for _ in range(gate):
            self.copy(int(self._gate), int(self._gate) + self._gate_bytes, self._gate_bytes)
        start.record()
        for number in range(times):
            run(number)
        stop.record()
        ahead = not start.query()
        stop.synchronize()
        return float(stop.time_since(start)) / times, ahead

    def peers(self, views: list[View], bins: int, top: float) -> Iterator[tuple[str, Run | str]]:
        """For each peer, what counts |x| of all views; or why it cannot. What one keeps goes before the next comes."""
        for name, prepare in _PEERS.items():
            yield name, _attempt(prepare, views, bins, top)
            self.release()

    def release(self) -> None:
        """Takes back the memory that the peers keep for their next allocations."""
        if cupy := sys.modules.get("cupy"):
            cupy.get_default_memory_pool().free_all_blocks()
        if torch := sys.modules.get("torch"):
            torch.cuda.empty_cache()


def _cupy(views: list[View], bins: int, top: float) -> Run:
    import cupy  # only on a machine with a GPU

    arrays = [cupy.asarray(view) for view in views]
    return lambda _: [cupy.histogram(cupy.abs(array), bins=bins, range=(0.0, top)) for array in arrays]


def _torch(views: list[View], bins: int, top: float) -> Run:
    import torch  # only on a machine with a GPU

    tensors = [torch.as_tensor(view, device="cuda") for view in views]
    return lambda _: [torch.histc(tensor.abs(), bins=bins, min=0.0, max=top) for tensor in tensors]


_PEERS = {"CuPy": _cupy, "PyTorch": _torch}


def _attempt(prepare: Callable[[list[View], int, float], Run], views: list[View], bins: int, top: float) -> Run | str:
    """Prepared and tried once, which also compiles what it compiles."""
    try:
        count = prepare(views, bins, top)
        count(0)
    except ImportError:
        return "not installed"
    except Exception as error:  # whatever a peer cannot do, float16 or this much memory, is a finding
        return f"cannot: {str(error).partition(chr(10))[0][:60]}"
    return count
