"""PyCUDA as engines/cuda.py uses it, on the CPU: the kernels run in fibers, the rest is recorded.

It answers what PyCUDA's own signatures and messages say, refuses what PyCUDA refuses, and can fail where a GPU would.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
import warnings
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fiber_executor import FiberBuffer, FiberExecutor

from engines.kernels import Array, Geometry

ORIN = {
    "capability": 87,
    "MULTIPROCESSOR_COUNT": 16,
    "MAX_THREADS_PER_MULTIPROCESSOR": 1536,
    "MAX_REGISTERS_PER_MULTIPROCESSOR": 65536,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 164 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 163 << 10,
}
T4 = {
    **ORIN,
    "capability": 75,
    "MULTIPROCESSOR_COUNT": 40,
    "MAX_THREADS_PER_MULTIPROCESSOR": 1024,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 64 << 10,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 64 << 10,
}
REGISTERS = 40  # of a thread, in both kernels


class Error(Exception):
    """pycuda.driver.Error"""


class MemoryError_(Error):
    """pycuda.driver.MemoryError"""


class CompileError(Error):
    """pycuda.driver.CompileError"""


class FakePycuda:
    """The package's modules; `fail` makes the call of that name raise, `calls` has every call's name and stream.

    depth: contexts pushed. alive: memory by address. chatter: what nvcc says although it has nothing to complain of.
    """

    def __init__(self, devices: int = 1, board: dict[str, int] = ORIN) -> None:
        self.calls: list[tuple[str, object]] = []
        self.fail: dict[str, Exception] = {}
        self.depth = 0
        self.detached = 0
        self.chatter = ""
        self.attributes: dict[str, int] = {}
        self.alive: dict[int, Array] = {}
        context = SimpleNamespace(push=self._push, detach=self._detach)
        device = SimpleNamespace(
            retain_primary_context=lambda: context,
            get_attribute=lambda name: board[name],
            compute_capability=lambda: divmod(board["capability"], 10),
        )
        self.driver = ModuleType("pycuda.driver")
        self.driver.__dict__.update(
            Error=Error,
            MemoryError=MemoryError_,
            CompileError=CompileError,
            init=lambda: self.record("init", None),
            Device=_device_class(devices, device),
            Stream=lambda flags=0: _Stream(self, flags),
            Context=SimpleNamespace(pop=self._pop, synchronize=lambda: self.work("synchronize", "everything")),
            device_attribute=SimpleNamespace(**{name: name for name in board}),
            function_attribute=SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=8, NUM_REGS=4),
            mem_alloc=self._allocate,
            memcpy_htod_async=self._upload,
            memcpy_dtoh_async=self._download,
            memset_d8_async=self._fill,
        )
        self.compiler = ModuleType("pycuda.compiler")
        self.compiler.SourceModule = self._compile  # type: ignore[attr-defined]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `import pycuda` find this."""
        package = ModuleType("pycuda")
        package.__spec__ = importlib.machinery.ModuleSpec("pycuda", None)
        monkeypatch.setitem(sys.modules, "pycuda", package)
        for name in ("driver", "compiler"):
            module = getattr(self, name)
            setattr(package, name, module)
            monkeypatch.setitem(sys.modules, f"pycuda.{name}", module)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def record(self, name: str, stream: object) -> None:
        self.calls.append((name, stream))
        if name in self.fail:
            raise self.fail[name]

    def work(self, name: str, stream: object) -> None:
        """A call that PyCUDA refuses, or the driver, unless a context is current."""
        assert self.depth > 0, f"{name} without a current context"
        self.record(name, stream)

    def _push(self) -> None:
        assert self.detached == 0, "push of a context that was released"
        self.record("push", None)
        self.depth += 1

    def _pop(self) -> None:
        self.depth -= 1
        self.record("pop", None)

    def _detach(self) -> None:
        assert self.depth == 0, "released while it is current"
        self.detached += 1

    def _allocate(self, nbytes: int) -> Any:
        self.work("mem_alloc", None)
        memory = np.full(nbytes + 256, 0xCD, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 256
        self.alive[address] = memory
        return _Allocation(self, address)

    def _upload(self, address: int, source: Array, stream: object) -> None:
        self.work("memcpy_htod_async", stream)
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def _download(self, target: Array, address: int, stream: object) -> None:
        self.work("memcpy_dtoh_async", stream)
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def _fill(self, address: int, value: int, nbytes: int, stream: object) -> None:
        self.work("memset_d8_async", stream)
        ctypes.memset(address, value, nbytes)

    def _compile(self, source: str, nvcc: str, options: list[str], no_extern_c: bool) -> Any:
        self.work("compile", None)
        assert no_extern_c
        assert nvcc.endswith("nvcc")
        if self.chatter:
            warnings.warn(f"The CUDA compiler succeeded, but said the following:\n{self.chatter}", stacklevel=2)
        values = dict(option[2:].split("=") for option in options if option.startswith("-D"))
        executor = FiberExecutor(Geometry(int(values["BITS"]), int(values["TAIL"]), int(values["THREADS"])), source)
        return SimpleNamespace(get_function=lambda name: _Function(self, executor, name))


def _device_class(devices: int, device: Any) -> type:
    class Device:
        @staticmethod
        def count() -> int:
            return devices

        def __new__(cls, _: int) -> Any:
            return device

    return Device


class _Stream:
    handle = 77

    def __init__(self, fake: FakePycuda, flags: int) -> None:
        fake.work("stream", flags)
        self._fake = fake

    def synchronize(self) -> None:
        self._fake.work("synchronize", self)


class _Allocation:
    def __init__(self, fake: FakePycuda, address: int) -> None:
        self._fake, self._address = fake, address

    def __int__(self) -> int:
        return self._address

    def free(self) -> None:
        self._fake.work("free", None)
        del self._fake.alive[self._address]


class _Function:
    def __init__(self, fake: FakePycuda, executor: FiberExecutor, name: str) -> None:
        self._fake, self._executor, self._name = fake, executor, name

    def get_attribute(self, attribute: int) -> int:
        self._fake.work("get_attribute", None)
        assert attribute == 4
        return REGISTERS

    def set_attribute(self, attribute: int, value: int) -> None:
        self._fake.work("set_attribute", None)
        assert attribute == 8
        self._fake.attributes[self._name] = value

    def __call__(
        self, *arguments: Any, grid: tuple[int, int], block: tuple[int, int, int], shared: int, stream: object
    ) -> None:
        self._fake.work(self._name, stream)
        for number, argument in enumerate(arguments):
            if not isinstance(argument, np.number):
                raise TypeError(f"invalid type on parameter #{number} (0-based)")  # a plain int has no size
        assert block == (self._executor.geometry.threads, 1, 1)
        assert shared == self._executor.geometry.shared_bytes()[self._name]
        wrapped = [a if isinstance(a, np.int32) else FiberBuffer(int(a), (), np.dtype("u1")) for a in arguments]
        self._executor.launch(self._name, grid[0], wrapped)
