"""The frame path: take a frame, infer, decode, hand the result on. It owns the engine and swaps it between frames."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from agent.capture import FrameSlot
from agent.findings import Served
from agent.vision import VisionTask
from engines.backend import Engine

Sink = Callable[[Served], None]  # must not block


class FrameLoop(threading.Thread):
    """The inference thread.

    `swap` may be called from any thread; the new engine serves from the next frame on, and the old one is closed
    by the thread that used it. An exception in here is kept in `error` and ends the loop: without a loop there is
    no daemon, and systemd starts a new one.
    """

    def __init__(
        self, slot: FrameSlot, engine_id: str, engine: Engine, task: VisionTask, sinks: Sequence[Sink]
    ) -> None:
        super().__init__(name="inference", daemon=True)
        self._slot = slot
        self._engine_id = engine_id
        self._engine = engine
        self._task = task
        self._sinks = sinks
        self._next: tuple[str, Engine, Callable[[float | None], None]] | None = None
        self._ended = False
        self._exchange = threading.Lock()  # guards the two above
        self.error: BaseException | None = None

    def swap(self, engine_id: str, engine: Engine, on_live: Callable[[float | None], None]) -> None:
        """Serve the next frame with `engine`; on_live(ts) is called with that frame's capture time.

        Where no frame comes any more, on_live(None) is called and the engine closed. One swap at a time: RuntimeError
        while another waits for its frame.
        """
        with self._exchange:
            if self._next is not None:
                raise RuntimeError("a swap while another one waits for its first frame")
            if not self._ended:
                self._next = (engine_id, engine, on_live)
                return
        on_live(None)
        engine.close()

    def run(self) -> None:
        try:
            while (frame := self._slot.get()) is not None:
                self._take_next(frame.ts)
                result, geometry = self._task.infer(self._engine, frame.image)
                done_ns, inferred_s = time.monotonic_ns(), self._task.inferred_s
                served = Served(frame, self._engine_id, result, done_ns, inferred_s, geometry)
                for sink in self._sinks:
                    sink(served)
        except BaseException as error:
            self.error = error
        finally:
            self._slot.close()  # the capture thread must not wait for a loop that has ended
            with self._exchange:
                self._ended = True
            self._take_next(None)
            self._engine.close()

    def _take_next(self, ts: float | None) -> None:
        if self._next is None:
            return
        with self._exchange:
            (self._engine_id, engine, on_live), self._next = self._next, None
        old, self._engine = self._engine, engine
        on_live(ts)
        old.close()
