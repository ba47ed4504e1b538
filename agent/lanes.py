"""Frames on their way through an engine: while it computes one, the one before is decoded and the next made ready."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from agent.capture import Frame
from agent.findings import Served
from agent.vision import POLL_S, Begun, Outputs, VisionTask
from engines.backend import Engine

_SLOWER, _FASTER = 0.1, 0.5  # weight of the newest frame in what a usual one takes, where it is slower and faster
_MARGIN_S = 1e-3  # a frame is taken so much sooner than it has to be, and in twice the time that it takes to make ready
_STOP_S = 10.0  # an engine that hangs in its runtime's code ends with the process


class InferenceThread(threading.Thread):
    """Runs inferences that block, one after the other; `on_end` is called in this thread after each."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        super().__init__(name="engine", daemon=True)
        self._on_end = on_end
        self._work: queue.SimpleQueue[InThread | None] = queue.SimpleQueue()

    def submit(self, run: Callable[[], Outputs]) -> InThread:
        """Run this after what was submitted before."""
        inference = InThread(run)
        self._work.put(inference)
        return inference

    def run(self) -> None:
        while (inference := self._work.get()) is not None:
            inference.run()
            self._on_end()

    def stop(self) -> None:
        """End after what was submitted."""
        self._work.put(None)
        self.join(_STOP_S)


class InThread:
    """An inference in another thread."""

    tells = True

    def __init__(self, run: Callable[[], Outputs]) -> None:
        self._run = run
        self._under_way = threading.Lock()  # cheaper than an Event, of which each frame would have its own
        self._under_way.acquire()
        self.ended = False
        self._outputs: Outputs = {}
        self._error: BaseException | None = None
        self._began_s = self._ended_s = 0.0

    def run(self) -> None:
        """What it raises, the one who waits for it hears."""
        self._began_s = time.monotonic()
        try:
            self._outputs = self._run()
        except BaseException as error:
            self._error = error
        self._ended_s = time.monotonic()
        self.ended = True
        self._under_way.release()

    def wait(self, timeout_s: float) -> None:
        if self._under_way.acquire(timeout=timeout_s):
            self._under_way.release()

    def result(self) -> tuple[Outputs, float, float]:
        with self._under_way:
            pass
        if self._error is not None:
            raise self._error
        return self._outputs, self._began_s, self._ended_s


class _UnderWay(NamedTuple):
    frames: Sequence[Frame]
    engine_id: str
    task: VisionTask
    begun: Begun


class Lanes:
    """Two frames at most, or two batches of them, answered in the order in which they came.

    One thread uses it, the frame path's.
    """

    def __init__(self, tasks: Sequence[VisionTask], on_end: Callable[[], None]) -> None:
        """tasks: one for each frame under way, for its buffers. on_end: called in another thread when an engine is done
        with a frame, where it has no way of its own to compute beside this one."""
        self._free = deque(tasks)
        self._under_way: deque[_UnderWay] = deque()
        self._thread = InferenceThread(on_end)
        self._making_s = self._inferring_s = 0.0  # that a usual frame takes
        self._ended_s = 0.0  # monotonic, the last one

    def start(self) -> None:
        """Frames may begin."""
        self._thread.start()

    @property
    def empty(self) -> bool:
        return not self._under_way

    @property
    def full(self) -> bool:
        return not self._free

    @property
    def ended(self) -> bool:
        """Whether the engine is known to be done with the first frame under way."""
        return self._under_way[0].begun.inference.ended

    @property
    def patience_s(self) -> float | None:
        """How long to wait before `ended` is asked again; None where `on_end` tells."""
        return None if self._under_way[0].begun.inference.tells else POLL_S

    @property
    def _remaining_s(self) -> float:
        """How long the engine will need for the first frame under way, going by the frames before."""
        began_s = max(self._under_way[0].begun.began_s, self._ended_s)
        return max(0.0, began_s + self._inferring_s - time.monotonic())

    def wait_for_freshest(self) -> None:
        """Until it is time to take the next frame, for it to be ready when the engine is; one taken now would age."""
        spare_s = self._remaining_s - 2.0 * self._making_s - _MARGIN_S
        if spare_s > 0.0:
            self._under_way[0].begun.inference.wait(spare_s)

    def begin(self, frames: Sequence[Frame], engine_id: str, engine: Engine) -> None:
        """Make a frame ready, or several for one inference, and have the engine compute it after the one under way."""
        started_s = time.monotonic()
        task = self._free.popleft()
        begun = task.begin(engine, [frame.image for frame in frames], self._thread.submit)
        self._under_way.append(_UnderWay(frames, engine_id, task, begun))
        self._making_s = _usual(self._making_s, time.monotonic() - started_s)

    def end(self) -> list[Served]:
        """The answers of the first inference under way. Waits for the engine, and raises what that raises."""
        first = self._under_way.popleft()
        try:
            outputs, began_s, ended_s = first.begun.inference.result()
            inferred_s = ended_s - max(began_s, self._ended_s)
            self._ended_s = ended_s
            self._inferring_s = _usual(self._inferring_s, inferred_s)
            results = first.task.decoded(outputs, first.begun)
        finally:
            self._free.append(first.task)
        done_ns, each_s = time.monotonic_ns(), inferred_s / len(first.frames)
        rows = zip(first.frames, results, first.begun.geometries, strict=True)
        return [
            Served(frame, first.engine_id, result, done_ns, each_s, geometry, len(first.frames))
            for frame, result, geometry in rows
        ]

    def close(self) -> None:
        """No more frames; an inference under way comes to its end first."""
        self._thread.stop()


def _usual(known_s: float, newest_s: float) -> float:
    """What a usual frame takes, going by those before and by the newest."""
    weight = 1.0 if not known_s else _FASTER if newest_s < known_s else _SLOWER
    return known_s + weight * (newest_s - known_s)
