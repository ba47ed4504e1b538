"""The fake's execution contexts, on fake_pycuda's memory and streams."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from fake_allocations import ALIGNMENT
from fake_streams import Queue
from fake_tensorrt_config import Shape
from fake_tensorrt_inference import Inference
from fake_tensorrt_types import NUMPY, Dims, IDebugListener, IProfiler

from engines.cuda.kernels import Array

if TYPE_CHECKING:
    from fake_tensorrt import FakeTensorRt
    from fake_tensorrt_engine import ICudaEngine

_USAGE = "IExecutionContext::{}: Error Code 3: API Usage Error (Parameter check failed, {})"


class IExecutionContext:
    """Keeps its engine alive. Enqueued work happens when its stream comes to it, so not before a wait."""

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
        self._pending: dict[int, tuple[Queue, int]] = {}
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
        with self._one_at_a_time("set_debug_listener"):
            if not isinstance(listener, IDebugListener):
                raise TypeError(f"set_debug_listener(): incompatible function arguments: {listener!r}")
            self._listener = listener
            return True

    def set_all_tensors_debug_state(self, flag: bool) -> bool:
        with self._one_at_a_time("set_all_tensors_debug_state"):
            self._listens = flag
            return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        """Callbacks run inside; whatever keeps their frames alive keeps no reference to this, for TensorRT has none."""
        alone, world = self._alone, self._world
        world.require_context("execute_async_v3")
        world.require(alone.acquire(blocking=False), "execute_async_v3 while another call is under way")
        try:
            inference = self._prepare(stream_handle)
            del self
            if inference is not None:
                inference.enqueue()
            return inference is not None
        finally:
            alone.release()

    def _prepare(self, handle: int) -> Inference | None:
        """Return the work; None where TensorRT refuses it."""
        if self._world.fails("execute"):
            return None
        if not self._is_settled():
            self._refuse("enqueueV3", "condition: allInputDimensionsSpecified.")
            return None
        shapes = {**self._shapes, **self._program.shapes(self._shapes)}
        for name in self._engine.names:
            if not self._addresses.get(name):
                self._refuse("enqueueV3", f"condition: an address is set for tensor {name}.")
                return None
            self._check_memory(name, shapes[name])
        layers = [row.name for row in self._engine.rows()] if self._profiler is not None else []
        listener = self._listener if self._listens else None
        return self._world.inference(
            *(self._world, self._program, handle, shapes, dict(self._addresses), self._pending, self._scratch),
            *(listener, self._profiler, layers),
        )

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
        """Check a call that may reach the device; calls that only note something on the host need no CUDA context."""
        self._world.require_context(call)
        with self._one_at_a_time(call):
            yield

    @contextmanager
    def _one_at_a_time(self, call: str) -> Iterator[None]:
        """A context is for one thread at a time, and not for its own callbacks."""
        self._world.require(self._alone.acquire(blocking=False), f"{call} while another call is under way")
        try:
            yield
        finally:
            self._alone.release()


class _Ending:
    """End an execution context, without a reference to it."""

    def __init__(self, world: FakeTensorRt, pending: dict[int, tuple[Queue, int]], scratch: dict[str, Array]) -> None:
        self._world, self._pending, self._scratch = world, pending, scratch

    def __call__(self) -> None:
        if not all(queue.is_done(mark) for queue, mark in self._pending.values()):
            self._world.mistakes.append("context freed while its stream was not done")
        for memory in self._scratch.values():
            del self._world.pycuda.alive[memory.ctypes.data]
