"""A frame loop over engines that answer with their own names, and what it served and told."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent.camera.capture import Frame
from agent.common.errors import AgentError
from agent.serving.inference import FrameLoop, RoundRobinScheduler
from agent.serving.trial import Trial, TrialEvents
from agent.vision.preprocess import Geometry
from agent.vision.task import Outputs, PendingInference, ServedFrame, Submit, VisionTask
from engines.interface import Array, Engine, TensorSpec

IMAGE = np.zeros((4, 4, 3), np.uint8)
LIMIT_S = 20.0
RECALL = AgentError("probation.recalled", "a test", "none", "none")


class NamedEngine:
    """Answers with its own name; `answers` may do something else first, for its nth frame: of one on trial, 0 is its
    rehearsal."""

    def __init__(self, name: str, answers: Callable[[int], None] = lambda _: None) -> None:
        self.name = name
        self.closed = threading.Event()
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []
        self._answers = answers
        self._count = 0

    def infer(self, batch: Array) -> dict[str, Array]:
        assert not self.closed.is_set()
        self._answers(self._count)
        self._count += 1
        return {self.name: batch}

    def close(self) -> None:
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
    """A loop, its slot, what it served, and what trials told."""

    def __init__(self, engine: NamedEngine) -> None:
        self.turns = RoundRobinScheduler([True])
        (self.slot,) = self.turns.slots
        self.served: list[tuple[int, str, str]] = []
        self.told: list[tuple[str, Any]] = []
        self.loop = FrameLoop(self.turns, engine.name, engine, [PlainTask(), PlainTask()], [self._keep])
        self._next_id = 0
        self.loop.start()

    def _keep(self, served: ServedFrame) -> None:
        self.served.append((served.frame.id, served.engine_id, str(served.result)))

    def try_out(self, engine: NamedEngine, deadline_s: float = LIMIT_S) -> Trial:
        events = TrialEvents(
            lambda ts, skipped: self.told.append(("live", (ts, skipped))),
            lambda error, ts, asked: self.told.append((error.code, (ts, asked))),
            lambda: self.told.append(("ended", None)),
        )
        trial = Trial(engine.name, engine, PlainTask(), deadline_s, events)
        self.loop.start_trial(trial)
        return trial

    def rehearse(self, engine: NamedEngine, deadline_s: float = LIMIT_S) -> Trial:
        """`try_out`, and one frame, which the previous engine answers; the rehearsal is over then."""
        trial = self.try_out(engine, deadline_s)
        self.feed(1)
        until(lambda: not trial.is_busy)
        return trial

    def feed(self, count: int, skip: int = 0) -> list[str]:
        """So many frames, the first after a gap in their ids: who answered each."""
        self._next_id += skip
        first = len(self.served)
        for number in range(self._next_id, self._next_id + count):
            self.slot.put(Frame(number, float(number), 0, IMAGE))
        self._next_id += count
        until(lambda: len(self.served) == first + count or not self.loop.is_alive())
        assert all(engine_id == result for _, engine_id, result in self.served)
        return [engine_id for _, engine_id, _ in self.served[first:]]

    def end(self) -> None:
        self.slot.close()
        self.loop.join(LIMIT_S)
        assert not self.loop.is_alive()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.001)
