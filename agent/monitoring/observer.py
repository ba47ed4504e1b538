"""Run the observer thread: a reference engine beside the frame path.

Every observed frame yields three things at once: calibration data (histograms, or a place in the held-out set), the
drift signal, and the fidelity of the engine in service. The frame path offers frames and never waits, neither for the
reference engine, which may have to be built first, nor for one that fails: the video goes on without it.
"""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from agent.camera.capture import Frame
from agent.collection.collection import SharedCollection
from agent.collection.report import remove_sheet
from agent.collection.selection import HELD_OUT_EVERY
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.timing import Backoff, RetryState, is_final
from agent.config import Config
from agent.labelling.accuracy import MeasuredAccuracy
from agent.labelling.sampling import FrameSampler
from agent.monitoring.audit import AuditedFrame, ReferenceAudit
from agent.monitoring.camera_monitor import CameraMonitor, CameraState, Spending
from agent.monitoring.observation_budget import CameraRota, ObservationBudget
from agent.vision.answer import Answer
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame, VisionTask
from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram
from engines.interface import Array, Observation, Observer, Progress, silent
from engines.trace import span

log = logging.getLogger(__package__)

_NICE = 10  # niceness of the thread: the frame path goes first
# Seconds between attempts to open it, at random up to so much: it never gives up, and costs a build each half hour.
_OPENING_S = (30.0, 3600.0)
_OBSERVING_S = (1.0, 30.0)  # the same between attempts to observe
_WELL_AFTER = 5  # observed frames in a row, after which an outage has ended
PREPARING = "preparing"

OpenObserver = Callable[[Progress], Observer]
StartAudit = Callable[[int], ReferenceAudit | None]


class _Stopped(Exception):
    """Raised inside the builder of an observer that nobody waits for any more."""


class ObserverThread(threading.Thread):
    """Open the reference engine, then observe offered frames one at a time, at low priority.

    The results are in `monitors`, by camera, and in `collection`. An error is reported through on_change, once per
    outage, with None at its end; the attempt is repeated after a growing pause, and the frame is lost for the observer.
    An error that only a new process can cure is kept in `error` and ends the thread: a GPU that is lost, and whatever
    is no TaredError.
    """

    def __init__(
        self,
        open_observer: OpenObserver,
        spec: ModelSpec,
        config: Config,
        on_change: Callable[[TaredError | None], None],
        preparing: Progress = silent,
        previous: Callable[[ServedFrame], Answer | None] = lambda _: None,
        open_checked: OpenObserver | None = None,
        audit: StartAudit = lambda _product_bits: None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Args:
        open_observer: Opens the reference engine, and builds it first where it has to.
        config: Its sections observe, calibration, recalibration and cameras count.
        on_change: Called in this thread when observing fails, and when it works again.
        preparing: Called in this thread with the progress of a build.
        previous: Returns the answer of the engine whose place a candidate on probation has taken; None without one.
        open_checked: Opens the reference that takes the place of one which an audit finds wrong.
        audit: Makes the audit of a reference whose products have so many bits; None where it is not audited.
        """
        super().__init__(name="observer", daemon=True)
        self._open_observer = open_observer
        self._spec = spec
        self._config = config
        self._preparing = preparing
        self._previous = previous
        self._open_checked = open_checked
        self._make_audit = audit
        self._clock = clock
        self._audit: ReferenceAudit | None = None
        self._sampler: FrameSampler | None = None
        self._audited: Array | None = None  # the network input of the latest audited frame
        self._random = random.Random(0)
        self._opening = RetryState(on_change, Backoff(*_OPENING_S), well_after=1)
        self._observing = RetryState(on_change, Backoff(*_OBSERVING_S), _WELL_AFTER)
        self._tried = threading.Event()
        self.is_opening = True  # the reference engine is still to come
        self._handover = threading.Condition()
        self._offered: ServedFrame | None = None
        self._busy = True
        self._stopped = False
        observe = config.observe
        # No job may lack frames: the burst is as much as a day of jobs spends ahead. One job observes all frames that
        # it chooses from, or those that it needs.
        needed = (config.calibration.frames + observe.held_out) * HELD_OUT_EVERY / (HELD_OUT_EVERY - 1)
        per_job = max(needed, config.calibration.within_s / observe.alert_period_s)
        burst = math.ceil((1 + config.recalibration.per_day) * per_job)
        # Guarded by _handover.
        self._budget = ObservationBudget(observe.budget, observe.period_s, observe.alert_period_s, burst)
        self._unearned_s = 0.0  # inference time that the budget has not counted yet; the frame path's alone
        cameras = [camera.name for camera in config.every_camera]
        self._rota = CameraRota(cameras) if len(cameras) > 1 else None
        self.collection = SharedCollection(spec, config, self._now_ts)
        self.monitors: Mapping[str, CameraMonitor] = {
            camera: CameraMonitor(
                spec, config, self.collection, camera, partial(self._recent_of_others, camera), clock=clock
            )
            for camera in cameras
        }
        self.error: BaseException | None = None

    def draw_for_labels(self, sampler: FrameSampler) -> None:
        """Let frames be drawn for labelling among the observed ones; before the start."""
        self._sampler = sampler

    @property
    def measured(self) -> MeasuredAccuracy | None:
        """The accuracy by labels of drawn frames; None without any."""
        return self._sampler.measured if self._sampler is not None else None

    def wait_until_tried(self, timeout_s: float) -> bool:
        """Wait until the reference engine is open, or could not be opened; False where `timeout_s` ends before."""
        return self._clock.wait(self._tried, timeout_s)

    def offer(self, served: ServedFrame) -> None:
        """Observe this frame if one is due and the observer is idle. Called by the frame path; never waits."""
        self._unearned_s += served.inferred_s
        frame, now_ts = served.frame, served.frame.ts
        is_turn = True
        if self._rota is not None:
            is_turn = self._rota.is_turn(frame.camera, frame.ts, frame.captured_ns / 1e9)
            now_ts = self._rota.now_ts
        if not self._handover.acquire(blocking=False):
            return
        try:
            self._budget.earn(self._unearned_s)
            self._unearned_s = 0.0
            if is_turn and not self._busy and self._offered is None and self._budget.due(now_ts):
                self._offered = served
                self._handover.notify()
                if self._rota is not None:
                    self._rota.end_turn()
        finally:
            self._handover.release()

    def _now_ts(self, frame: Frame) -> float:
        """Return the capture time that all cameras have in common: each recording has a time of its own."""
        return self._rota.now_ts if self._rota is not None else frame.ts

    def _recent_of_others(self, camera: str) -> Sequence[Mapping[str, AbsHistogram]]:
        """Return the histograms of the newest frames of each other camera."""
        others = (monitor.recent for name, monitor in self.monitors.items() if name != camera)
        return [recent for recent in others if recent]

    def set_pace(self, alert: bool) -> None:
        """Observe at the alert pace, or at the normal one."""
        with self._handover:
            self._budget.set_pace(alert)

    def states(self) -> dict[str, CameraState]:
        """Return what is known now, by camera."""
        outage = (self._opening.code or PREPARING) if self.is_opening else self._observing.code
        with self._handover:
            spent_share, debt_s = self._budget.spent_share, self._budget.debt_s
        audit = self._audit  # which the observer's thread may take away meanwhile
        spending = Spending(spent_share, debt_s, audit.evidence.audited if audit is not None else None)
        return {camera: monitor.state(outage, spending) for camera, monitor in self.monitors.items()}

    def stop(self) -> None:
        """End the thread after the frame in hand; the build of an engine is stopped."""
        with self._handover:
            self._stopped = True
            self._handover.notify()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        if not self._config.calibration.contact_sheet:  # not only from the next calibration on
            try:
                remove_sheet(self._config.state_dir)
            except OSError as error:
                log.warning("event=observer problem=%r", f"the contact sheet cannot be removed: {error.strerror}")
        try:
            with ExitStack() as stack:
                observer, task = self._open(stack)
                self._start_audit(observer, stack)
                while (served := self._wait_for_frame()) is not None:
                    if self._audit is not None and self._audit.evidence.mismatch is not None:
                        observer, task = self._replace(stack)
                    self._observe(observer, task, served)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._tried.set()
            if self._sampler is not None:
                self._sampler.close()

    def _open(self, stack: ExitStack) -> tuple[Observer, VisionTask]:
        """Open the observer, attempt by attempt; the stack closes it. Raises _Stopped, and final errors."""
        while True:
            try:
                observer = self._open_observer(self._progress)
                stack.callback(_close, observer)
                task = VisionTask(self._spec, observer.inputs, observer.outputs, self._clock)
                break
            except TaredError as error:
                stack.close()
                self._pause(error, self._opening)
        self._opening.note_success()
        with self._handover:
            self._busy = False
        self.is_opening = False
        self._tried.set()
        return observer, task

    def _start_audit(self, observer: Observer, stack: ExitStack) -> None:
        """Start to compare the reference with ONNX Runtime, unless it is ONNX Runtime."""
        if observer.product_bits is not None and (audit := self._make_audit(observer.product_bits)) is not None:
            audit.start()
            self._audit = audit
            stack.callback(audit.stop)

    def _replace(self, stack: ExitStack) -> tuple[Observer, VisionTask]:
        """Open the reference that takes the place of the wrong one. Raises as `_open`."""
        assert self._open_checked is not None, "an audit has a reference to fall back on"
        self._audit = self._audited = None
        self.is_opening = True
        with self._handover:
            self._busy = True
        stack.close()
        self._open_observer = self._open_checked
        return self._open(stack)

    def _progress(self, fraction: float, doing: str) -> None:
        if self._stopped:
            raise _Stopped
        self._preparing(fraction, doing)

    def _pause(self, error: TaredError, outage: RetryState) -> None:
        """Wait after an error. Raises one that is final, and _Stopped."""
        if self._stopped:
            raise _Stopped
        if is_final(error):
            raise error
        pause_s = outage.note_failure(error)
        self._tried.set()
        with self._handover:
            if self._clock.wait_for(self._handover, lambda: self._stopped, pause_s):
                raise _Stopped

    def _wait_for_frame(self) -> ServedFrame | None:
        with self._handover:
            self._busy = False
            self._handover.wait_for(lambda: self._offered is not None or self._stopped)
            served, self._offered = self._offered, None
            self._busy = True
            return None if self._stopped else served

    def _observe(self, observer: Observer, task: VisionTask, served: ServedFrame) -> None:
        """Observe a frame, and pay for it, whatever comes of it."""
        started_s, failed = self._clock.monotonic_s(), True
        try:
            try:
                with span("observe"):
                    tensor, geometry = task.preprocess(served.frame.image)
                    observation = observer.observe(tensor)
                    reference = task.answer(observation.outputs, tensor, geometry)
                    previous = self._previous(served)
                    self.monitors[served.frame.camera].add(served, tensor, observation, reference, previous)
                if self._sampler is not None:
                    self._sampler.add(served, reference, geometry)
                if self._audit is not None and self._audit.is_due(self._now_ts(served.frame)):
                    self._audit.offer(self._audited_frame(observer, served.frame, tensor, observation))
                self._relight(observer, task, served.frame)
                failed = False
            finally:
                with self._handover:
                    self._budget.spend(self._clock.monotonic_s() - started_s, failed)
        except TaredError as error:
            self._pause(error, self._observing)
        except OSError as error:  # NumPy and Python open files for what is needed the first time
            found, remedy = f"{type(error).__name__}: {error}", "check what else uses descriptors on this machine"
            self._pause(AgentError("observer.resources", found, "room to observe a frame", remedy), self._observing)
        else:
            self._observing.note_success()

    def _relight(self, observer: Observer, task: VisionTask, frame: Frame) -> None:
        """Observe the frame once more in another light, where an alarm asks what that would gain."""
        monitor = self.monitors[frame.camera]
        if (relighting := monitor.relighting) is not None:
            tensor, _ = task.preprocess(relighting.relit(frame.image))
            monitor.add_relit(observer.observe(tensor).histograms)

    def _audited_frame(self, observer: Observer, frame: Frame, tensor: Array, observation: Observation) -> AuditedFrame:
        """Return what an audit needs of a frame. Raises what `infer` raises."""
        in_batch: dict[str, Array] = {}
        other, self._audited = self._audited, tensor.copy()
        takes_rows = all(spec.shape[:1] == (None,) for spec in (observer.inputs[0], *observer.outputs))
        if takes_rows and other is not None and other.shape == tensor.shape:
            row = self._random.randrange(2)
            rows = [other, other]
            rows[row] = tensor
            outputs = observer.infer(np.concatenate(rows))
            in_batch = {name: output[row : row + 1].copy() for name, output in outputs.items()}
        outputs = {name: output.copy() for name, output in observation.outputs.items()}
        number, camera = frame.id, frame.camera
        return AuditedFrame(camera, number, frame.ts, self._audited, outputs, observation.histograms, in_batch)


def _close(observer: Observer) -> None:
    """Close an observer; a fault in it must not hide an earlier one."""
    try:
        observer.close()
    except TaredError as error:
        log.warning("event=observer problem=%r", str(error))
