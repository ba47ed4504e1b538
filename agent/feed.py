"""One camera of the pipeline: the thread that reads it, its slot, and what is counted of its frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from agent.accuracy import LiveAccuracy
from agent.camera import source_length
from agent.camera_config import CameraConfig
from agent.capture import CaptureThread, FrameSlot
from agent.errors import CameraError
from agent.estimates import Estimate
from agent.findings import Served
from agent.source import Source
from agent.telemetry import LoopMeter

_HANGS_S = 60.0


def waits(camera: CameraConfig, source: Source) -> bool:
    """Whether the camera waits until its frame is taken, so that every frame is answered."""
    return camera.policy == "every-frame" or (camera.policy == "auto" and not source.live)


def total_frames(sources: Sequence[Source], limit: int) -> int | None:
    """How many frames there will be, of all sources, and of each `limit` at most, if that is not 0; None where nobody
    knows."""
    try:
        lengths = [source_length(source) for source in sources]
    except CameraError:  # which who reads it has to tell
        return None
    known = [min(length or limit, limit or length or 0) for length in lengths]
    return sum(known) if all(known) else None


class Feed:
    """`meter` is sampled for telemetry, `run_meter` once for the summary; labels go to `accuracy`. `newest` is the
    latest answer. `lost` is the code of the error for which the camera is away, as `on_change` hears it; else empty."""

    def __init__(
        self,
        camera: CameraConfig,
        source: Source,
        slot: FrameSlot,
        task: str,
        frame_limit: int,
        on_change: Callable[[CameraError | None], None],
    ) -> None:
        """task: of the model spec. on_change: called in the capture thread, as CaptureThread has it."""
        self.name = camera.name
        self.is_live = source.live
        self.location = camera.source
        self.meter = LoopMeter(lambda: slot.dropped)
        self.run_meter = LoopMeter(lambda: slot.dropped)
        self.accuracy = LiveAccuracy(task)
        self.newest: Served | None = None
        self.lost = ""
        self._on_change = on_change
        self.capture = CaptureThread(
            source, slot, camera.speed, frame_limit, self._changed, camera.silence_s, camera.name
        )
        self._slot = slot
        self._beat, self._beaten_s = self.capture.beat, time.monotonic()

    @property
    def last_ts(self) -> float:
        """Capture time of the latest frame that was answered; 0 before the first."""
        return self.newest.frame.ts if self.newest is not None else 0.0

    @property
    def up(self) -> bool:
        """Whether the camera is there: it has given a frame, is not lost since, and has not come to its end."""
        frames, _ = self.capture.beat
        return frames > 0 and not self.lost and self.capture.is_alive()

    def look(self) -> None:
        """Whether the camera has fallen silent, which `on_change` hears, and whether its thread hangs."""
        self.capture.look()
        beat = self.capture.beat
        if beat != self._beat:
            self._beat, self._beaten_s = beat, time.monotonic()

    @property
    def hangs(self) -> bool:
        """Whether the thread that reads a live camera has long done nothing: nothing in this process cures that."""
        return self.is_live and self.capture.is_alive() and time.monotonic() - self._beaten_s > _HANGS_S

    @property
    def labelled(self) -> Estimate | None:
        """Accuracy by labels; None where none have come."""
        estimate = self.accuracy.estimate
        return estimate if estimate.interval.n else None

    @property
    def dropped(self) -> Mapping[str, int]:
        """Frames that nobody took, by cause."""
        return self._slot.dropped

    def _changed(self, error: CameraError | None) -> None:
        self.lost = error.code if error is not None else ""
        self._on_change(error)

    def answered(self, served: Served) -> None:
        """A sink of the frame path."""
        self.newest = served
        latency_ns = served.done_ns - served.frame.captured_ns
        self.meter.record(latency_ns)
        self.run_meter.record(latency_ns)
        self.accuracy.answered(served)
