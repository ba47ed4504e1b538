"""Build and run all threads of the frame path: capture threads, the inference thread and the observer.

A `Feed` is one camera: the thread that reads it, its slot, and the counters of its frames. `Pipeline` owns the feeds,
the `FrameLoop` that answers their frames, and the `ObserverThread` beside it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from agent.camera.capture import CaptureThread, FrameSlot
from agent.camera.config import CameraConfig
from agent.camera.reader import source_length
from agent.camera.source import Source
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, CameraError, FaultLog, fault_remedy
from agent.common.latency import LoopMeter
from agent.common.timing import Backoff, RetryState
from agent.config import Config
from agent.models.model import Model
from agent.monitoring.accuracy import LiveAccuracy
from agent.monitoring.audit import AuditEvidence, FrameAuditor, Mismatch, ReferenceAudit
from agent.monitoring.evidence_file import EvidenceFile, remove_other_files
from agent.monitoring.observer import ObserverThread
from agent.serving.inference import FrameLoop, RoundRobinScheduler, Sink
from agent.serving.trial import AnswerRecord, CheckedVisionTask, NonFiniteRecorder, Trial, TrialEvents, deadline_s
from agent.state.store import StateStore
from agent.vision.labels import LabelKind
from agent.vision.output_checks import check_batch
from agent.vision.task import ServedFrame, VisionTask
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError
from engines.interface import Engine, Progress
from engines.registry import open_backend
from engines.store.artefact import fingerprint

_HANGS_S = 60.0
_WELL_AFTER = 30  # answers in a row that all sinks took, after which their outage has ended
READY_S = 2.0  # a reference engine that is only loaded is ready by then; the video does not wait for a build
_WAIT_S = 0.2  # for the observer, between two calls of `waiting`
_KEPT = ("evidence", "accuracy")  # files of each live camera, by the start of their names
JOIN_S = 10.0  # for all threads together, longer than any frame takes; one that still runs then is a daemon thread

log = logging.getLogger(__package__)


def total_frames(sources: Sequence[Source], limit: int) -> int | None:
    """Return how many frames there will be, of all sources; None if that is unknown.

    limit: frames of each source at most; 0: no limit.
    """
    try:
        lengths = [source_length(source) for source in sources]
    except CameraError:  # which the capture thread reports
        return None
    known = [min(length or limit, limit or length or 0) for length in lengths]
    return sum(known) if all(known) else None


class Feed:
    """One camera of the pipeline.

    meter: Sampled for telemetry.
    run_meter: Counts from the start of the run.
    accuracy: Scores the labels of this camera's frames.
    newest: The latest answer.
    lost: Code of the error for which the camera is away, as on_change reports it; else empty.
    """

    def __init__(
        self,
        camera: CameraConfig,
        source: Source,
        slot: FrameSlot,
        labels: LabelKind[Any, Any] | None,
        frame_limit: int,
        on_change: Callable[[CameraError | None], None],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """labels: Of the model's task. on_change: called in the capture thread, as CaptureThread documents it."""
        self.name = camera.name
        self.is_live = source.live
        self.location = camera.source
        self.meter = LoopMeter(lambda: slot.dropped, clock)
        self.run_meter = LoopMeter(lambda: slot.dropped, clock)
        self.accuracy = LiveAccuracy(labels)
        self.newest: ServedFrame | None = None
        self.lost = ""
        self._on_change = on_change
        self.capture = CaptureThread(
            source, slot, camera.speed, frame_limit, self._changed, camera.silence_s, camera.name, clock
        )
        self.slot = slot
        self._clock = clock
        self._beat, self._beaten_s = self.capture.beat, clock.monotonic_s()

    @property
    def last_ts(self) -> float:
        """Capture time of the latest frame that was answered; 0 before the first."""
        return self.newest.frame.ts if self.newest is not None else 0.0

    @property
    def is_up(self) -> bool:
        """True if the camera is up: it has given a frame, has not been lost since, and has not ended."""
        frames, _ = self.capture.beat
        return frames > 0 and not self.lost and self.capture.is_alive()

    def poll(self) -> None:
        """Check whether the camera has fallen silent, which on_change reports, and whether its thread hangs."""
        self.capture.check_silence()
        beat = self.capture.beat
        if beat != self._beat:
            self._beat, self._beaten_s = beat, self._clock.monotonic_s()

    @property
    def is_hung(self) -> bool:
        """True if the thread that reads a live camera has done nothing for long: nothing in this process cures that."""
        silent_s = self._clock.monotonic_s() - self._beaten_s
        return self.is_live and self.capture.is_alive() and silent_s > _HANGS_S

    def _changed(self, error: CameraError | None) -> None:
        self.lost = error.code if error is not None else ""
        self._on_change(error)

    def add_answer(self, served: ServedFrame) -> None:
        """Count an answered frame; called in the inference thread."""
        self.newest = served
        latency_ns = served.done_ns - served.frame.captured_ns
        self.meter.record(latency_ns)
        self.run_meter.record(latency_ns)
        self.accuracy.add_answer(served)


class Pipeline:
    """All threads of the frame path, built stopped, with one feed per camera.

    `record` counts the answers of each engine, for the probation of a candidate.
    """

    def __init__(
        self,
        config: Config,
        state: StateStore,
        sources: Sequence[Source],
        model: Model,
        engine_id: str,
        engine: Engine,
        frame_limit: int,
        on_camera: Callable[[str, CameraError | None], None],
        on_observer: Callable[[TaredError | None], None],
        on_sinks: Callable[[TaredError | None], None],
        preparing: Progress,
        on_mismatch: Callable[[Mismatch], None],
        sinks: Sequence[Sink] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Build the threads.

        Args:
            config: The whole configuration.
            state: Keeps the audit's evidence.
            sources: Of every camera, in their order.
            engine: The engine in service; the loop closes it.
            frame_limit: Frames of each camera at most; 0: no limit.
            on_camera: Called in a capture thread with a camera's name and the error when it is lost, or when it is one
                of several recordings and cannot be read; with None when it is back.
            on_observer: Called in the observer's thread when observing fails, and when it works again.
            on_sinks: Called in the inference thread when an answer cannot be counted, observed or handed to a sink,
                and when that works again.
            preparing: Called in the observer's thread with the progress of building the reference engine.
            on_mismatch: Called once in another thread when the reference is found wrong.
            sinks: Get every answer, in the inference thread; an error of theirs costs them that answer alone.

        Raises ConfigError as `check_batch`.
        """
        cameras = config.every_camera
        # Whether each camera waits until its frame is fetched, so that every frame is answered.
        keep_every = [
            camera.policy == "every-frame" or (camera.policy == "auto" and not source.live)
            for camera, source in zip(cameras, sources, strict=True)
        ]
        self._clock = clock
        self._scheduler = RoundRobinScheduler(keep_every, clock)
        only_recording = len(sources) == 1 and not sources[0].live  # whose error ends the run, which reports it
        on_change = (lambda *_: None) if only_recording else on_camera
        labels = open_task(model.spec).labels
        rows = zip(cameras, sources, self._scheduler.slots, strict=True)
        self.feeds = {
            camera.name: Feed(camera, source, slot, labels, frame_limit, partial(on_change, camera.name), clock)
            for camera, source, slot in rows
        }
        self.run_meter = LoopMeter(lambda: self.dropped, clock)
        self.served = 0
        self._pulse = 0, 0
        # One thread: the observer's own, whose low priority then holds for all of its work.
        options = config.backend_options(threads=1)
        backend = open_backend(config.backend, options)
        checked_backend = open_backend(config.backend, replace(options, reference="onnxruntime"))
        reference, checked = (partial(model.open_observer, each) for each in (backend, checked_backend))
        # The evidence against the reference, also where no more of it is gathered.
        parts = {"model": model.sha256, "observed": model.observed_id, "runtime": dict(backend.describe())}
        kept = state if self.is_live else StateStore(None)  # each play of a recording starts from scratch
        period_s = config.observe.audit_period_s
        self._evidence = AuditEvidence(kept, fingerprint(parts), period_s)
        if self.mismatch is not None:
            reference = checked

        def start_audit(product_bits: int) -> ReferenceAudit | None:
            """product_bits: as in engines.interface.Observer."""
            if period_s is None:
                return None
            return ReferenceAudit(FrameAuditor(model, product_bits), period_s, self._evidence, on_mismatch, clock)

        observer_task = VisionTask(model.spec, engine.inputs, engine.outputs, clock)  # for the observer's own buffers
        self.observer = ObserverThread(
            reference,
            model.spec,
            config,
            on_observer,
            preparing,
            lambda served: self.loop.previous_prediction(served, observer_task),
            checked,
            start_audit,
            clock,
        )
        task = self._task = NonFiniteRecorder(model.spec, engine.inputs, engine.outputs, clock)
        self._spec, self._tensors = model.spec, (engine.inputs, engine.outputs)
        self._probation = config.probation
        self.record = AnswerRecord(self.is_live or len(cameras) > 1)
        self._handing = RetryState(on_sinks, Backoff(), _WELL_AFTER)
        self._faults = FaultLog(log)
        hand_on = partial(self._hand_on, [self._count, self.record.add, self.observer.offer, *sinks])
        tasks = [task, VisionTask(model.spec, engine.inputs, engine.outputs, clock)]
        check_batch(config.batch.frames, engine, model.spec)
        self.loop = FrameLoop(self._scheduler, engine_id, engine, tasks, [hand_on], config.batch, clock)

    @property
    def mismatch(self) -> Mismatch | None:
        """The mismatch that proved the reference wrong, now or before a restart; None if there was none."""
        return self._evidence.mismatch

    @property
    def open_mismatch(self) -> Mismatch | None:
        """The same as `mismatch`, until `answer_mismatch`, which an earlier process may have called."""
        return self.mismatch if not self._evidence.is_answered else None

    def answer_mismatch(self) -> None:
        """Remember that a job replaces what the wrong reference has made; the supervisor calls it."""
        self._evidence.answer()

    @property
    def is_live(self) -> bool:
        """True if any camera is live: what is learnt then is of use after this run. Recordings may be played again."""
        return any(feed.is_live for feed in self.feeds.values())

    @property
    def last_ts(self) -> float:
        """Capture time of the latest frame that was answered, of any camera."""
        return max(feed.last_ts for feed in self.feeds.values())

    def serving_since(self, ts: float | None) -> dict[str, float]:
        """Return for each camera the capture time from which the current engine serves.

        That is `ts` if it is known and there is one camera only, for clocks of several need not agree; else the time of
        the latest answered frame.
        """
        only = ts if len(self.feeds) == 1 else None
        return {name: feed.last_ts if only is None else only for name, feed in self.feeds.items()}

    @property
    def error(self) -> BaseException | None:
        """The error that stopped a thread. A recording that cannot be read ends its own feed alone, if there is another
        one."""
        captures = [feed.capture.error for feed in self.feeds.values()]
        grave = [error for error in captures if error and (all(captures) or not isinstance(error, CameraError))]
        return self.loop.error or self.observer.error or next(iter(grave), None)

    @property
    def pulse(self) -> tuple[int, int]:
        """Changes as long as nothing hangs; the watchdog is pinged with each change.

        1. It changes with every frame that is served.
        2. While live cameras are lost and the loop waits for frames, it changes with every attempt to reopen one.
        3. It does not change while one of several cameras hangs in its driver.
        """
        if not any(feed.is_hung for feed in self.feeds.values()):
            attempts = sum(feed.capture.pulse for feed in self.feeds.values()) if self._scheduler.is_waiting else 0
            self._pulse = self.served, attempts
        return self._pulse

    def poll(self) -> None:
        """Check whether a camera has fallen silent, which on_camera reports."""
        for feed in self.feeds.values():
            feed.poll()

    @property
    def dropped(self) -> Counter[str]:
        """Frames of all cameras that were not served, by cause."""
        return sum((Counter(feed.slot.dropped) for feed in self.feeds.values()), Counter[str]())

    def keep_evidence(self, state_dir: Path, on_error: Callable[[AgentError], None]) -> None:
        """Keep the evidence on live cameras over a restart; a recording that is played again is new evidence.

        Files of cameras that are gone, or have another name, are removed. on_error: called for a disk that refuses.
        """
        kept = set[Path]()
        for camera, feed in self.feeds.items():
            if not feed.is_live:
                continue
            suffix = f"-{fingerprint({'camera': camera})[:12]}" if len(self.feeds) > 1 else ""
            evidence, accuracy = (state_dir / f"{name}{suffix}.jsonl" for name in _KEPT)
            self.observer.monitors[camera].remember(EvidenceFile(evidence, feed.location, on_error))
            feed.accuracy.remember(EvidenceFile(accuracy, feed.location, on_error))
            kept |= {evidence, accuracy}
        if kept:
            remove_other_files(state_dir, _KEPT, kept, on_error)

    def start_trial(self, engine_id: str, engine: Engine, events: TrialEvents, own_outputs: bool = False) -> None:
        """Try a candidate out, as `FrameLoop.start_trial` does.

        own_outputs: It is of another model, whose inputs and outputs may have other shapes.

        Raises AgentError (`probation.stuck`), with the engine closed, while an earlier candidate hangs.
        """
        if self.loop.is_stuck:
            engine.close()
            found, expected = "a candidate that still hangs and holds its memory", "one candidate at a time"
            raise AgentError("probation.stuck", found, expected, "wait for its end, or restart the daemon")
        limit_s = deadline_s(self._probation, self.record)
        tensors = (engine.inputs, engine.outputs) if own_outputs else self._tensors
        task = CheckedVisionTask(self._spec, *tensors, self._task.not_finite, self._clock)
        self.loop.start_trial(Trial(engine_id, engine, task, limit_s, events, self._task.watch, self._clock))

    def start(self, waiting: Callable[[], bool]) -> None:
        """Start the threads; an observer that is ready soon sees the first frame.

        waiting: called again and again; while it returns true, a recording waits for the observer. It would have ended
        before a reference engine is built.
        """
        self.observer.start()
        self.observer.wait_until_tried(READY_S)
        while not self._scheduler.may_overwrite and waiting() and not self.observer.wait_until_tried(_WAIT_S):
            pass
        for thread in (self.loop, *(feed.capture for feed in self.feeds.values())):
            thread.start()

    def stop(self) -> None:
        """Stop capturing; frames in flight are still served. `join` waits for the rest."""
        for feed in self.feeds.values():
            feed.capture.stop()
        if self.observer.is_opening:
            self.observer.stop()  # now: a builder stops only between two steps

    def join(self) -> None:
        """Wait for the frame path to end, then end the observer; JOIN_S at most. Raises the error of a thread."""
        ends_s = self._clock.monotonic_s() + JOIN_S
        for thread in (*(feed.capture for feed in self.feeds.values()), self.loop):
            thread.join(max(0.0, ends_s - self._clock.monotonic_s()))
        self.observer.stop()
        if self.observer.is_alive():
            self.observer.join(max(0.0, ends_s - self._clock.monotonic_s()))
        if self.error is not None:
            raise self.error

    def _hand_on(self, sinks: Sequence[Sink], served: ServedFrame) -> None:
        """Give an answer to every sink. None of them may end the frame path."""
        failed = False
        for sink in sinks:
            try:
                sink(served)
            except Exception as error:  # noqa: PERF203  (each costs itself alone)
                failed = True
                name = getattr(sink, "__qualname__", repr(sink))
                self._faults.note(name, error)
                found, expected = f"{name} raised {type(error).__name__}: {error}", "a sink that takes every answer"
                self._handing.note_failure(AgentError("serving.sinks", found, expected, fault_remedy(error)))
        if not failed:
            self._handing.note_success()

    def _count(self, served: ServedFrame) -> None:
        self.served += 1
        self.run_meter.record(served.done_ns - served.frame.captured_ns)
        self.feeds[served.frame.camera].add_answer(served)
