"""PyCUDA's compiler and functions on the CPU: kernels.cu runs in fibers, when its stream comes to it."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from fiber_executor import FiberBuffer, FiberExecutor

from engines.cuda.kernels import KernelGeometry

if TYPE_CHECKING:
    from fake_pycuda import FakePycuda
    from fake_streams import Stream

REGISTERS = 40  # of a thread, in all kernels


def compile_kernels(fake: FakePycuda, source: str, nvcc: str, options: list[str], no_extern_c: bool) -> Any:
    """pycuda.compiler.SourceModule"""
    fake.work("compile", None)
    assert no_extern_c
    assert nvcc.endswith("nvcc")
    if fake.chatter:
        warnings.warn(f"The CUDA compiler succeeded, but said the following:\n{fake.chatter}", stacklevel=2)
    values = dict(option[2:].split("=") for option in options if option.startswith("-D"))
    executor = FiberExecutor(KernelGeometry(int(values["BITS"]), int(values["TAIL"]), int(values["THREADS"])), source)
    return SimpleNamespace(get_function=lambda name: Function(fake, executor, name))


class Function:
    """pycuda.driver.Function"""

    def __init__(self, fake: FakePycuda, executor: FiberExecutor, name: str) -> None:
        self._fake, self._executor, self._name = fake, executor, name
        fake.watch(self, f"the kernel {name}")

    def get_attribute(self, attribute: int) -> int:
        self._fake.work("get_attribute", None)
        assert attribute == 4
        return REGISTERS

    def set_attribute(self, attribute: int, value: int) -> None:
        self._fake.work("set_attribute", None)
        assert attribute == 8
        self._fake.attributes[self._name] = value

    def __call__(
        self, *arguments: Any, grid: tuple[int, int], block: tuple[int, int, int], shared: int, stream: Stream | None
    ) -> None:
        self._fake.work(self._name, stream)
        for number, argument in enumerate(arguments):
            if not isinstance(argument, np.number):
                raise TypeError(f"invalid type on parameter #{number} (0-based)")  # a plain int has no size
        assert block == (self._executor.geometry.threads, 1, 1)
        assert shared == self._executor.geometry.shared_bytes()[self._name]
        wrapped = [a if isinstance(a, np.int32) else FiberBuffer(int(a), (), np.dtype("u1")) for a in arguments]
        self._fake.later(stream, lambda: self._executor.launch(self._name, grid[0], wrapped))
