"""The frame path alone: engines exchanged between frames, and an end that loses nothing."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from agent.capture import Frame, FrameSlot
from agent.findings import Served
from agent.loop import FrameLoop
from agent.vision import VisionTask
from engines.backend import Array, Engine, TensorSpec

IMAGE = np.zeros((4, 4, 3), np.uint8)


class NamedEngine:
    """Answers with its own name."""

    def __init__(self, name: str, fails: bool = False) -> None:
        self.name = name
        self.fails = fails
        self.closed = False
        self.inputs: list[TensorSpec] = []
        self.outputs: list[TensorSpec] = []

    def infer(self, batch: Array) -> dict[str, Array]:
        assert not self.closed
        if self.fails:
            raise RuntimeError("the engine broke")
        return {self.name: batch}

    def close(self) -> None:
        self.closed = True


class PlainTask(VisionTask):
    """No preprocessing; the prediction is the name of the engine's output."""

    def __init__(self) -> None:
        self.inferred_s = 0.0

    def infer(self, engine: Engine, image: NDArray[np.uint8]) -> Any:
        return next(iter(engine.infer(image))), None


class Bench:
    """A loop, its slot, and what it served."""

    def __init__(self, engine: NamedEngine) -> None:
        self.slot = FrameSlot(keep_every=True)
        self.served: list[tuple[int, str, str]] = []
        self.loop = FrameLoop(self.slot, engine.name, engine, PlainTask(), [self._keep])
        self.loop.start()

    def _keep(self, served: Served) -> None:
        self.served.append((served.frame.id, served.engine_id, str(served.result)))

    def feed(self, *numbers: int) -> None:
        for number in numbers:
            self.slot.put(Frame(number, float(number), 0, IMAGE))

    def end(self) -> None:
        self.slot.close()
        self.loop.join(5.0)
        assert not self.loop.is_alive()


def test_the_new_engine_serves_from_the_next_frame_and_the_old_one_is_closed() -> None:
    old, new = NamedEngine("old"), NamedEngine("new")
    bench, live = Bench(old), list[float | None]()
    bench.feed(0, 1)
    while len(bench.served) < 2:
        threading.Event().wait(0.001)
    bench.loop.swap("new", new, live.append)
    bench.feed(2, 3)
    bench.end()
    assert bench.served == [(0, "old", "old"), (1, "old", "old"), (2, "new", "new"), (3, "new", "new")]
    assert live == [2.0]
    assert old.closed
    assert new.closed


def test_a_swap_that_no_frame_follows_is_told_of_at_the_end() -> None:
    old, new, late = NamedEngine("old"), NamedEngine("new"), NamedEngine("late")
    bench, live = Bench(old), list[float | None]()
    bench.loop.swap("new", new, live.append)
    bench.end()
    bench.loop.swap("late", late, live.append)
    assert live == [None, None]
    assert old.closed
    assert new.closed
    assert late.closed


def test_only_one_swap_waits_at_a_time() -> None:
    bench = Bench(NamedEngine("old"))
    bench.loop.swap("new", NamedEngine("new"), lambda _: None)
    with pytest.raises(RuntimeError, match="another one waits"):
        bench.loop.swap("newer", NamedEngine("newer"), lambda _: None)
    bench.end()


def test_what_breaks_the_loop_is_kept_and_the_source_does_not_wait_for_it() -> None:
    bench = Bench(NamedEngine("old", fails=True))
    bench.feed(0, 1, 2)
    bench.loop.join(5.0)
    assert isinstance(bench.loop.error, RuntimeError)
