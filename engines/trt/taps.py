"""Two ways to see the taps of a reference engine: its debug listener, or further outputs that stay on the device."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import numpy as np

from calibrate.histogram import AbsHistogram
from engines.backend import Array, EngineError, TensorSpec
from engines.cuda import Gpu
from engines.cuda_executor import CudaExecutor
from engines.trt.dialect import Dialect
from engines.trt.listener import TapHistograms, TapListener
from engines.trt.session import Session


@dataclass(frozen=True)
class Sight:
    """What a probe saw of one image: the model's outputs, a histogram per tap, and the values of the taps asked for."""

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
    """What both ways share: the model's own input and outputs may be taps too."""

    def __init__(
        self, dialect: Dialect, gpu: Gpu, content: bytes, taps: Sequence[str], hidden: Collection[str] = ()
    ) -> None:
        super().__init__(dialect, gpu, content, slots=1, hidden=hidden)
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

    def __init__(self, dialect: Dialect, gpu: Gpu, content: bytes, taps: Sequence[str]) -> None:
        super().__init__(dialect, gpu, content, taps)
        self._listener = TapListener(dialect, gpu, self._histograms, self.stream)
        self._listening: bool | None = None
        with gpu.current():
            set_up = self.context.set_debug_listener(self._listener.listener)
        if not set_up:
            self.close()
            raise EngineError("observer.listener", "a debug listener refused", "one taken", "report the release")

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        """Raises EngineError and DeviceError as `Session.start` and `TapListener.raise_error`."""
        self._listen(True)
        self._listener.begin(copied)
        ticket = self.start(image)
        outputs = self.finish(ticket)
        self._listener.raise_error()
        histograms = {**self._listener.found, **self._count_visible(ticket)}
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

    def __init__(self, dialect: Dialect, gpu: Gpu, content: bytes, taps: Sequence[str], added: Collection[str]) -> None:
        """added: the taps that are outputs for their own sake, and not the model's."""
        super().__init__(dialect, gpu, content, taps, hidden=added)

    def see(self, image: Array, copied: Collection[str] = ()) -> Sight:
        """Raises EngineError and DeviceError as `Session.start`."""
        ticket = self.start(image)
        outputs = self.finish(ticket)
        return Sight(outputs, self._count_visible(ticket), self._copy_visible(ticket, copied))
