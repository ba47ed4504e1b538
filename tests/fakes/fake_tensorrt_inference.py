"""One inference of the fake: queued on its stream, its debug tensors shown, its layers timed."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from fake_allocations import UNWRITTEN, allocate
from fake_streams import Queue
from fake_tensorrt_config import Shape
from fake_tensorrt_plan import Program
from fake_tensorrt_types import NUMPY, DataType, Dims, IDebugListener, IProfiler, TensorLocation

from engines.cuda.kernels import Array

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


@dataclass(frozen=True)
class Inference:
    """Everything about one inference, at the moment when it was enqueued.

    Args:
        pending: Per stream, the place up to which work must be done before the context may be freed.
        scratch: Memory of the debug tensors.
        listener: None without a listener.
        layers: The names that the profiler receives.
    """

    world: FakeTensorRt
    program: Program
    handle: int
    shapes: Mapping[str, Shape]
    addresses: Mapping[str, int]
    pending: dict[int, tuple[Queue, int]]
    scratch: dict[str, Array]
    listener: IDebugListener | None
    profiler: IProfiler | None
    layers: Sequence[str]

    def enqueue(self) -> None:
        queue = self.world.pycuda.queue(self.handle)
        results: dict[str, Array] = {}
        queue.put(lambda: results.update(self._compute()))
        for name in self.program.debug if self.listener is not None else ():
            self._show(name, results)
        queue.put(lambda: self._write(results))
        self.pending[self.handle] = queue, queue.queued
        if self.profiler is not None:  # waits, as TensorRT does then
            queue.run()
            for index, layer in enumerate(self.layers):
                self.profiler.report_layer_time(layer, 0.01 * (index + 1))

    def _compute(self) -> dict[str, Array]:
        program = self.program
        return program.run(
            {name: _read(self.addresses[name], self.shapes[name], program.types[name]) for name in program.inputs}
        )

    def _write(self, results: Mapping[str, Array]) -> None:
        is_wrong = bool(self.program.debug) and self._is_wrong_run()
        for name in self.program.outputs:
            _write(self.addresses[name], -results[name] if is_wrong else results[name])

    def _is_wrong_run(self) -> bool:
        """Of a reference: every second inference, once the file `wrong_from` is there."""
        self.world.runs += 1
        wrong_from = self.world.wrong_from
        return wrong_from is not None and self.world.runs % 2 == 0 and wrong_from.exists()

    def _show(self, name: str, results: Mapping[str, Array]) -> None:
        """Hand out a debug tensor: in memory that holds it when the stream is there, and only for the call."""
        spoil = self.world.spoil.get(name, _as_it_is)
        shown = spoil(np.zeros(self.shapes[name], NUMPY[self.program.types[name]]))
        if shown is None:
            return
        kind = next(known for known, dtype in NUMPY.items() if dtype == shown.dtype)
        memory = self._memory_for(name, shown.nbytes)
        address, queue = memory.ctypes.data, self.world.pycuda.queue(self.handle)
        queue.put(lambda: _write(address, np.asarray(spoil(results[name]))))
        assert self.listener is not None
        with suppress(BaseException):  # swallowed, and success reported, as by the bindings
            capsule, shape = capsule_of(address), Dims(shown.shape)
            self.listener.process_debug_tensor(capsule, TensorLocation.DEVICE, kind, shape, name, self.handle)
        queue.put(lambda: memory.fill(UNWRITTEN))

    def _memory_for(self, name: str, nbytes: int) -> Array:
        alive, known = self.world.pycuda.alive, self.scratch.get(name)
        if known is None or known.nbytes != max(nbytes, 1):
            if known is not None:
                self.world.pycuda.settle()
                del alive[known.ctypes.data]
            known = self.scratch[name] = allocate(max(nbytes, 1))
            alive[known.ctypes.data] = known
        return known


def capsule_of(address: int) -> object:
    """As the bindings wrap an address."""
    capsule: object = _capsule(address, None, None)
    return capsule


def _read(address: int, shape: Shape, kind: DataType) -> Array:
    values: Array = np.empty(shape, NUMPY[kind])
    ctypes.memmove(values.ctypes.data, address, values.nbytes)
    return values


def _write(address: int, values: Array) -> None:
    contiguous = np.ascontiguousarray(values)
    ctypes.memmove(address, contiguous.ctypes.data, contiguous.nbytes)


def _as_it_is(values: Array) -> Array | None:
    return values
