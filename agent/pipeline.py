"""The threads of one camera: capture -> inference -> observer, with the counters beside them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from agent.accuracy import LiveAccuracy
from agent.capture import CaptureThread, Frame, FrameSlot
from agent.config import Config
from agent.errors import AgentError, CameraError
from agent.findings import Served
from agent.loop import FrameLoop, Sink
from agent.model import Model
from agent.observer import ObserverThread
from agent.probation import Record, deadline_s
from agent.source import Source
from agent.telemetry import LoopMeter
from agent.trial import CheckedTask, Trial, TrialEvents, WitnessTask
from agent.vision import VisionTask
from calibrate.errors import TaredError
from engines.backend import Engine, Progress, open_backend

READY_S = 2.0  # an observer that is only loaded is there by then; one that has to be built does not keep the video
_LOOK_S = 0.2
JOIN_S = 10.0  # for all threads together, longer than any frame takes; one that still runs then is a daemon thread


class Pipeline:
    """Built stopped. `meter` is sampled for telemetry, `run_meter` once for the summary; labels go to `accuracy`.

    `record` has what each engine has answered, for who judges a candidate.

    on_camera is called in the capture thread with the error when a live camera is lost, with None when it is back;
    on_observer so in the observer's thread, when observing fails and when it works again. preparing hears in that
    thread, too, how far the reference engine is, where that has to be built first. sinks: who else gets every
    answer.
    """

    def __init__(
        self,
        config: Config,
        source: Source,
        model: Model,
        engine_id: str,
        engine: Engine,
        frame_limit: int,
        on_camera: Callable[[CameraError | None], None],
        on_observer: Callable[[TaredError | None], None],
        preparing: Progress,
        sinks: Sequence[Sink] = (),
    ) -> None:
        self.is_live = source.live
        policy = config.camera.policy
        self._waits = policy == "every-frame" or (policy == "auto" and not source.live)
        self._slot = FrameSlot(self._waits)
        self.meter = LoopMeter(self._slot.dropped)
        self.run_meter = LoopMeter(self._slot.dropped)
        self.last_ts = 0.0
        self.newest: Frame | None = None
        self.served = 0
        # One thread: the observer's own, whose low priority then holds for all of its work.
        backend = open_backend(config.backend, config.backend_options(threads=1))
        reference = partial(backend.observer, model.reference, model.placement.taps)
        before = VisionTask(model.spec, engine.inputs, engine.outputs)  # the observer's own, as its buffers are
        self.observer = ObserverThread(
            reference, model.spec, config, on_observer, preparing, lambda served: self.loop.before(served, before)
        )
        task = self._task = WitnessTask(model.spec, engine.inputs, engine.outputs)
        self._open_trial_task = partial(CheckedTask, model.spec, engine.inputs, engine.outputs, task.not_finite)
        self._probation = config.probation
        self.record = Record(source.live)
        self.accuracy = LiveAccuracy(model.spec.task)
        own_sinks = [self._count, self.record.add, self.observer.offer, self.accuracy.answered]
        self.loop = FrameLoop(self._slot, engine_id, engine, task, [*own_sinks, *sinks])
        camera = config.camera
        self._capture = CaptureThread(source, self._slot, camera.speed, frame_limit, on_camera, camera.silence_s)

    @property
    def running(self) -> bool:
        """Whether frames are still being served."""
        return self.loop.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What stopped a thread that should have gone on."""
        return self.loop.error or self.observer.error or self._capture.error

    @property
    def pulse(self) -> tuple[int, int]:
        """Changes as long as nothing hangs: with every frame that is served; while a live camera is lost and the loop
        waits for its frames, with every attempt to have it back."""
        return self.served, self._capture.pulse if self._slot.awaited else 0

    def look(self) -> None:
        """Whether the camera has fallen silent; `on_camera` hears of it."""
        self._capture.look()

    @property
    def dropped(self) -> int:
        """Frames that nobody took, of any cause."""
        return sum(self._slot.dropped.values())

    @property
    def stuck(self) -> bool:
        """Whether a candidate still hangs, with the memory that it holds; no other is tried meanwhile."""
        return self.loop.stuck

    def try_out(self, engine_id: str, engine: Engine, events: TrialEvents) -> None:
        """Let a candidate serve, as `FrameLoop.try_out`.

        Raises AgentError (`probation.stuck`), with the engine closed, while an earlier candidate hangs.
        """
        if self.stuck:
            engine.close()
            found = "a candidate that still hangs, with the memory that it holds"
            raise AgentError(
                "probation.stuck", found, "one candidate at a time", "wait for its end, or restart the daemon"
            )
        self._task.watch()
        limit_s = deadline_s(self._probation, self.record)
        self.loop.try_out(Trial(engine_id, engine, self._open_trial_task(), limit_s, events))

    def start(self, waiting: Callable[[], bool]) -> None:
        """Start the threads; an observer that is soon there sees the first frame.

        A source that waits for the loop, as a recording does, waits for it too, while `waiting`, called again and
        again, says so: the recording would be over before.
        """
        self.observer.start()
        self.observer.wait_until_tried(READY_S)
        while self._waits and waiting() and not self.observer.wait_until_tried(_LOOK_S):
            pass
        for thread in (self.loop, self._capture):
            thread.start()

    def stop(self) -> None:
        """Stop capturing; what is in flight is still served. `join` waits for the rest."""
        self._capture.stop()
        if self.observer.opening:
            self.observer.stop()  # now: a builder stops only between two steps

    def join(self) -> None:
        """Wait for the frame path's end, then end the observer; JOIN_S at most. Raises what stopped a thread."""
        deadline_s = time.monotonic() + JOIN_S
        for thread in (self._capture, self.loop):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.observer.stop()
        self.observer.join(max(0.0, deadline_s - time.monotonic()))
        if self.error is not None:
            raise self.error

    def _count(self, served: Served) -> None:
        self.last_ts = served.frame.ts
        self.newest = served.frame
        self.served += 1
        latency_ns = served.done_ns - served.frame.captured_ns
        self.meter.record(latency_ns)
        self.run_meter.record(latency_ns)
