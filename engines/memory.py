"""Memory that host and GPU both see: page-locked with a counterpart on the device, or one memory where they share it.

On a Jetson the GPU works in the board's own memory: what is mapped needs no copy, but the GPU does not cache it, so
that it suits what is read or written once. Elsewhere page-locked memory is what lets a copy run beside the GPU's work.
Source: NVIDIA, CUDA for Tegra, "Memory Management".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from engines.cuda import Gpu
from engines.kernels import Array


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

    def array(self, shape: Sequence[int], dtype: DTypeLike) -> Array:
        """The first bytes as an array, without a copy."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        view: Array = self._host[:nbytes].view(dtype).reshape(shape)
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
