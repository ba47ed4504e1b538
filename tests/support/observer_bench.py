"""An observer thread over engines that a test controls."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from turned_clock import TurnedClock
from worlds import SPEC
from zoo import residual_net

from agent.camera.capture import Frame
from agent.common.schema import validate
from agent.config import Config
from agent.models.model import Model, open_model
from agent.monitoring.observer import ObserverThread, OpenObserver
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame
from agent.vision.tasks.raw import RawOutputs
from calibrate.errors import TaredError
from engines.errors import DeviceError
from engines.interface import Array, Observation, Observer
from engines.registry import open_backend

FULL = DeviceError("cuda.memory", "cuMemAlloc failed: out of memory", "memory", "free some")
FAULT = DeviceError("cuda.launch", "an illegal memory access", "a launch", "restart")
MANY = 60.0  # seconds that nothing here takes


class Faulty:
    """ONNX Runtime's observer, which raises what its list says, frame by frame; None for a frame that is good."""

    product_bits: int | None = None

    def __init__(self, observer: Observer, faults: list[BaseException | None]) -> None:
        self._observer = observer
        self.faults = faults
        self.inputs, self.outputs, self.taps = observer.inputs, observer.outputs, observer.taps
        self.closed = threading.Event()

    def observe(self, batch: Array) -> Observation:
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return self._observer.observe(batch)

    def infer(self, batch: Array) -> dict[str, Array]:
        return self._observer.infer(batch)

    def close(self) -> None:
        self._observer.close()
        self.closed.set()


class Bench:
    """Observer threads on a small model, their clock, and the errors that they report."""

    def __init__(self, folder: Path) -> None:
        onnx.save(residual_net((1, 3, 8, 8)), folder / "model.onnx")
        self.model: Model = open_model(ModelSpec.model_validate({**SPEC, "path": folder / "model.onnx"}))
        self.changes: list[TaredError | None] = []
        self.clock = TurnedClock()
        self._threads: list[ObserverThread] = []

    def observer(self, *faults: BaseException | None) -> Faulty:
        backend = open_backend("onnxruntime")
        return Faulty(backend.observer(self.model.reference, self.model.placement.taps), list(faults))

    def start(self, open_observer: OpenObserver, clock: TurnedClock | None = None, **given: Any) -> ObserverThread:
        """Start a thread, which is given this besides. clock: another than the bench's, which `feed` does not turn."""
        content = {
            "model": self.model.spec.model_dump(mode="json"),
            "camera": {"source": "clip.avi"},
            "observe": {"held_out": 8, "period_s": 0.1, "budget": None},
        }
        config = validate(Config, content, "test")
        clock = clock or self.clock
        thread = ObserverThread(open_observer, self.model.spec, config, self.changes.append, clock=clock, **given)
        thread.start()
        self._threads.append(thread)
        return thread

    def feed(self, thread: ObserverThread, until: Callable[[], bool]) -> None:
        """Offer frames a second apart until something has come true."""
        image, numbers = np.full((8, 8, 3), 128, np.uint8), itertools.count()

        def has_come_true() -> bool:
            number = next(numbers)
            thread.offer(ServedFrame(Frame(number, float(number), 0, image), "", RawOutputs({}), 0, 0.0))
            return until()

        self.clock.turn_until(has_come_true, step_s=1.0, most_s=100_000.0)

    def end(self) -> None:
        for thread in self._threads:
            thread.stop()
            thread.join(MANY)
            assert not thread.is_alive()
