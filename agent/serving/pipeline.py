"""One camera of the pipeline: the thread that reads it, its slot, and what is counted of its frames."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from agent.camera.capture import CaptureThread, FrameSlot
from agent.camera.config import CameraConfig
from agent.camera.reader import source_length
from agent.camera.source import Source
from agent.common.errors import AgentError, CameraError
from agent.common.latency import LoopMeter
from agent.config import Config
from agent.models.model import Model
from agent.monitoring.accuracy import LiveAccuracy
from agent.monitoring.estimates import Estimate
from agent.monitoring.evidence_file import EvidenceFile, remove_other_files
from agent.monitoring.observer import ObserverThread
from agent.serving.inference import FrameLoop, RoundRobinScheduler, Sink
from agent.serving.trial import AnswerRecord, CheckedVisionTask, NonFiniteRecorder, Trial, TrialEvents, deadline_s
from agent.vision.output_checks import check_batch
from agent.vision.task import ServedFrame, VisionTask
from calibrate.errors import TaredError
from engines.interface import Engine, Progress
from engines.registry import open_backend
from engines.store.artefact import fingerprint

_HANGS_S = 60.0


def keeps_every_frame(camera: CameraConfig, source: Source) -> bool:
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
        self.newest: ServedFrame | None = None
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
    def is_up(self) -> bool:
        """Whether the camera is there: it has given a frame, is not lost since, and has not come to its end."""
        frames, _ = self.capture.beat
        return frames > 0 and not self.lost and self.capture.is_alive()

    def poll(self) -> None:
        """Whether the camera has fallen silent, which `on_change` hears, and whether its thread hangs."""
        self.capture.check_silence()
        beat = self.capture.beat
        if beat != self._beat:
            self._beat, self._beaten_s = beat, time.monotonic()

    @property
    def is_hung(self) -> bool:
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

    def add_answer(self, served: ServedFrame) -> None:
        """A sink of the frame path."""
        self.newest = served
        latency_ns = served.done_ns - served.frame.captured_ns
        self.meter.record(latency_ns)
        self.run_meter.record(latency_ns)
        self.accuracy.add_answer(served)


READY_S = 2.0  # an observer that is only loaded is there by then; one that has to be built does not keep the video
_LOOK_S = 0.2
_KEPT = ("evidence", "accuracy")  # of each live camera, in files that begin so
JOIN_S = 10.0  # for all threads together, longer than any frame takes; one that still runs then is a daemon thread


class Pipeline:
    """Built stopped; one feed per camera. `record` has what each engine has answered, for who judges a candidate.

    on_camera is called in a capture thread with a camera's name and the error when it is lost, or is one of several
    recordings and cannot be read, with None when it is back; on_observer in the observer's thread, when observing fails
    and when it works again. preparing hears in that thread, too, how far the reference engine is, where that has to be
    built first. sinks: who else gets every answer.
    """

    def __init__(
        self,
        config: Config,
        sources: Sequence[Source],
        model: Model,
        engine_id: str,
        engine: Engine,
        frame_limit: int,
        on_camera: Callable[[str, CameraError | None], None],
        on_observer: Callable[[TaredError | None], None],
        preparing: Progress,
        sinks: Sequence[Sink] = (),
    ) -> None:
        """sources: of every camera, in their order. Raises ConfigError as `check_batch`."""
        cameras = config.every_camera
        self._turns = RoundRobinScheduler(
            [keeps_every_frame(camera, source) for camera, source in zip(cameras, sources, strict=True)]
        )
        only_recording = len(sources) == 1 and not sources[0].live  # whose error ends the run, which tells it
        on_change = (lambda *_: None) if only_recording else on_camera
        rows = zip(cameras, sources, self._turns.slots, strict=True)
        self.feeds = {
            camera.name: Feed(camera, source, slot, model.spec.task, frame_limit, partial(on_change, camera.name))
            for camera, source, slot in rows
        }
        self.run_meter = LoopMeter(lambda: self.dropped)
        self.served = 0
        self._pulse = 0, 0
        # One thread: the observer's own, whose low priority then holds for all of its work.
        backend = open_backend(config.backend, config.backend_options(threads=1))
        reference = partial(backend.observer, model.reference, model.placement.taps)
        before = VisionTask(model.spec, engine.inputs, engine.outputs)  # the observer's own, as its buffers are
        self.observer = ObserverThread(
            reference,
            model.spec,
            config,
            on_observer,
            preparing,
            lambda served: self.loop.previous_prediction(served, before),
        )
        task = self._task = NonFiniteRecorder(model.spec, engine.inputs, engine.outputs)
        self._open_trial_task = partial(CheckedVisionTask, model.spec, engine.inputs, engine.outputs, task.not_finite)
        self._probation = config.probation
        self.record = AnswerRecord(self.is_live or len(cameras) > 1)
        own_sinks = [self._count, self.record.add, self.observer.offer]
        tasks = [task, VisionTask(model.spec, engine.inputs, engine.outputs)]
        check_batch(config.batch.frames, engine, model.spec)
        self.loop = FrameLoop(self._turns, engine_id, engine, tasks, [*own_sinks, *sinks], config.batch)

    @property
    def is_live(self) -> bool:
        """Whether any camera is: what is learnt then is of use after this run. Recordings may be played once more."""
        return any(feed.is_live for feed in self.feeds.values())

    @property
    def last_ts(self) -> float:
        """Capture time of the latest frame that was answered, of any camera."""
        return max(feed.last_ts for feed in self.feeds.values())

    def serving_since(self, ts: float | None) -> dict[str, float]:
        """Capture time, by camera, from which on serves what has answered the frame of `ts`, or else the next one.

        Clocks of several cameras need not agree, so that `ts` is only that of an only one; else it is now.
        """
        only = ts if len(self.feeds) == 1 else None
        return {name: feed.last_ts if only is None else only for name, feed in self.feeds.items()}

    @property
    def is_running(self) -> bool:
        """Whether frames are still being served."""
        return self.loop.is_alive()

    @property
    def error(self) -> BaseException | None:
        """What stopped a thread that should have gone on. A recording that cannot be read ends its own feed alone, as
        long as there is another one."""
        captures = [feed.capture.error for feed in self.feeds.values()]
        grave = [error for error in captures if error and (all(captures) or not isinstance(error, CameraError))]
        return self.loop.error or self.observer.error or next(iter(grave), None)

    @property
    def pulse(self) -> tuple[int, int]:
        """Changes as long as nothing hangs: with every frame that is served; while live cameras are lost and the loop
        waits for their frames, with every attempt to have one back. Not while one of several hangs in its driver."""
        if not any(feed.is_hung for feed in self.feeds.values()):
            self._pulse = self._alive()
        return self._pulse

    def _alive(self) -> tuple[int, int]:
        return self.served, sum(feed.capture.pulse for feed in self.feeds.values()) if self._turns.is_waiting else 0

    def poll(self) -> None:
        """Whether a camera has fallen silent; `on_camera` hears of it."""
        for feed in self.feeds.values():
            feed.poll()

    @property
    def dropped(self) -> Counter[str]:
        """Frames of all cameras that nobody took, by cause."""
        return sum((Counter(feed.dropped) for feed in self.feeds.values()), Counter[str]())

    def keep_evidence(self, state_dir: Path, on_error: Callable[[AgentError], None]) -> None:
        """Keep what is found of live cameras over a restart; on_error hears of a disk that refuses.

        A recording that is played once more is news. What was kept of cameras that are no more, or have another name,
        is removed.
        """
        kept = set[Path]()
        for camera, feed in self.feeds.items():
            if not feed.is_live:
                continue
            suffix = f"-{fingerprint({'camera': camera})[:12]}" if len(self.feeds) > 1 else ""
            evidence, accuracy = (state_dir / f"{what}{suffix}.jsonl" for what in _KEPT)
            self.observer.monitors[camera].remember(EvidenceFile(evidence, feed.location, on_error))
            feed.accuracy.remember(EvidenceFile(accuracy, feed.location, on_error))
            kept |= {evidence, accuracy}
        if kept:
            remove_other_files(state_dir, _KEPT, kept, on_error)

    @property
    def is_stuck(self) -> bool:
        """Whether a candidate still hangs, with the memory that it holds; no other is tried meanwhile."""
        return self.loop.is_stuck

    def start_trial(self, engine_id: str, engine: Engine, events: TrialEvents) -> None:
        """Let a candidate serve, as `FrameLoop.try_out`.

        Raises AgentError (`probation.stuck`), with the engine closed, while an earlier candidate hangs.
        """
        if self.is_stuck:
            engine.close()
            found = "a candidate that still hangs, with the memory that it holds"
            raise AgentError(
                "probation.stuck", found, "one candidate at a time", "wait for its end, or restart the daemon"
            )
        limit_s = deadline_s(self._probation, self.record)
        self.loop.start_trial(Trial(engine_id, engine, self._open_trial_task(), limit_s, events, self._task.watch))

    def start(self, waiting: Callable[[], bool]) -> None:
        """Start the threads; an observer that is soon there sees the first frame.

        A source that waits for the loop, as a recording does, waits for it too, while `waiting`, called again and
        again, says so: the recording would be over before.
        """
        self.observer.start()
        self.observer.wait_until_tried(READY_S)
        while not self._turns.may_overwrite and waiting() and not self.observer.wait_until_tried(_LOOK_S):
            pass
        self.loop.start()
        for feed in self.feeds.values():
            feed.capture.start()

    def stop(self) -> None:
        """Stop capturing; what is in flight is still served. `join` waits for the rest."""
        for feed in self.feeds.values():
            feed.capture.stop()
        if self.observer.is_opening:
            self.observer.stop()  # now: a builder stops only between two steps

    def join(self) -> None:
        """Wait for the frame path's end, then end the observer; JOIN_S at most. Raises what stopped a thread."""
        deadline_s = time.monotonic() + JOIN_S
        for thread in (*(feed.capture for feed in self.feeds.values()), self.loop):
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self.observer.stop()
        self.observer.join(max(0.0, deadline_s - time.monotonic()))
        if self.error is not None:
            raise self.error

    def _count(self, served: ServedFrame) -> None:
        self.served += 1
        self.run_meter.record(served.done_ns - served.frame.captured_ns)
        self.feeds[served.frame.camera].add_answer(served)
