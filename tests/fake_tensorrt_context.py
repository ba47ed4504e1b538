"""The fake's execution contexts, on fake_pycuda's memory and streams."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np
from fake_allocations import ALIGNMENT, UNWRITTEN, allocate
from fake_tensorrt_config import Shape
from fake_tensorrt_types import NUMPY, DataType, Dims, IDebugListener, IProfiler, TensorLocation

from engines.kernels import Array

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt
    from fake_tensorrt_engine import ICudaEngine

_USAGE = "IExecutionContext::{}: Error Code 3: API Usage Error (Parameter check failed, {})"

_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class IExecutionContext:
    """Keeps its engine alive. What is enqueued happens when its stream comes to it, and so not before someone waits."""

    def __init__(self, world: FakeTensorRt, engine: ICudaEngine) -> None:
        self._world, self._engine = world, engine
        self._program = engine.program
        self._profile = 0
        self._shapes = {name: shape for name, shape in self._program.inputs.items() if -1 not in shape}
        self._addresses: dict[str, int] = {}
        self._listener: IDebugListener | None = None
        self._listens = False
        self._profiler: IProfiler | None = None
        self._alone = threading.Lock()
        self._pending: list[str] = []
        self._scratch: dict[str, Array] = {}
        world.watch(self, "context", _Ending(world, self._pending, self._scratch))

    @property
    def profiler(self) -> IProfiler | None:
        return self._profiler

    @profiler.setter
    def profiler(self, profiler: IProfiler | None) -> None:
        if not isinstance(profiler, IProfiler | None):
            raise TypeError(f"incompatible function arguments: {profiler!r}")
        self._profiler = profiler

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        with self._call("set_optimization_profile_async"):
            self._world.pycuda.queue(stream_handle)
            if self._world.fails("profile"):
                return False
            if not 0 <= profile_index < self._engine.num_optimization_profiles:
                return self._refuse("setOptimizationProfileAsync", f"condition: profileIndex {profile_index}")
            self._profile = profile_index
            self._shapes = {name: shape for name, shape in self._program.inputs.items() if -1 not in shape}
            return True

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        with self._call("set_input_shape"):
            wanted = tuple(shape)
            if name not in self._program.inputs:
                return self._refuse("setInputShape", f"condition: isInput. {name} is no input.")
            low, _, high = self._engine.profile(name, self._profile)
            if len(wanted) != len(low) or not all(a <= b <= c for a, b, c in zip(low, wanted, high, strict=True)):
                return self._refuse(
                    "setInputShape",
                    f"Set dimension {list(wanted)} for tensor {name} does not satisfy any optimization profiles. Valid "
                    f"range for profile {self._profile}: {list(low)}..{list(high)}.",
                )
            self._shapes[name] = wanted
            return True

    def get_tensor_shape(self, name: str) -> Dims:
        """With -1 for what the input shapes do not settle, or have not yet."""
        with self._call("get_tensor_shape"):
            if name in self._shapes:
                return Dims(self._shapes[name])
            if name in self._program.inputs or not self._is_settled():
                return Dims(self._program.dims[name])
            return Dims(self._program.shapes(self._shapes)[name])

    def set_tensor_address(self, name: str, memory: int) -> bool:
        with self._call("set_tensor_address"):
            if not isinstance(memory, int):
                raise TypeError(f"set_tensor_address(): incompatible function arguments: {memory!r}")
            if name not in self._engine.names:
                return self._refuse("setTensorAddress", f"condition: {name} is an input or output.")
            self._addresses[name] = memory
            return True

    def set_debug_listener(self, listener: IDebugListener) -> bool:
        with self._call("set_debug_listener"):
            if not isinstance(listener, IDebugListener):
                raise TypeError(f"set_debug_listener(): incompatible function arguments: {listener!r}")
            self._listener = listener
            return True

    def set_all_tensors_debug_state(self, flag: bool) -> bool:
        with self._call("set_all_tensors_debug_state"):
            self._listens = flag
            return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        with self._call("execute_async_v3"):
            if self._world.fails("execute"):
                return False
            if not self._is_settled():
                return self._refuse("enqueueV3", "condition: allInputDimensionsSpecified.")
            shapes = {**self._shapes, **self._program.shapes(self._shapes)}
            for name in self._engine.names:
                if not self._addresses.get(name):
                    return self._refuse("enqueueV3", f"condition: an address is set for tensor {name}.")
                self._check_memory(name, shapes[name])
            self._enqueue(stream_handle, shapes)
            return True

    def _enqueue(self, handle: int, shapes: dict[str, Shape]) -> None:
        queue = self._world.pycuda.queue(handle)
        addresses, program, pending = dict(self._addresses), self._program, self._pending
        read = {name: (addresses[name], shapes[name]) for name in program.inputs}
        written = {name: addresses[name] for name in program.outputs}
        results: dict[str, Array] = {}

        def compute() -> None:
            results.update(program.run({name: _read(*where, program.types[name]) for name, where in read.items()}))

        def write() -> None:
            for name, address in written.items():
                _write(address, results[name])
            pending.pop()

        pending.append("an inference")
        queue.put(compute)
        if self._listener is not None and self._listens:
            for name in program.debug:
                self._hand_out(name, shapes[name], results, handle)
        queue.put(write)
        if self._profiler is not None:  # waits, as TensorRT does then
            queue.run()
            for index, row in enumerate(self._engine.rows()):
                self._profiler.report_layer_time(row.name, 0.01 * (index + 1))

    def _hand_out(self, name: str, shape: Shape, results: dict[str, Array], handle: int) -> None:
        """Show the listener a debug tensor: in memory that holds it when the stream is there, and only for the call."""
        world, kind = self._world, self._program.types[name]
        spoil = world.spoil.get(name, _as_it_is)
        if spoil(np.zeros(shape, NUMPY[kind])) is None:
            return
        memory = self._memory_for(name, int(np.prod(shape)) * np.dtype(NUMPY[kind]).itemsize)
        address = memory.ctypes.data
        queue = world.pycuda.queue(handle)
        queue.put(lambda: _write(address, np.asarray(spoil(results[name]), NUMPY[kind])))
        with suppress(BaseException):  # swallowed, and success reported, as by the bindings
            capsule = _capsule(address, None, None)
            self._listener.process_debug_tensor(capsule, TensorLocation.DEVICE, kind, Dims(shape), name, handle)  # type: ignore[union-attr]  # there is one, or nobody asks
        queue.put(lambda: memory.fill(UNWRITTEN))

    def _memory_for(self, name: str, nbytes: int) -> Array:
        if name not in self._scratch or self._scratch[name].nbytes != nbytes:
            self._world.pycuda.settle()
            self._forget(name)
            self._scratch[name] = allocate(max(nbytes, 1))
            self._world.pycuda.alive[self._scratch[name].ctypes.data] = self._scratch[name]
        return self._scratch[name]

    def _forget(self, name: str) -> None:
        if name in self._scratch:
            del self._world.pycuda.alive[self._scratch.pop(name).ctypes.data]

    def _is_settled(self) -> bool:
        return self._shapes.keys() == self._program.inputs.keys()

    def _check_memory(self, name: str, shape: Shape) -> None:
        world, address = self._world, self._addresses[name]
        nbytes = int(np.prod(shape)) * np.dtype(NUMPY[self._program.types[name]]).itemsize
        world.require(-1 not in shape, f"no output allocator for '{name}', whose size depends on values")
        world.require(address % ALIGNMENT == 0, f"memory for '{name}' that is not aligned to {ALIGNMENT} bytes")
        room = world.pycuda.room(address)
        world.require(room >= nbytes, f"{room} bytes of device memory for the {nbytes} of '{name}'")

    def _refuse(self, call: str, why: str) -> bool:
        self._world.error(_USAGE.format(call, why))
        return False

    @contextmanager
    def _call(self, call: str) -> Iterator[None]:
        """A context is for one thread at a time, and not for its own callbacks."""
        self._world.require_context(call)
        self._world.require(self._alone.acquire(blocking=False), f"{call} while another call is under way")
        try:
            yield
        finally:
            self._alone.release()


class _Ending:
    """What the end of an execution context means, without a reference to it."""

    def __init__(self, world: FakeTensorRt, pending: list[str], scratch: dict[str, Array]) -> None:
        self._world, self._pending, self._scratch = world, pending, scratch

    def __call__(self) -> None:
        if self._pending:
            self._world.mistakes.append("context freed while its stream was not done")
        for memory in self._scratch.values():
            del self._world.pycuda.alive[memory.ctypes.data]


def _read(address: int, shape: Shape, kind: DataType) -> Array:
    values: Array = np.empty(shape, NUMPY[kind])
    ctypes.memmove(values.ctypes.data, address, values.nbytes)
    return values


def _write(address: int, values: Array) -> None:
    contiguous = np.ascontiguousarray(values)
    ctypes.memmove(address, contiguous.ctypes.data, contiguous.nbytes)


def _as_it_is(values: Array) -> Array | None:
    return values
