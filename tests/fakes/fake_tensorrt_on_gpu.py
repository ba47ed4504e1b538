"""The fake TensorRT on a true GPU, for machines whose GPU no TensorRT here supports, or that have none installed.

Memory, streams, events, kernels and captured graphs are CUDA's own; only an engine's numbers come from ONNX Runtime. An
inference is three kinds of work on its stream:

1. Copies of the inputs to the host.
2. A host function that runs the graph.
3. Copies of the results to the device.

CUDA comes to them in their order, also when it launches a captured graph. So a real device catches code that reads too
early, frees too early, or writes over a batch under way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from fake_allocations import UNWRITTEN
from fake_tensorrt import FakeTensorRt
from fake_tensorrt_inference import Inference, capsule_of
from fake_tensorrt_plan import Program
from fake_tensorrt_types import NUMPY, Dims, TensorLocation

from engines.cuda.gpu import DRIVER
from engines.cuda.kernels import Array

_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@dataclass
class _Room:
    """For the batches of one slot, of which one is under way: host memory by tensor, debug tensors' device memory."""

    host: dict[str, Array]
    debug: dict[str, Any]
    compute: Any  # the host function, which CUDA may call as long as a graph has it


class TrueGpu:
    """The driver, called as FakePycuda is. Its context must be current when this is made and closed.

    Freeing memory waits for the GPU while it holds Python's lock, which the host functions need. Nothing may be under
    way when rooms are given back.
    """

    def __init__(self) -> None:
        from pycuda import driver

        self.driver = driver
        self.device = driver.Device(0)
        self.mistakes: list[str] = []
        self._cuda = ctypes.CDLL(DRIVER)
        self._rooms: dict[object, _Room] = {}

    @property
    def depth(self) -> int:
        """Of contexts that are current on this thread: 0 or 1."""
        current = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(current))
        return int(bool(current.value))

    def queue(self, handle: int) -> None:
        """Any stream will do: CUDA itself refuses what is none."""

    def room(self, address: int) -> int:
        """Bytes from an address to the end of the memory that was allocated there."""
        begin, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(begin), ctypes.byref(nbytes), ctypes.c_uint64(address))
        return begin.value + nbytes.value - address

    def room_for(self, key: object, program: Program, shapes: Mapping[str, tuple[int, ...]], debug: list[str]) -> _Room:
        if key not in self._rooms:
            names = dict.fromkeys((*program.inputs, *program.outputs, *debug))
            host = {name: self.driver.pagelocked_empty(shapes[name], NUMPY[program.types[name]]) for name in names}
            shown = {name: self.driver.mem_alloc(max(host[name].nbytes, 1)) for name in debug}
            self._rooms[key] = _Room(host, shown, _HostFunction(partial(self._compute, program, host)))
        return self._rooms[key]

    def upload(self, address: int, source: Array, handle: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", *_pointers(address, source.ctypes.data, source.nbytes, handle))

    def download(self, target: Array, address: int, handle: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", *_pointers(target.ctypes.data, address, target.nbytes, handle))

    def spoil(self, address: int, nbytes: int, handle: int) -> None:
        self._call("cuMemsetD8Async", ctypes.c_uint64(address), UNWRITTEN, *_pointers(nbytes, handle))

    def call(self, function: Any, handle: int) -> None:
        self._call("cuLaunchHostFunc", ctypes.c_void_p(handle), function, None)

    def wait(self, handle: int) -> None:
        self._call("cuStreamSynchronize", ctypes.c_void_p(handle))

    def close(self) -> None:
        self._rooms.clear()

    def _compute(self, program: Program, host: Mapping[str, Array], _: int | None) -> None:
        try:
            results = program.run({name: host[name] for name in program.inputs})
            for name in host.keys() - program.inputs.keys():
                host[name][...] = results[name]
        except BaseException as error:  # CUDA calls this, and has nowhere to raise it
            self.mistakes.append(f"an inference raised {error!r}")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._cuda, name)(*arguments)
        assert status == 0, f"{name}: error {status}"


class InferenceOnGpu(Inference):
    """Queued on a true stream; what it computes is there when CUDA has come to it."""

    def enqueue(self) -> None:
        gpu: Any = self.world.pycuda
        debug = self.program.debug if self.listener is not None else []
        key = (id(self.program), *self.addresses.values(), *self.shapes.values(), *debug)
        room = gpu.room_for(key, self.program, self.shapes, debug)
        for name in self.program.inputs:
            gpu.download(room.host[name], self.addresses[name], self.handle)
        gpu.call(room.compute, self.handle)
        for name in debug:
            self._show_on_gpu(name, room)
        for name in self.program.outputs:
            gpu.upload(self.addresses[name], room.host[name], self.handle)
        if self.profiler is not None:
            gpu.wait(self.handle)
            for index, layer in enumerate(self.layers):
                self.profiler.report_layer_time(layer, 0.01 * (index + 1))

    def _show_on_gpu(self, name: str, room: _Room) -> None:
        """Hand out a debug tensor, whose memory holds it from the copy before the call to the one behind it."""
        gpu: Any = self.world.pycuda
        address, value = int(room.debug[name]), room.host[name]
        gpu.upload(address, value, self.handle)
        kind, shape = self.program.types[name], Dims(value.shape)
        assert self.listener is not None
        arguments = capsule_of(address), TensorLocation.DEVICE, kind, shape, name, self.handle
        with suppress(BaseException):  # swallowed, and success reported, as by the bindings
            self.listener.process_debug_tensor(*arguments)
        gpu.spoil(address, max(value.nbytes, 1), self.handle)


@contextmanager
def installed_on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorRt]:
    """A fake TensorRT beside the true PyCUDA, while a context of the GPU is current."""
    gpu = TrueGpu()
    context = gpu.device.retain_primary_context()
    context.push()
    try:
        fake = FakeTensorRt(gpu, inference=InferenceOnGpu)  # type: ignore[arg-type]  # it stands in for FakePycuda
        fake.install(monkeypatch)
        yield fake
        gpu.close()
    finally:
        context.pop()
        context.detach()


def _pointers(*values: int) -> Iterator[ctypes.c_uint64]:
    """Addresses, handles and sizes as the driver takes them: in 64 bits, where ctypes would pass 32."""
    return map(ctypes.c_uint64, values)
