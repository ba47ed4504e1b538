"""The threads of one camera: capture -> inference -> observer, with the counters beside them."""

from __future__ import annotations

from collections.abc import Callable

from agent.build import Model
from agent.camera import Source
from agent.capture import CaptureThread, FrameSlot
from agent.config import Config
from agent.errors import CameraError
from agent.loop import FrameLoop
from agent.observer import ObserverThread, Served
from agent.telemetry import LoopMeter
from agent.vision import VisionTask
from engines.backend import Engine, Progress, open_backend

_JOIN_S = 10.0  # longer than any frame takes; a thread that still runs then is a daemon thread


class Pipeline:
    """Built stopped. `meter` is sampled for telemetry, `run_meter` once for the summary.

    on_camera is called in the capture thread with the error when a live camera is lost, with None when it is back.
    preparing hears how far the reference engine is, where that has to be built first.
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
        preparing: Progress,
    ) -> None:
        policy = config.camera.policy
        self._slot = FrameSlot(policy == "every-frame" or (policy == "auto" and not source.live))
        self.meter = LoopMeter(self._slot.dropped)
        self.run_meter = LoopMeter(self._slot.dropped)
        self.last_ts = 0.0
        self.served = 0
        # One thread: the observer's own, whose low priority then holds for all of its work.
        backend = open_backend(config.backend, config.backend_options(threads=1))
        reference = backend.observer(model.reference, model.placement.taps, preparing)
        self.observer = ObserverThread(reference, model.spec, config)
        task = VisionTask(model.spec, engine.inputs, engine.outputs)
        self.loop = FrameLoop(self._slot, engine_id, engine, task, [self._count, self.observer.offer])
        self._capture = CaptureThread(source, self._slot, config.camera.speed, frame_limit, on_camera)

    @property
    def running(self) -> bool:
        """Whether frames are still being served."""
        return self.loop.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What stopped a thread that should have gone on."""
        return self.loop.error or self.observer.error or self._capture.error

    def start(self) -> None:
        for thread in (self.observer, self.loop, self._capture):
            thread.start()

    def stop(self) -> None:
        """Stop capturing; what is in flight is still served. `join` waits for the rest."""
        self._capture.stop()

    def join(self) -> None:
        """Wait for the frame path's end, then end the observer. Raises what stopped a thread."""
        for thread in (self._capture, self.loop):
            thread.join(_JOIN_S)
        self.observer.stop()
        self.observer.join(_JOIN_S)
        if self.error is not None:
            raise self.error

    def _count(self, served: Served) -> None:
        self.last_ts = served.frame.ts
        self.served += 1
        latency_ns = served.done_ns - served.frame.captured_ns
        self.meter.record(latency_ns)
        self.run_meter.record(latency_ns)
