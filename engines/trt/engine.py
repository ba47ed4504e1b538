"""Infer frames on one engine, preprocessed on the device, and time its layers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, suppress
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.cuda.executor import CudaExecutor
from engines.cuda.gpu import Gpu, HostMemory
from engines.cuda.preprocess import DevicePreprocess
from engines.interface import Array
from engines.preprocessing import ImageTransform
from engines.trace import span
from engines.trt.layers import layers_from_inspector, nodes_by_layer
from engines.trt.release import TensorRtRelease
from engines.trt.session import Session

_WARM_UP = 3  # runs that do not count: clocks rise, kernels are loaded


def layer_times_ms(release: TensorRtRelease, session: Session, batch: Array, runs: int = 20) -> dict[str, float]:
    """Return the median time in ms of every layer, by name, over `runs` inferences of one batch.

    TensorRT waits for every layer meanwhile, so their sum is more than an inference without a profiler takes.
    """
    times: dict[str, list[float]] = {}
    profiler = _profiler(release, times)
    session.drop_graphs()
    session.context.profiler = profiler
    for _ in range(_WARM_UP + runs):
        session.finish(session.start(batch))
    session.context.profiler = None
    return {layer: median(values[_WARM_UP:]) for layer, values in times.items() if len(values) > _WARM_UP}


def _profiler(release: TensorRtRelease, times: dict[str, list[float]]) -> Any:
    base = release.trt.IProfiler

    class Profiler(base):  # type: ignore[misc, valid-type]  # the class is known only when the module is there
        def report_layer_time(self, layer: str, milliseconds: float) -> None:
            times.setdefault(layer, []).append(milliseconds)

    return Profiler()


class TensorRtEngine(Session):
    """ImageEngine: a frame's bytes are uploaded as they are, a quarter of what its float32 input weighs.

    Raises EngineError and DeviceError as Session; DeviceError (`cuda.compiler`) where the kernels cannot be compiled.
    """

    def __init__(self, release: TensorRtRelease, gpu: Gpu, content: bytes) -> None:
        super().__init__(release, gpu, content)
        self._frame_bytes = 0
        self._frames: list[HostMemory] = []
        try:
            with gpu.current():  # here and not at the first frame, which would wait for nvcc
                self._executor = CudaExecutor(gpu)
                self._preprocess: DevicePreprocess | None = DevicePreprocess(self._executor)
            self.warm_up()
        except BaseException:
            self.close()
            raise

    def infer(self, batch: Array) -> dict[str, Array]:
        """Raises EngineError and DeviceError as `start`."""
        return self.finish(self.start(batch))

    def infer_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> dict[str, Array]:
        """Raises as `start_image`."""
        return self.finish(self.start_image(frame, transform))

    def start_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> int:
        """Queue a BGR frame uint8 (H, W, 3), preprocessed on the device; return its ticket for `finish`.

        Raises EngineError and DeviceError as `start`.
        """
        with self._gpu.current():
            image = self.inputs[0]
            self.select(transform.input_shape, np.dtype(transform.dtype))
            slot = self.free_slot()
            assert self._preprocess is not None  # until it is closed, and then `select` has refused
            with span("preprocess"):
                self._make_room(transform)
                memory = self._frames[self._next]
                np.copyto(memory.array(frame.shape, np.uint8), frame)
                memory.upload(frame.nbytes, self.stream)
                self._preprocess.run(transform, memory.address, slot.address(image.name), self.stream)
            return self.enqueue()

    def layer_times_ms(self, batch: Array, runs: int = 20) -> dict[str, float]:
        """Raises EngineError and DeviceError as `start`."""
        return layer_times_ms(self._release, self, batch, runs)

    def layer_nodes(self) -> Mapping[str, tuple[str, ...]]:
        """By the engine inspector. Raises EngineError as `layers_from_inspector`."""
        return nodes_by_layer(layers_from_inspector(self.information()))

    def close(self) -> None:
        """Free everything, idempotent."""
        with ExitStack() as stack:
            stack.callback(super().close)
            if not self._closed:
                stack.enter_context(self._gpu.current())
                stack.callback(self._free_frames)
                self.synchronise()

    def _free_frames(self) -> None:
        self._frames.clear()
        self._preprocess = None
        with suppress(AttributeError):  # if it could not be compiled
            self._executor.close()

    def _make_room(self, transform: ImageTransform) -> None:
        """Make room for the largest frames so far; sizes may alternate, as those of several cameras do."""
        assert self._preprocess is not None  # as in `start_image`
        nbytes = transform.frame_height * transform.frame_width * 3
        if nbytes > self._frame_bytes:
            self.synchronise()  # smaller frames may still be read
            self._frames = [HostMemory(self._gpu, nbytes) for _ in self._slots]
            self._frame_bytes = nbytes
        if not self._preprocess.has_room(transform):
            self.synchronise()
