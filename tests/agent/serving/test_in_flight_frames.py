"""Two frames on their way: while the engine computes one, the next is made ready and the one before is decoded."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from loop_bench import LIMIT_S, NamedEngine, PlainTask
from numpy.typing import NDArray
from turned_clock import TurnedClock

from agent.camera.capture import Frame
from agent.common.clock import SYSTEM_CLOCK
from agent.serving.inference import FrameLoop, InferenceThread, RoundRobinScheduler
from agent.vision.task import POLL_S, DeviceInference, PendingInference, ServedFrame, Submit
from engines.interface import Array, Engine, OverlappingEngine
from engines.preprocessing import ImageTransform


def frame(number: int) -> Frame:
    return Frame(number, float(number), 0, np.full((2, 2, 3), number, np.uint8))


class Numbering(NamedEngine):
    """Answers a frame with its number, after `before` has been called with it."""

    def __init__(self, before: Callable[[int], None] = lambda _: None) -> None:
        super().__init__("a")
        self._before = before

    def infer(self, batch: Array) -> dict[str, Array]:
        number = int(batch[0, 0, 0])
        self._before(number)
        return {str(number): batch}


class Reporting(PlainTask):
    """Reports when it makes a frame ready."""

    def __init__(self, ready: Callable[[int], None]) -> None:
        super().__init__()
        self._ready = ready

    def start(self, engine: Engine, images: Sequence[NDArray[np.uint8]], submit: Submit) -> PendingInference:
        self._ready(int(images[0][0, 0, 0]))
        return super().start(engine, images, submit)


def test_the_next_frame_is_made_ready_while_the_engine_computes() -> None:
    """Were it not, the engine would wait for it in vain."""
    ready = [threading.Event() for _ in range(11)]
    ready[10].set()
    turns, served, in_time = RoundRobinScheduler([True]), list[ServedFrame](), list[bool]()
    engine = Numbering(lambda number: in_time.append(ready[number + 1].wait(LIMIT_S)))
    tasks = [Reporting(lambda number: ready[number].set()) for _ in range(2)]
    loop = FrameLoop(turns, "a", engine, tasks, [served.append])
    loop.start()
    for number in range(10):
        turns.slots[0].put(frame(number))
    turns.close()
    loop.join(LIMIT_S)
    assert loop.error is None
    assert in_time == [True] * 10
    assert [(each.frame.id, str(each.result)) for each in served] == [(number, str(number)) for number in range(10)]


def test_an_error_ends_it_after_all_answers_before() -> None:
    def fails(number: int) -> None:
        if number == 3:
            raise RuntimeError("the engine broke")

    turns, served = RoundRobinScheduler([True]), list[ServedFrame]()
    loop = FrameLoop(turns, "a", Numbering(fails), [PlainTask(), PlainTask()], [served.append])
    loop.start()
    for number in range(5):
        turns.slots[0].put(frame(number))
    loop.join(LIMIT_S)
    assert str(loop.error) == "the engine broke"
    assert [each.frame.id for each in served] == [0, 1, 2]
    turns.slots[0].pop()
    assert turns.is_finished, "else a capture thread would wait for a loop that has ended"


def test_an_inference_in_a_thread_can_be_waited_for_with_a_limit() -> None:
    released, thread = threading.Event(), InferenceThread(lambda: None, SYSTEM_CLOCK)
    inference = thread.submit(lambda: {"released": np.array(released.wait(LIMIT_S))})
    thread.start()
    inference.wait(0.001)
    assert not inference.is_done
    released.set()
    inference.wait(LIMIT_S)
    assert inference.is_done
    thread.stop()


class CameraClock(TurnedClock):
    """Time passes wherever the loop waits; meanwhile a camera puts a frame into its slot each `period_s`."""

    def __init__(self, period_s: float, frames: int) -> None:
        super().__init__()
        self.turns = RoundRobinScheduler([False], self)
        self.put_s: list[float] = []  # when each frame came
        self._frames, self._period_s, self._due_s = frames, period_s, self.monotonic_s()

    def sleep(self, seconds: float) -> None:
        ends_s = self.monotonic_s() + seconds
        while self._due_s <= ends_s:
            self._next_frame()
        self.turn(max(0.0, ends_s - self.monotonic_s()))

    def wait_for(
        self, _condition: threading.Condition, predicate: Callable[[], bool], timeout_s: float | None = None
    ) -> bool:
        while timeout_s is None and not predicate():
            self._next_frame()
        if not predicate():
            self.sleep(timeout_s or 0.0)
        return predicate()

    def _next_frame(self) -> None:
        self.turn(max(0.0, self._due_s - self.monotonic_s()))
        if len(self.put_s) == self._frames:
            self.turns.close()
            self._due_s = math.inf
            return
        self._due_s += self._period_s
        self.put_s.append(self.monotonic_s())
        image = np.full((2, 2, 3), 0, np.uint8)
        self.turns.slots[0].put(Frame(len(self.put_s) - 1, 0.0, self.monotonic_ns(), image))


class Device(NamedEngine):
    """Computes each frame for a while beside the caller, as a GPU does, one after the other."""

    def __init__(self, clock: CameraClock, computes_s: float) -> None:
        super().__init__("a")
        self._clock, self._computes_s = clock, computes_s
        self.begun_s: list[float] = []  # when the device began each frame

    def start(self, batch: Array) -> int:
        raise AssertionError(batch.shape)

    def start_image(self, _frame: NDArray[np.uint8], _transform: ImageTransform) -> int:
        free_s = self.begun_s[-1] + self._computes_s if self.begun_s else 0.0
        self.begun_s.append(max(free_s, self._clock.monotonic_s()))
        return len(self.begun_s) - 1

    def is_done(self, ticket: int) -> bool:
        return self._clock.monotonic_s() >= self.begun_s[ticket] + self._computes_s

    def finish(self, ticket: int) -> dict[str, Array]:
        self._clock.sleep(max(0.0, self.begun_s[ticket] + self._computes_s - self._clock.monotonic_s()))
        return {"a": np.zeros(1)}


PREPARES_S = 0.003


class OnDevice(PlainTask):
    """Takes some milliseconds to make a frame ready."""

    def __init__(self, clock: CameraClock) -> None:
        super().__init__()
        self._its_clock = clock

    def start(self, engine: Engine, images: Sequence[NDArray[np.uint8]], _submit: Submit) -> PendingInference:
        assert isinstance(engine, OverlappingEngine)
        self._its_clock.sleep(PREPARES_S)
        ticket = engine.start_image(images[0], cast(ImageTransform, None))
        return PendingInference(DeviceInference(engine, ticket, self._its_clock), images[0].shape, [cast(Any, None)])


@pytest.mark.parametrize(
    ("computes_s", "period_s", "frames"), [(0.04, 0.002, 1000), (0.005, 0.02, 100)], ids=["busy", "idle"]
)
def test_an_engine_begins_with_the_freshest_frame_and_never_waits_for_one(
    computes_s: float, period_s: float, frames: int
) -> None:
    """A frame taken as soon as a buffer is free would be as old as the inference under way."""
    clock = CameraClock(period_s, frames)
    device, served = Device(clock, computes_s), list[ServedFrame]()
    loop = FrameLoop(clock.turns, "a", device, [OnDevice(clock), OnDevice(clock)], [served.append], clock=clock)
    loop.start()
    loop.join(LIMIT_S)
    assert loop.error is None
    settled = served[3:-3]  # the first frames show how long a frame takes; no camera is fresh at its end
    assert len(settled) > 15
    begun_s = dict(zip((each.frame.id for each in served), device.begun_s, strict=True))
    ages_s = [begun_s[each.frame.id] - clock.put_s[each.frame.id] for each in settled]
    assert max(ages_s) < min(period_s, 0.002) + 2.0 * PREPARES_S + 0.002
    assert [each.inferred_s for each in settled] == pytest.approx([computes_s] * len(settled), abs=POLL_S + 1e-6)
    answered_s = [each.done_ns / 1e9 - begun_s[each.frame.id] for each in settled]
    assert max(answered_s) < computes_s + PREPARES_S + POLL_S + 1e-6
    if period_s < computes_s:
        assert np.diff([begun_s[each.frame.id] for each in settled]) == pytest.approx(computes_s)
