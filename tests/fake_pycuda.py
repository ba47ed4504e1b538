"""PyCUDA as engines/cuda.py uses it, on the CPU: the kernels run in fibers, the rest is recorded.

It answers what PyCUDA's own signatures and messages say, and can fail where a GPU would.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fiber_executor import FiberBuffer, FiberExecutor

from engines.kernels import Array, Geometry


class Error(Exception):
    """pycuda.driver.Error"""


class FakePycuda:
    """The package's modules; `fail` makes the call of that name raise, `calls` has every call's name and stream."""

    def __init__(self, devices: int = 1) -> None:
        self.calls: list[tuple[str, object]] = []
        self.fail: dict[str, Exception] = {}
        self.depth = 0
        self.attributes: dict[str, int] = {}
        self.alive: dict[int, Array] = {}
        context = SimpleNamespace(push=lambda: self._enter(1))
        device = SimpleNamespace(retain_primary_context=lambda: context, get_attribute=lambda _: 2)
        fake = self

        class Device:
            @staticmethod
            def count() -> int:
                return devices

            def __new__(cls, _: int) -> Any:
                return device

        class Stream:
            handle = 77

            def synchronize(self) -> None:
                fake.record("synchronize", self)

        self.driver = ModuleType("pycuda.driver")
        self.driver.__dict__.update(
            Error=Error,
            init=lambda: self.record("init", None),
            Device=Device,
            Stream=Stream,
            Context=SimpleNamespace(
                pop=lambda: self._enter(-1), synchronize=lambda: self.record("synchronize", "everything")
            ),
            device_attribute=SimpleNamespace(MULTIPROCESSOR_COUNT=16),
            function_attribute=SimpleNamespace(MAX_DYNAMIC_SHARED_SIZE_BYTES=8),
            memcpy_htod_async=self._upload,
            memcpy_dtoh_async=self._download,
            memset_d8_async=self._fill,
        )
        self.compiler = ModuleType("pycuda.compiler")
        self.compiler.SourceModule = self._compile  # type: ignore[attr-defined]
        self.tools = ModuleType("pycuda.tools")
        self.tools.DeviceMemoryPool = lambda: SimpleNamespace(  # type: ignore[attr-defined]
            allocate=self._allocate, stop_holding=lambda: self.record("stop_holding", None)
        )

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make `import pycuda` find this."""
        package = ModuleType("pycuda")
        package.__spec__ = importlib.machinery.ModuleSpec("pycuda", None)
        monkeypatch.setitem(sys.modules, "pycuda", package)
        for name in ("driver", "compiler", "tools"):
            module = getattr(self, name)
            setattr(package, name, module)
            monkeypatch.setitem(sys.modules, f"pycuda.{name}", module)

    def record(self, name: str, stream: object) -> None:
        self.calls.append((name, stream))
        if name in self.fail:
            raise self.fail[name]

    def _enter(self, step: int) -> None:
        self.depth += step

    def _allocate(self, nbytes: int) -> Any:
        assert self.depth > 0, "no current context"
        self.record("allocate", None)
        memory = np.full(nbytes + 256, 0xCD, np.uint8)
        address = memory.ctypes.data + -memory.ctypes.data % 256
        self.alive[address] = memory
        return np.intp(address)

    def _upload(self, address: int, source: Array, stream: object) -> None:
        self.record("memcpy_htod_async", stream)
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def _download(self, target: Array, address: int, stream: object) -> None:
        self.record("memcpy_dtoh_async", stream)
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def _fill(self, address: int, value: int, nbytes: int, stream: object) -> None:
        self.record("memset_d8_async", stream)
        ctypes.memset(address, value, nbytes)

    def _compile(self, source: str, nvcc: str, options: list[str], no_extern_c: bool) -> Any:
        self.record("compile", None)
        assert no_extern_c
        assert nvcc.endswith("nvcc")
        values = dict(option[2:].split("=") for option in options if option.startswith("-D"))
        executor = FiberExecutor(Geometry(int(values["BITS"]), int(values["TAIL"]), int(values["THREADS"])), source)
        return SimpleNamespace(get_function=lambda name: _Function(self, executor, name))


class _Function:
    def __init__(self, fake: FakePycuda, executor: FiberExecutor, name: str) -> None:
        self._fake, self._executor, self._name = fake, executor, name

    def set_attribute(self, attribute: int, value: int) -> None:
        self._fake.record("set_attribute", None)
        assert attribute == 8
        self._fake.attributes[self._name] = value

    def __call__(
        self, *arguments: Any, grid: tuple[int, int], block: tuple[int, int, int], shared: int, stream: object
    ) -> None:
        self._fake.record(self._name, stream)
        assert block == (self._executor.geometry.threads, 1, 1)
        assert shared == self._executor.geometry.shared_bytes()[self._name]
        wrapped = [a if isinstance(a, np.int32) else FiberBuffer(int(a), (), np.dtype("u1")) for a in arguments]
        self._executor.launch(self._name, grid[0], wrapped)
