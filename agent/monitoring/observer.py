"""Run the observer thread: a reference engine beside the frame path.

Every observed frame yields three things at once: calibration data (histograms, or a place in the held-out set), the
drift signal, and the fidelity of the engine in service. The frame path offers frames and never waits, neither for the
reference engine, which may have to be built first, nor for one that fails: the video goes on without it.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial

from agent.camera.capture import Frame
from agent.collection.collection import SharedCollection
from agent.collection.report import remove_sheet
from agent.collection.selection import HELD_OUT_EVERY
from agent.common.errors import AgentError
from agent.common.timing import Backoff, RetryState, is_final
from agent.config import Config
from agent.monitoring.camera_monitor import CameraMonitor, CameraState, Spending
from agent.monitoring.observation_budget import CameraRota, ObservationBudget
from agent.vision.decode import Prediction
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame, VisionTask
from calibrate.errors import TaredError
from calibrate.histogram import AbsHistogram
from engines.interface import Observer, Progress, silent
from engines.trace import span

log = logging.getLogger(__package__)

_NICE = 10  # of the thread: the frame path goes first
# Seconds between attempts to open it, at random up to so much: it never gives up, and costs a build each half hour.
_OPENING_S = (30.0, 3600.0)
_OBSERVING_S = (1.0, 30.0)  # the same between attempts to observe
_WELL_AFTER = 5  # observed frames in a row, after which an outage has ended
PREPARING = "preparing"

OpenObserver = Callable[[Progress], Observer]


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
        previous: Callable[[ServedFrame], Prediction | None] = lambda _: None,
    ) -> None:
        """Args:
        open_observer: Opens the reference engine, and builds it first where it has to.
        spec: Of the model.
        config: Its sections observe, calibration, recalibration and cameras count.
        on_change: Called in this thread when observing fails, and when it works again.
        preparing: Called in this thread with the progress of a build.
        previous: Returns the answer of the engine whose place a candidate on probation has taken; None without one.
        """
        super().__init__(name="observer", daemon=True)
        self._open_observer = open_observer
        self._spec = spec
        self._config = config
        self._preparing = preparing
        self._previous = previous
        self._opening = RetryState(on_change, Backoff(*_OPENING_S), well_after=1)
        self._observing = RetryState(on_change, Backoff(*_OBSERVING_S), _WELL_AFTER)
        self._tried, self._opened = threading.Event(), threading.Event()
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
            camera: CameraMonitor(spec, config, self.collection, camera, partial(self._recent_of_others, camera))
            for camera in cameras
        }
        self.error: BaseException | None = None

    def wait_until_tried(self, timeout_s: float) -> bool:
        """Wait until the reference engine is open, or could not be opened; False where `timeout_s` ends before."""
        return self._tried.wait(timeout_s)

    @property
    def is_opening(self) -> bool:
        """True if the reference engine is still to come."""
        return not self._opened.is_set()

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
        outage = self._observing.code if self._opened.is_set() else self._opening.code or PREPARING
        with self._handover:
            spending = Spending(self._budget.spent_share, self._budget.debt_s)
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
                while (served := self._wait_for_frame()) is not None:
                    self._observe(observer, task, served)
        except _Stopped:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self._tried.set()

    def _open(self, stack: ExitStack) -> tuple[Observer, VisionTask]:
        """Open the observer, attempt by attempt; the stack closes it. Raises _Stopped, and final errors."""
        while True:
            try:
                observer = self._open_observer(self._progress)
                stack.callback(_close, observer)
                task = VisionTask(self._spec, observer.inputs, observer.outputs)
                break
            except TaredError as error:
                stack.close()
                self._pause(error, self._opening)
        self._opening.note_success()
        with self._handover:
            self._busy = False
        self._opened.set()
        self._tried.set()
        return observer, task

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
            if self._handover.wait_for(lambda: self._stopped, pause_s):
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
        started_s, failed = time.monotonic(), True
        try:
            try:
                with span("observe"):
                    tensor, _ = task.preprocess(served.frame.image)
                    observation = observer.observe(tensor)
                    reference = task.decode(observation.outputs, tensor.shape)
                    previous = self._previous(served)
                    self.monitors[served.frame.camera].add(served, tensor, observation, reference, previous)
                failed = False
            finally:
                with self._handover:
                    self._budget.spend(time.monotonic() - started_s, failed)
        except TaredError as error:
            self._pause(error, self._observing)
        except (OSError, MemoryError) as error:  # NumPy and Python open files for what is needed the first time
            found, remedy = f"{type(error).__name__}: {error}", "see what else takes descriptors or memory here"
            self._pause(AgentError("observer.resources", found, "room to observe a frame", remedy), self._observing)
        else:
            self._observing.note_success()


def _close(observer: Observer) -> None:
    """Close an observer; a fault in it must not hide an earlier one."""
    try:
        observer.close()
    except TaredError as error:
        log.warning("event=observer problem=%r", str(error))
