"""PyCUDA's memory on the CPU: real memory of exactly the asked size, full of random bytes."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from engines.cuda.kernels import Array

if TYPE_CHECKING:
    from fake_pycuda import FakePycuda

ALIGNMENT = 256  # of what CUDA allocates
DEVICEMAP = 2
UNWRITTEN = 0xCD  # no value that anybody expects


def allocate(nbytes: int) -> Array:
    """Bytes (nbytes,), aligned, and unwritten."""
    memory = np.full(nbytes + ALIGNMENT, UNWRITTEN, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + nbytes]


class Allocation:
    """pycuda.driver.DeviceAllocation: freed by `free`, or when it is dropped.

    The finalizer hangs on an array, which the garbage collector does not track. A tracked object would be finalised
    before the `__del__` of its owner in the same garbage, and the owner may still keep it.
    """

    def __init__(self, fake: FakePycuda, nbytes: int) -> None:
        fake.work("mem_alloc", None)
        memory = allocate(nbytes)
        self._fake, self._address = fake, memory.ctypes.data
        fake.alive[self._address] = memory
        self._owned = memory[:]
        self._drop = weakref.finalize(self._owned, _give_back, fake, fake.alive, self._address)
        self._drop.atexit = False

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        self._fake.work("free", None)
        self._drop()


class PagelockedAllocation:
    """pycuda.driver.PagelockedHostAllocation, which np.asarray makes the base of an array."""

    def __init__(self, fake: FakePycuda, shape: Any, dtype: np.dtype[Any], flags: int) -> None:
        self._memory = allocate(int(np.prod(shape)) * dtype.itemsize)
        self._is_mapped = bool(flags & DEVICEMAP)
        address = self._memory.ctypes.data
        self.__array_interface__ = {
            "shape": (shape,) if isinstance(shape, int) else tuple(shape),
            "typestr": dtype.str,
            "data": (address, False),
            "version": 3,
        }
        home = fake.mapped if self._is_mapped else fake.pagelocked
        home[address] = self._memory
        weakref.finalize(self, _give_back, fake, home, address).atexit = False

    def get_device_pointer(self) -> int:
        assert self._is_mapped, "a device pointer to page-locked memory that is not mapped"
        return self._memory.ctypes.data


def _give_back(fake: FakePycuda, home: dict[int, Array], address: int) -> None:
    """As the driver does: what is queued may still use the memory, so it is done first."""
    if fake.depth == 0:
        fake.mistakes.append("memory dropped without a current context")
    fake.settle()
    del home[address]
