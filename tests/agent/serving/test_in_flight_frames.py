"""Two frames on their way: while the engine computes one, the next is made ready and the one before is decoded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from loop_bench import NamedEngine, PlainTask
from numpy.typing import NDArray

from agent.camera.capture import Frame
from agent.serving.inference import FrameLoop, InFlightFrames, RoundRobinScheduler
from agent.vision.task import DeviceInference, PendingInference, ServedFrame, Submit
from engines.interface import Array, Engine, OverlappingEngine
from engines.preprocessing import ImageTransform

LIMIT_S = 20.0


def frame(number: int, camera: str = "camera") -> Frame:
    return Frame(number, float(number), time.monotonic_ns(), np.full((2, 2, 3), number, np.uint8), camera)


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
    """Says when it makes a frame ready."""

    def __init__(self, ready: Callable[[int], None]) -> None:
        super().__init__()
        self._ready = ready

    def start(self, engine: Engine, images: Sequence[NDArray[np.uint8]], submit: Submit) -> PendingInference:
        self._ready(int(images[0][0, 0, 0]))
        return super().start(engine, images, submit)


def serve(engine: Numbering, frames: int, ready: Callable[[int], None] = lambda _: None) -> list[ServedFrame]:
    """What a loop makes of so many frames of a camera that waits."""
    turns, served = RoundRobinScheduler([True]), list[ServedFrame]()
    loop = FrameLoop(turns, "a", engine, [Reporting(ready), Reporting(ready)], [served.append])
    loop.start()
    for number in range(frames):
        turns.slots[0].put(frame(number))
    turns.close()
    loop.join(LIMIT_S)
    assert not loop.is_alive()
    if loop.error is not None:
        raise loop.error
    return served


def test_the_next_frame_is_made_ready_while_the_engine_computes() -> None:
    """Were it not, the engine would wait for it in vain."""
    ready = [threading.Event() for _ in range(11)]
    ready[10].set()
    in_time: list[bool] = []
    engine = Numbering(lambda number: in_time.append(ready[number + 1].wait(LIMIT_S)))
    served = serve(engine, 10, lambda number: ready[number].set())
    assert in_time == [True] * 10
    assert [(each.frame.id, each.result) for each in served] == [(number, str(number)) for number in range(10)]


def test_an_error_ends_it_after_all_answers_before() -> None:
    def fails(number: int) -> None:
        if number == 3:
            raise RuntimeError("the engine broke")

    turns, served = RoundRobinScheduler([True]), list[ServedFrame]()
    loop = FrameLoop(turns, "a", Numbering(fails), [PlainTask(), PlainTask()], [served.append])
    loop.start()
    for number in range(6):
        turns.slots[0].put(frame(number))
    loop.join(LIMIT_S)
    assert str(loop.error) == "the engine broke"
    assert [each.frame.id for each in served] == [0, 1, 2]
    assert turns.is_finished or turns.slots[0].is_full  # no capture thread waits for it


def test_of_a_camera_that_does_not_wait_the_freshest_frame_is_taken() -> None:
    """An engine of 40 ms, a frame every 2 ms: one taken as soon as the other lane is free would be 40 ms old."""
    turns, ages_s, ended = RoundRobinScheduler([False]), list[float](), threading.Event()

    def begins(number: int) -> None:
        ages_s.append(time.monotonic() - times_s[number])
        time.sleep(0.04)

    times_s: dict[int, float] = {}
    loop = FrameLoop(turns, "a", Numbering(begins), [PlainTask(), PlainTask()], [lambda _: None])
    loop.start()
    for number in range(250):
        times_s[number] = time.monotonic()
        turns.slots[0].put(frame(number))
        ended.wait(0.002)
    turns.close()
    loop.join(LIMIT_S)
    assert loop.error is None
    assert len(ages_s) >= 5
    assert np.median(ages_s[2:]) < 0.02


def test_a_frame_under_way_is_answered_though_no_other_comes() -> None:
    turns, answered = RoundRobinScheduler([False]), threading.Event()
    loop = FrameLoop(turns, "a", Numbering(), [PlainTask(), PlainTask()], [lambda _: answered.set()])
    loop.start()
    turns.slots[0].put(frame(0))
    assert answered.wait(LIMIT_S)
    turns.close()
    loop.join(LIMIT_S)


def test_what_an_engine_has_computed_beside_another_frame_is_not_counted_twice() -> None:
    """As one on a GPU does: begun while the one before is computed, it waits for that."""
    times = iter([(0.0, 10.0), (2.0, 13.0)])

    class Computed:
        tells, ended = False, True

        def wait(self, timeout_s: float) -> None: ...

        def result(self) -> tuple[dict[str, Array], float, float]:
            return ({"a": np.zeros(1)}, *next(times))

    class Beside(PlainTask):
        def start(self, _engine: Engine, images: Sequence[NDArray[np.uint8]], _submit: Submit) -> PendingInference:
            return PendingInference(Computed(), images[0].shape, [cast(Any, None)])

    lanes = InFlightFrames([Beside(), Beside()], lambda: None)
    lanes.start()
    for number in (0, 1):
        lanes.submit([frame(number)], "a", NamedEngine("a"))
    assert lanes.is_full
    assert [lanes.collect()[0].inferred_s, lanes.collect()[0].inferred_s] == pytest.approx([10.0, 3.0])
    assert lanes.is_empty
    lanes.close()


class Device(NamedEngine):
    """Computes for 5 ms beside the thread that asks, as a GPU does, and says of a frame whether it is done."""

    def __init__(self) -> None:
        super().__init__("a")
        self._ends_s: dict[int, float] = {}
        self._last_s = 0.0
        self.asked: list[float] = []

    def infer_image(self, frame: NDArray[np.uint8], transform: ImageTransform) -> dict[str, Array]:
        return self.finish(self.start_image(frame, transform))

    def start(self, batch: Array) -> int:
        raise AssertionError(batch.shape)

    def start_image(self, _frame: NDArray[np.uint8], _transform: ImageTransform) -> int:
        ticket = len(self._ends_s)
        self._last_s = max(self._last_s, time.monotonic()) + 0.005
        self._ends_s[ticket] = self._last_s
        return ticket

    def is_done(self, ticket: int) -> bool:
        return time.monotonic() >= self._ends_s[ticket]

    def finish(self, ticket: int) -> dict[str, Array]:
        time.sleep(max(0.0, self._ends_s[ticket] - time.monotonic()))
        return {"a": np.zeros(1)}


class OnDevicePlain(PlainTask):
    def start(self, engine: Engine, images: Sequence[NDArray[np.uint8]], _submit: Submit) -> PendingInference:
        assert isinstance(engine, OverlappingEngine)
        ticket = engine.start_image(images[0], cast(ImageTransform, None))
        return PendingInference(DeviceInference(engine, ticket), images[0].shape, [cast(Any, None)])


def test_what_is_known_of_a_devices_time_follows_the_device() -> None:
    """It is asked for its end: a guess that is only ever compared with itself would grow, and each frame with it."""
    turns, served = RoundRobinScheduler([False]), list[ServedFrame]()
    loop = FrameLoop(turns, "a", Device(), [OnDevicePlain(), OnDevicePlain()], [served.append])
    loop.start()
    pause = threading.Event()
    for number in range(150):
        turns.slots[0].put(frame(number))
        pause.wait(0.02)
    turns.close()
    loop.join(LIMIT_S)
    assert loop.error is None
    took_s = np.array([each.inferred_s for each in served])
    assert np.median(took_s[-50:]) < 0.012
    ages_s = np.array([(each.done_ns - each.frame.captured_ns) / 1e9 for each in served])
    assert np.median(ages_s[-50:]) < 0.03
