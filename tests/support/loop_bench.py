"""A frame loop over engines that answer with their own names; the bench records answers and events of trials."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from brokers import eventually
from numpy.typing import NDArray

from agent.camera.capture import Frame
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.serving.inference import FrameLoop, RoundRobinScheduler
from agent.serving.trial import Trial, TrialEvents
from agent.vision.preprocess import Geometry
from agent.vision.task import Outputs, PendingInference, ServedFrame, Submit, VisionTask
from engines.interface import Array, Engine, TensorSpec

IMAGE = np.zeros((4, 4, 3), np.uint8)
LIMIT_S = 60.0
RECALL = AgentError("probation.recalled", "a test", "none", "none")


class NamedEngine:
    """Answers with its own name, to one thread at a time. `answers` is called first, with the number of the frame.

    A candidate's frame 0 is its rehearsal.
    """

    def __init__(self, name: str, answers: Callable[[int], None] = lambda _: None) -> None:
        self.name = name
        self.closed = threading.Event()
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []
        self._answers = answers
        self._count = 0
        self._in_use = threading.Lock()

    def infer(self, batch: Array) -> dict[str, Array]:
        assert not self.closed.is_set()
        assert self._in_use.acquire(blocking=False), "two threads use the engine"
        try:
            self._answers(self._count)
            self._count += 1
            return {self.name: batch}
        finally:
            self._in_use.release()

    def close(self) -> None:
        assert not self._in_use.locked(), "closed while it is in use"
        self.closed.set()


def breaks_at(number: int, error: Exception | None = None) -> Callable[[int], None]:
    def answers(count: int) -> None:
        if count == number:
            raise error or RuntimeError("the engine broke")

    return answers


class PlainTask(VisionTask):
    """No preprocessing; the prediction is the name of the engine's output."""

    def __init__(self) -> None:
        self.inferred_s = 0.0

    def infer(self, engine: Engine, image: NDArray[np.uint8]) -> Any:
        return next(iter(engine.infer(image))), None

    def start(self, engine: Engine, images: Sequence[NDArray[np.uint8]], submit: Submit) -> PendingInference:
        (image,) = images
        return PendingInference(submit(lambda: engine.infer(image)), image.shape, [cast(Geometry, None)])

    def decode_batch(self, outputs: Outputs, _started: PendingInference) -> list[Any]:
        return list(outputs)


class Bench:
    """A loop and its slot. `served` has its answers, `events` the events of trials."""

    def __init__(self, engine: NamedEngine, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self.turns = RoundRobinScheduler([True], clock)
        (self.slot,) = self.turns.slots
        self.served: list[tuple[int, str, str]] = []
        self.events: list[tuple[str, Any]] = []
        tasks = [PlainTask(), PlainTask()]
        self.loop = FrameLoop(self.turns, engine.name, engine, tasks, [self._keep], clock=clock)
        self._next_id = 0
        self.loop.start()

    def _keep(self, served: ServedFrame) -> None:
        self.served.append((served.frame.id, served.engine_id, str(served.result)))

    def try_out(self, engine: NamedEngine, deadline_s: float = LIMIT_S) -> Trial:
        events = TrialEvents(
            lambda ts, skipped: self.events.append(("live", (ts, skipped))),
            lambda error, ts, was_waiting: self.events.append((error.code, (ts, was_waiting))),
            lambda: self.events.append(("ended", None)),
        )
        trial = Trial(engine.name, engine, PlainTask(), deadline_s, events, clock=self._clock)
        self.loop.start_trial(trial)
        return trial

    def rehearse(self, engine: NamedEngine, deadline_s: float = LIMIT_S) -> Trial:
        """`try_out`, and one frame, which the previous engine answers; the rehearsal is over then."""
        trial = self.try_out(engine, deadline_s)
        self.feed(1)
        eventually(lambda: not trial.is_busy)
        return trial

    def put(self, count: int = 1, skip: int = 0) -> None:
        """Put so many frames into the slot, the first after a gap in their ids."""
        first = self._next_id + skip
        self._next_id = first + count
        for number in range(first, self._next_id):
            self.slot.put(Frame(number, float(number), 0, IMAGE))

    def feed(self, count: int, skip: int = 0) -> list[str]:
        """`put`, and return the name of the engine that answered each."""
        first = len(self.served)
        self.put(count, skip)
        eventually(lambda: len(self.served) == first + count or not self.loop.is_alive())
        assert all(engine_id == result for _, engine_id, result in self.served)
        return [engine_id for _, engine_id, _ in self.served[first:]]

    def end(self) -> None:
        self.slot.close()
        self.loop.join(LIMIT_S)
        assert not self.loop.is_alive()
