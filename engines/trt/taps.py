"""See the tensors inside an engine, in two ways: ListeningProbe (debug listener) and OutputProbe (further outputs).

Both count a histogram of every tap on the device, while its values lie there.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np

from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram
from engines.cuda.executor import CudaExecutor
from engines.cuda.gpu import Gpu
from engines.cuda.kernels import DeviceHistograms
from engines.errors import EngineError
from engines.interface import Array, TensorSpec
from engines.trt.release import TensorRtRelease
from engines.trt.session import Session

log = logging.getLogger(__package__)

_POINTER = ctypes.pythonapi.PyCapsule_GetPointer
_POINTER.restype, _POINTER.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)


class TapHistograms:
    """Histograms of tensors wherever they lie on the device, one tensor at a time, of any size."""

    def __init__(self, executor: CudaExecutor) -> None:
        self._executor = executor
        self._known: dict[tuple[str, int], DeviceHistograms] = {}

    def count(self, name: str, address: int, elements: int, stream: Any) -> AbsHistogram:
        """The histogram of float32 values; waits for the stream. The guess of a range is kept per tensor and size."""
        if (name, elements) not in self._known:
            self._known[name, elements] = DeviceHistograms(self._executor, [elements], [np.dtype(np.float32)])
        return self._known[name, elements].collect([address], stream)[0]


class TapListener:
    """Receives every debug tensor of an inference while it lies on the device.

    TensorRT's bindings swallow what a listener raises and report success: the first error is kept, and `raise_error`
    raises it after the inference. stream: the one that the engine is queued on, as PyCUDA's object.
    """

    def __init__(self, release: TensorRtRelease, gpu: Gpu, histograms: TapHistograms, stream: Any) -> None:
        self._nptype = release.trt.nptype
        self._on_device = release.trt.TensorLocation.DEVICE
        self._gpu = gpu
        self._count: Any = histograms.count
        self._stream = stream
        self._copied: Collection[str] = ()
        self._error: BaseException | None = None
        self.histograms: dict[str, AbsHistogram] = {}
        self.values: dict[str, Array] = {}
        self.listener = _listener(release, self._receive)

    def start(self, copied: Collection[str] = ()) -> None:
        """Expect the tensors of one inference; those named in `copied` are copied to the host as well."""
        self._copied, self._error = copied, None
        self.histograms, self.values = {}, {}

    def raise_error(self) -> None:
        """Raise what went wrong while tensors arrived: an interrupt and errors of ours as they are, else EngineError
        (`observer.listener`).
        """
        if isinstance(self._error, TaredError) or not isinstance(self._error, Exception | None):
            raise self._error
        if self._error is not None:
            found = f"{type(self._error).__name__} while the taps were counted: {self._error}"
            raise EngineError("observer.listener", found, "a histogram of every tap", "report it") from self._error

    def close(self) -> None:
        """Let go of what belongs to the GPU, and of the listener, which holds this. The context must be current."""
        self.start()
        self._stream = self._count = self.listener = None

    def _receive(self, capsule: Any, location: Any, dtype: Any, shape: Any, name: str, stream: int) -> None:
        try:
            if location != self._on_device:
                raise TypeError(f"tensor '{name}' at {location}, expected on the device")
            self._count_tensor(_address(capsule), np.dtype(self._nptype(dtype)), tuple(shape), name, stream)
        except BaseException as error:
            log.debug("event=listener", exc_info=error)
            self._error = self._error or error.with_traceback(None)  # whose frames would keep the engine alive

    def _count_tensor(
        self, address: int, dtype: np.dtype[np.generic], shape: tuple[int, ...], name: str, stream: int
    ) -> None:
        if dtype != np.float32:
            raise TypeError(f"tensor '{name}' is {dtype}, expected float32")
        with self._gpu.current():
            if stream != self._stream.handle:  # PyCUDA cannot adopt another's stream, only wait for everything
                self._gpu.driver.Context.synchronize()
            self.histograms[name] = self._count(name, address, prod(shape), self._stream)
            if name in self._copied:
                values: Array = np.empty(shape, dtype)
                self._gpu.driver.memcpy_dtoh_async(values, address, self._stream)
                self._stream.synchronize()
                self.values[name] = values


def _address(capsule: Any) -> int:
    """Where a tensor lies: the bindings hand out a void pointer as a capsule without a name."""
    return capsule if isinstance(capsule, int) else int(_POINTER(capsule, None) or 0)


def _listener(release: TensorRtRelease, receive: Callable[[Any, Any, Any, Any, str, int], None]) -> Any:
    base = release.trt.IDebugListener

    class Listener(base):  # type: ignore[misc, valid-type]  # the class is known only when the module is there
        def process_debug_tensor(
            self, address: Any, location: Any, dtype: Any, shape: Any, name: str, stream: int
        ) -> bool:
            receive(address, location, dtype, shape, name, stream)
            return True

    return Listener()


@dataclass(frozen=True)
class Sight:
    """A probe's view of one image: the model's outputs, a histogram per tap, and the values of the requested taps."""

    outputs: dict[str, Array]
    histograms: dict[str, AbsHistogram]
    values: dict[str, Array]


class Probe(Protocol):
    """One engine with taps. One thread at a time."""

    @property
    def inputs(self) -> Sequence[TensorSpec]: ...

    @property
    def outputs(self) -> Sequence[TensorSpec]: ...

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight: ...

    def infer(self, image: Array) -> dict[str, Array]:
        """The outputs alone."""
        ...

    def close(self) -> None: ...


class _TappedSession(Session):
    """The part that both ways share: the model's own input and outputs may be taps too."""

    def __init__(
        self, release: TensorRtRelease, gpu: Gpu, content: bytes, taps: Sequence[str], hidden: Collection[str] = ()
    ) -> None:
        super().__init__(release, gpu, content, slots=1, hidden=hidden)
        visible = {spec.name for spec in self._tensors}
        self._visible = [tap for tap in taps if tap in visible]
        try:
            with gpu.current():
                self._executor = CudaExecutor(gpu)
        except BaseException:
            super().close()
            raise
        self._histograms = TapHistograms(self._executor)

    def infer(self, image: Array) -> dict[str, Array]:
        """The model's outputs for one image (or one batch, of a model whose batch is fixed)."""
        return self.finish(self.start(image))

    def close(self) -> None:
        """Free everything, idempotent."""
        if not self._closed:
            with self._gpu.current():
                self._executor.close()
        super().close()

    def _count_visible(self, ticket: int) -> dict[str, AbsHistogram]:
        """Histograms of the taps that are inputs or outputs, of a batch that is done and still in its slot."""
        with self._gpu.current():
            return {
                tap: self._histograms.count(tap, self.device_address(ticket, tap), prod(self._shapes[tap]), self.stream)
                for tap in self._visible
            }

    def _copy_visible(self, ticket: int, copied: Collection[str]) -> dict[str, Array]:
        values: dict[str, Array] = {}
        with self._gpu.current(), self._gpu.working("a tap that is copied"):
            for tap in self._visible:
                if tap in copied:
                    values[tap] = np.empty(self._shapes[tap], np.float32)
                    self._gpu.driver.memcpy_dtoh_async(values[tap], self.device_address(ticket, tap), self.stream)
            self.stream.synchronize()
        return values


class ListeningProbe(_TappedSession):
    """Taps marked as debug tensors: they cost nothing while nobody listens, but the fusing of what makes them."""

    def __init__(self, release: TensorRtRelease, gpu: Gpu, content: bytes, taps: Sequence[str]) -> None:
        super().__init__(release, gpu, content, taps)
        self._listener = TapListener(release, gpu, self._histograms, self.stream)
        self._listening: bool | None = None
        with gpu.current():
            set_up = self.context.set_debug_listener(self._listener.listener)
        if not set_up:
            self.close()
            raise EngineError("observer.listener", "a debug listener refused", "one taken", "report the release")

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        """Raises EngineError and DeviceError as `Session.start` and `TapListener.raise_error`."""
        self._listen(True)
        self._listener.start(copied)
        ticket = self.start(image)
        outputs = self.finish(ticket)
        self._listener.raise_error()
        histograms = {**self._listener.histograms, **self._count_visible(ticket)}
        return Sight(outputs, histograms, {**self._listener.values, **self._copy_visible(ticket, copied)})

    def infer(self, image: Array) -> dict[str, Array]:
        self._listen(False)
        return super().infer(image)

    def close(self) -> None:
        """Free everything, idempotent."""
        if not self._closed:
            with self._gpu.current():
                self._listener.close()
        super().close()

    def _listen(self, on: bool) -> None:
        if on != self._listening:
            with self._gpu.current():
                self.context.set_all_tensors_debug_state(on)
            self._listening = on


class OutputProbe(_TappedSession):
    """Taps marked as outputs. Every one of them is written to memory of its own on every inference."""

    def __init__(
        self, release: TensorRtRelease, gpu: Gpu, content: bytes, taps: Sequence[str], added: Collection[str]
    ) -> None:
        """added: the taps that are outputs for their own sake, and not the model's."""
        super().__init__(release, gpu, content, taps, hidden=added)

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        """Raises EngineError and DeviceError as `Session.start`."""
        ticket = self.start(image)
        outputs = self.finish(ticket)
        return Sight(outputs, self._count_visible(ticket), self._copy_visible(ticket, copied))
