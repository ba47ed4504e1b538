"""TensorRT's Python bindings as engines/trt uses them, on the CPU and on tests/fakes/fake_pycuda.py.

Graphs run for real, through ONNX Runtime, on the bytes at the addresses that were set. So whole flows, from the
builder to a swap, run with true numbers. A call that breaks a rule of TensorRT or CUDA is refused as TensorRT refuses
it: None or False, and a line in the log. Where TensorRT would crash or corrupt, the fake raises an AssertionError.
`assert_order` repeats it, since TensorRT's callbacks swallow exceptions.

A fake proves order, not truth: that the calls come in an order which the rules allow. Only a GPU shows what TensorRT
computes, which kernels it has and how fast they are. Messages, phases and refusals were read off TensorRT-RTX 1.7.1,
signatures and values off the bindings of 10.3, 10.13 and 11.4.
"""

from __future__ import annotations

import gc
import importlib.machinery
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_tensorrt_types as types
import pytest
from fake_pycuda import FakePycuda
from fake_tensorrt_builder import Builder
from fake_tensorrt_engine import Runtime
from fake_tensorrt_inference import Inference
from fake_tensorrt_network import OnnxParser
from fake_tensorrt_types import Severity

from engines.cuda.kernels import Array

_DIFFERENT_LOGGER = (
    "The logger passed into createInfer{what} differs from one already registered for an existing builder, runtime, or "
    "refitter. So the current new logger is ignored"
)


class FakeTensorRt:
    """One TensorRT with its GPU.

    Attributes that make it fail:
        fail: The error to log, by step: "build", "deserialize", "context" or "execute".
        without_kernel: Nodes for which the builder has no kernel at all.
        without_int8: Quantised nodes that it runs in float.
        spoil: By debug tensor, the value that the listener gets in its place; None, and it is not called.
        build_s: Seconds that a build takes at least.
        wrong_from: Once this file exists, every second inference of a reference is wrong, without an error.

    Attributes that record:
        timed: Layers whose kernels the last build timed, without those in its timing cache.
        freed: Which of "context", "engine" and "runtime" were freed, in order.
        mistakes: The broken rules.
    """

    def __init__(
        self,
        pycuda: FakePycuda,
        version: str = "10.3.0",
        module: str = "tensorrt",
        inference: type[Inference] = Inference,
    ) -> None:
        self.pycuda = pycuda
        self.inference = inference
        self.name, self.version = module, version
        self.fail: dict[str, str] = {}
        self.without_kernel: set[str] = set()
        self.without_int8: set[str] = set()
        self.spoil: dict[str, Callable[[Array], Array | None]] = {}
        self.dla_cores = 2
        self.build_s = 0.0
        self.wrong_from: Path | None = None
        self.runs = 0
        self.timed: list[str] = []
        self.made: list[str] = []
        self.freed: list[str] = []
        self.mistakes: list[str] = []
        self._logger: Any = None
        self.module = ModuleType(module)
        self.module.__dict__.update(
            types.namespace(self.is_cross, self.is_always_typed),
            __version__=version,
            Builder=partial(Builder, self),
            OnnxParser=partial(OnnxParser, self),
            Runtime=partial(Runtime, self),
        )

    @property
    def is_cross(self) -> bool:
        """TensorRT-RTX, which builds for other GPUs."""
        return self.name == "tensorrt_rtx"

    @property
    def is_always_typed(self) -> bool:
        """Networks are strongly typed whether the flag is set or not."""
        return self.is_cross or int(self.version.partition(".")[0]) >= 11

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make this the one TensorRT that `import` and `find_spec` know."""
        for other in ("tensorrt", "tensorrt_rtx"):
            monkeypatch.setitem(sys.modules, other, None)
        self.module.__spec__ = importlib.machinery.ModuleSpec(self.name, None)
        monkeypatch.setitem(sys.modules, self.name, self.module)

    def register(self, logger: Any, what: str) -> None:
        """One logger per process: the first."""
        if not isinstance(logger, types.ILogger):
            raise TypeError(f"{what}: incompatible constructor arguments: {logger!r}")
        if self._logger is None:
            self._logger = logger
        elif logger is not self._logger:
            self.log(Severity.WARNING, _DIFFERENT_LOGGER.format(what=what))

    def log(self, severity: Severity, message: str) -> None:
        """As the bindings do, without a word when the logger itself fails."""
        try:
            self._logger.log(severity, message)
        except BaseException as error:
            self.mistakes.append(f"the logger raised {error!r}")

    def error(self, message: str) -> None:
        self.log(Severity.ERROR, message)

    def fails(self, step: str) -> bool:
        """Whether a step is made to fail; says why in the log."""
        if step in self.fail:
            self.error(self.fail[step])
        return step in self.fail

    def require(self, holds: object, rule: str) -> None:
        """Refuse what TensorRT does not survive, and remember it."""
        if not holds:
            self.mistakes.append(rule)
            raise AssertionError(rule)

    def require_context(self, call: str) -> None:
        self.require(self.pycuda.depth > 0, f"{call} without a current CUDA context")

    def watch(self, thing: object, what: str, on_free: Callable[[], None] = lambda: None) -> None:
        """Note when a thing is freed, and whether a CUDA context was current then."""
        self.made.append(what)
        weakref.finalize(thing, self._free, what, on_free).atexit = False

    def assert_order(self) -> None:
        """No rule was broken, and everything was freed while a CUDA context was current."""
        gc.collect()  # objects in a cycle would be freed at any time, in any thread
        mistakes = [*self.mistakes, *self.pycuda.mistakes]
        assert mistakes == [], mistakes
        assert sorted(self.freed) == sorted(self.made), f"{self.made} were made and {self.freed} freed"

    def _free(self, what: str, on_free: Callable[[], None]) -> None:
        self.freed.append(what)
        if self.pycuda.depth == 0:
            self.mistakes.append(f"{what} freed without a current CUDA context")
        on_free()


def install(
    monkeypatch: pytest.MonkeyPatch,
    version: str = "10.3.0",
    module: str = "tensorrt",
    pycuda: FakePycuda | None = None,
) -> FakeTensorRt:
    """A TensorRT of a version, and a PyCUDA, for this test."""
    pycuda = pycuda or FakePycuda()
    pycuda.install(monkeypatch)
    fake = FakeTensorRt(pycuda, version, module)
    fake.install(monkeypatch)
    return fake
