"""The taps of an engine seen by its debug listener: counted on the device while they lie there."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Collection
from math import prod
from typing import Any

import numpy as np

from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram
from engines.backend import Array, EngineError
from engines.cuda import Gpu
from engines.cuda_executor import CudaExecutor
from engines.kernels import DeviceHistograms
from engines.trt.dialect import Dialect

log = logging.getLogger(__name__)

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

    def __init__(self, dialect: Dialect, gpu: Gpu, histograms: TapHistograms, stream: Any) -> None:
        self._nptype = dialect.trt.nptype
        self._on_device = dialect.trt.TensorLocation.DEVICE
        self._gpu = gpu
        self._count: Any = histograms.count
        self._stream = stream
        self._copied: Collection[str] = ()
        self._error: BaseException | None = None
        self.found: dict[str, AbsHistogram] = {}
        self.values: dict[str, Array] = {}
        self.listener = _listener(dialect, self._receive)

    def begin(self, copied: Collection[str] = ()) -> None:
        """Expect the tensors of one inference; those named in `copied` are copied to the host as well."""
        self._copied, self._error = copied, None
        self.found, self.values = {}, {}

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
        self.begin()
        self._stream = self._count = self.listener = None

    def _receive(self, capsule: Any, location: Any, dtype: Any, shape: Any, name: str, stream: int) -> None:
        try:
            if location != self._on_device:
                raise TypeError(f"tensor '{name}' at {location}, expected on the device")
            self._take(_address(capsule), np.dtype(self._nptype(dtype)), tuple(shape), name, stream)
        except BaseException as error:
            log.debug("event=listener", exc_info=error)
            self._error = self._error or error.with_traceback(None)  # whose frames would keep the engine alive

    def _take(self, address: int, dtype: np.dtype[np.generic], shape: tuple[int, ...], name: str, stream: int) -> None:
        if dtype != np.float32:
            raise TypeError(f"tensor '{name}' is {dtype}, expected float32")
        with self._gpu.current():
            if stream != self._stream.handle:  # PyCUDA cannot adopt another's stream, only wait for everything
                self._gpu.driver.Context.synchronize()
            self.found[name] = self._count(name, address, prod(shape), self._stream)
            if name in self._copied:
                values: Array = np.empty(shape, dtype)
                self._gpu.driver.memcpy_dtoh_async(values, address, self._stream)
                self._stream.synchronize()
                self.values[name] = values


def _address(capsule: Any) -> int:
    """Where a tensor lies: the bindings hand out a void pointer as a capsule without a name."""
    return capsule if isinstance(capsule, int) else int(_POINTER(capsule, None) or 0)


def _listener(dialect: Dialect, receive: Callable[[Any, Any, Any, Any, str, int], None]) -> Any:
    base = dialect.trt.IDebugListener

    class Listener(base):  # type: ignore[misc, valid-type]  # the class is known only when the module is there
        def process_debug_tensor(
            self, address: Any, location: Any, dtype: Any, shape: Any, name: str, stream: int
        ) -> bool:
            receive(address, location, dtype, shape, name, stream)
            return True

    return Listener()
