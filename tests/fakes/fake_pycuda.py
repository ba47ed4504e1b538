"""PyCUDA as engines/ uses it, on the CPU: the kernels run in fibers, memory is real, the rest is recorded.

It answers what PyCUDA's own signatures and messages say, refuses what PyCUDA refuses, and can fail where a GPU would.
It proves order, not truth: that calls come in an order which CUDA allows, not what CUDA answers to them.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_allocations import DEVICEMAP, Allocation, PagelockedAllocation
from fake_compiler import compile_kernels
from fake_streams import Event, Queue, Stream
from numpy.typing import DTypeLike

from engines.cuda.kernels import Array

ORIN = {
    "capability": 87,
    "INTEGRATED": 1,
    "CLOCK_RATE": 1300500,
    "MULTIPROCESSOR_COUNT": 16,
    "MAX_THREADS_PER_MULTIPROCESSOR": 1536,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 164 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 163 << 10,
}
T4 = {
    **ORIN,
    "capability": 75,
    "INTEGRATED": 0,
    "CLOCK_RATE": 1590000,
    "MULTIPROCESSOR_COUNT": 40,
    "MAX_THREADS_PER_MULTIPROCESSOR": 1024,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 64 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 64 << 10,
}
H200 = {**T4, "capability": 90, "MULTIPROCESSOR_COUNT": 132}
NAMES = {87: "Orin", 75: "Tesla T4", 90: "NVIDIA H200"}
FIRST_HANDLE = 77
CUDA_VERSION = (12, 6, 0)
NOT_CAPTURED = {"synchronize", "event_synchronize", "mem_alloc", "pagelocked_empty", "free", "compile"}
FREE_BYTES, TOTAL_BYTES = 3 << 30, 8 << 30


class Error(Exception):
    """pycuda.driver.Error"""


class MemoryError_(Error):
    """pycuda.driver.MemoryError"""


class CompileError(Error):
    """pycuda.driver.CompileError"""


class LogicError(Error):
    """pycuda.driver.LogicError"""


class RuntimeError_(Error):
    """pycuda.driver.RuntimeError"""


class FakePycuda:
    """The package's modules; `fail` makes the call of that name raise, `calls` has every call's name and stream.

    Attributes:
        depth: Contexts pushed by the calling thread.
        alive: Device memory by address.
        mapped: Page-locked memory that the device sees too.
        pagelocked: Page-locked memory that it does not see.
        mistakes: Objects dropped while no context was current. PyCUDA cannot free them on most threads.
        chatter: Output of nvcc that is no complaint.
    """

    def __init__(self, devices: int = 1, board: dict[str, int] = ORIN) -> None:
        self.calls: list[tuple[str, object]] = []
        self.fail: dict[str, Exception] = {}
        self.detached = 0
        self.chatter = ""
        self.attributes: dict[str, int] = {}
        self.alive: dict[int, Array] = {}
        self.mapped: dict[int, Array] = {}
        self.pagelocked: dict[int, Array] = {}
        self.mistakes: list[str] = []
        self.spoiled_captures: list[Queue] = []
        self.device = _Device(self, board)
        self._depths: dict[int, int] = {}
        self._queues = {0: Queue()}
        self.driver = ModuleType("pycuda.driver")
        self.driver.__dict__.update(self._driver(devices, board))
        self.compiler = ModuleType("pycuda.compiler")
        self.compiler.SourceModule = partial(compile_kernels, self)  # type: ignore[attr-defined]  # a module made here has no types

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `import pycuda` find this."""
        package = ModuleType("pycuda")
        package.__spec__ = importlib.machinery.ModuleSpec("pycuda", None)
        monkeypatch.setitem(sys.modules, "pycuda", package)
        for name in ("driver", "compiler"):
            module = getattr(self, name)
            setattr(package, name, module)
            monkeypatch.setitem(sys.modules, f"pycuda.{name}", module)

    @property
    def depth(self) -> int:
        return self._depths.get(threading.get_ident(), 0)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def record(self, name: str, stream: object) -> None:
        self.calls.append((name, stream))
        if name in self.fail:
            raise self.fail[name]

    def work(self, name: str, stream: object) -> None:
        """A call that PyCUDA refuses, or the driver, unless a context is current; while a stream is captured, most."""
        assert self.depth > 0, f"{name} without a current context"
        self.record(name, stream)
        captured = [queue for queue in self._queues.values() if queue.captured is not None]
        if captured and name in NOT_CAPTURED:
            self.spoiled_captures += captured
            raise Error(f"{name} failed: operation not permitted when stream is capturing")

    def watch(self, thing: object, what: str) -> None:
        """Note it as a mistake if a thing of the context is dropped while none is current."""
        weakref.finalize(thing, self._dropped, what).atexit = False

    def room(self, address: int) -> int:
        """Bytes from an address to the end of the memory that the device sees there; 0 where there is none."""
        for start, memory in (*self.alive.copy().items(), *self.mapped.copy().items()):
            if start <= address < start + memory.nbytes:
                return start + memory.nbytes - address
        return 0

    def add_stream(self) -> int:
        handle = FIRST_HANDLE + len(self._queues) - 1
        self._queues[handle] = Queue()
        return handle

    def queue(self, handle: int) -> Queue:
        """The work of a stream by its handle; 0 is the default one's."""
        assert handle in self._queues, f"no stream of handle {handle}"
        return self._queues[handle]

    def later(self, stream: Stream | None, work: Callable[[], object]) -> None:
        """Queue work on a stream, None being the default one."""
        self.queue(0 if stream is None else stream.handle).put(work)

    def settle(self) -> None:
        """Do all work of all streams."""
        for queue in list(self._queues.values()):
            queue.run()

    def _driver(self, devices: int, board: dict[str, int]) -> dict[str, Any]:
        return {
            "Error": Error,
            "MemoryError": MemoryError_,
            "CompileError": CompileError,
            "LogicError": LogicError,
            "RuntimeError": RuntimeError_,
            "init": lambda: self.record("init", None),
            "get_version": lambda: CUDA_VERSION,
            "get_driver_version": lambda: CUDA_VERSION[0] * 1000 + CUDA_VERSION[1] * 10,
            "Device": _device_class(devices, self.device),
            "Stream": partial(Stream, self),
            "Event": partial(Event, self),
            "Context": SimpleNamespace(pop=self._pop, synchronize=self._synchronize),
            "device_attribute": SimpleNamespace(**{name: name for name in board}),
            "function_attribute": SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=8, NUM_REGS=4),
            "host_alloc_flags": SimpleNamespace(PORTABLE=1, DEVICEMAP=DEVICEMAP, WRITECOMBINED=4),
            "mem_alloc": partial(Allocation, self),
            "mem_get_info": self._free_and_total,
            "pagelocked_empty": self._pagelocked,
            "memcpy_htod_async": self._upload,
            "memcpy_dtoh_async": self._download,
            "memset_d8_async": self._fill,
        }

    def push(self) -> None:
        assert self.detached == 0, "push of a context that was released"
        self.record("push", None)
        self._depths[threading.get_ident()] = self.depth + 1

    def _pop(self) -> None:
        self._depths[threading.get_ident()] = self.depth - 1
        self.record("pop", None)

    def detach(self) -> None:
        assert not any(self._depths.values()), "released while it is current"
        self.detached += 1

    def _dropped(self, what: str) -> None:
        if self.depth == 0:
            self.mistakes.append(f"{what} dropped without a current context")

    def _synchronize(self) -> None:
        self.work("synchronize", "everything")
        self.settle()

    def _free_and_total(self) -> tuple[int, int]:
        self.work("mem_get_info", None)
        return FREE_BYTES, TOTAL_BYTES

    def _pagelocked(self, shape: Any, dtype: DTypeLike, order: str = "C", mem_flags: int = 0) -> Array:
        self.work("pagelocked_empty", None)
        assert order == "C"
        return np.asarray(PagelockedAllocation(self, shape, np.dtype(dtype), mem_flags))

    def _upload(self, address: int, source: Array, stream: Stream | None) -> None:
        self.work("memcpy_htod_async", stream)
        assert self.room(address) >= source.nbytes, "an upload beyond the memory that is there"
        self.later(stream, lambda: ctypes.memmove(address, source.ctypes.data, source.nbytes))

    def _download(self, target: Array, address: int, stream: Stream | None) -> None:
        self.work("memcpy_dtoh_async", stream)
        assert self.room(address) >= target.nbytes, "a download from beyond the memory that is there"
        self.later(stream, lambda: ctypes.memmove(target.ctypes.data, address, target.nbytes))

    def _fill(self, address: int, value: int, nbytes: int, stream: Stream | None) -> None:
        self.work("memset_d8_async", stream)
        assert self.room(address) >= nbytes, "a fill beyond the memory that is there"
        self.later(stream, lambda: ctypes.memset(address, value, nbytes))


def _device_class(devices: int, device: Any) -> type:
    class Device:
        @staticmethod
        def count() -> int:
            return devices

        def __new__(cls, _: int) -> Any:
            return device

    return Device


class _Device:
    """pycuda.driver.Device. model: its name."""

    def __init__(self, fake: FakePycuda, board: dict[str, int]) -> None:
        self._fake, self._board = fake, board
        self.model = NAMES[board["capability"]]

    def name(self) -> str:
        return self.model

    def compute_capability(self) -> tuple[int, int]:
        return divmod(self._board["capability"], 10)

    def total_memory(self) -> int:
        return TOTAL_BYTES

    def get_attribute(self, name: str) -> int:
        return self._board[name]

    def retain_primary_context(self) -> Any:
        return SimpleNamespace(push=self._fake.push, detach=self._fake.detach)
