"""The observer thread: a reference engine beside the frame path.

Every observed frame yields three things at once: calibration data (histograms, or a place in the held-out set),
the drift signal, and the fidelity of the engine in service. The frame path offers frames and never waits.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.capture import Frame
from agent.config import Config
from agent.decode import Prediction
from agent.drift import DriftMonitor, DriftState
from agent.fidelity import fidelity, is_empty
from agent.model_spec import ModelSpec
from agent.sampling import Clock, Collection
from agent.vision import VisionTask
from calibrate.evidence import ConfidenceSequence, Interval
from calibrate.histogram import AbsHistogram
from engines.backend import Observer
from engines.calibration import Calibration
from engines.trace import span

_NICE = 10  # of the thread: the frame path goes first
_HISTORY = 10_000


@dataclass(frozen=True)
class Served:
    """A frame as it was answered: by which engine, with what, and when it was done."""

    frame: Frame
    engine_id: str
    result: Prediction
    done_ns: int


@dataclass(frozen=True)
class ObserverState:
    """A consistent picture of the observer, for telemetry and for whoever starts a job.

    collected: frames in the histograms of the current collection; telling: held-out frames beside them on which the
    reference found something. drift is None while nothing is calibrated.
    drift_since: capture time at which drift.state was reached. fidelity: of frames since fidelity_since that showed
    anything; empty_frames showed nothing to either engine.
    """

    collected: int
    telling: int
    drift: DriftState | None
    drift_since: float
    fidelity: Interval
    fidelity_since: float
    empty_frames: int
    nonfinite: tuple[str, ...]


class ObserverThread(threading.Thread):
    """Observes offered frames one at a time, at low priority.

    From a drift warning on it collects afresh, so that by the alarm most of the cure has been collected.
    """

    def __init__(self, observer: Observer, spec: ModelSpec, config: Config) -> None:
        super().__init__(name="observer", daemon=True)
        self._observer = observer
        self._task = VisionTask(spec, observer.inputs, observer.outputs)
        self._min_sqnr_db = spec.min_sqnr_db
        self._config = config
        self._handover = threading.Condition()
        self._offered: Served | None = None
        self._busy = False
        self._stopped = False
        self._clock = Clock(config.observe.period_s)  # guarded by _handover
        self._learnt = threading.Lock()  # guards everything below
        self._collection = Collection(config.observe.held_out)
        self._monitor: DriftMonitor | None = None
        self._watched = ""
        self._drift_name, self._drift_since = "calm", 0.0
        self._fidelity, self._fidelity_since, self._empty_frames = ConfidenceSequence(), 0.0, 0
        self._nonfinite: set[str] = set()
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)
        self.error: BaseException | None = None

    def offer(self, served: Served) -> None:
        """Called by the frame path; takes the frame if one is due and the observer is idle. Never waits."""
        if not self._handover.acquire(blocking=False):
            return
        try:
            if not self._busy and self._offered is None and self._clock.due(served.frame.ts):
                self._offered = served
                self._handover.notify()
        finally:
            self._handover.release()

    def watch(self, engine_id: str, calibration: Calibration, since: float) -> None:
        """From capture time `since` on watch this calibration in service: fresh evidence, fresh collection."""
        with self._learnt:
            self._monitor = DriftMonitor(self._config.drift, calibration)
            self._watched = engine_id
            self._drift_name = "calm"
            self._start_fidelity(since)
            self._collection = Collection(self._config.observe.held_out)

    def collect_afresh(self) -> None:
        """Drop the collection and start a new one."""
        with self._learnt:
            self._collection = Collection(self._config.observe.held_out)

    def set_pace(self, alert: bool) -> None:
        """Observe at the alert pace, or at the normal one."""
        period_s = self._config.observe.alert_period_s if alert else self._config.observe.period_s
        with self._handover:
            if period_s != self._clock.period_s:
                self._clock.change(period_s)

    def collected(self) -> tuple[int, dict[str, AbsHistogram], list[NDArray[np.float32]]]:
        """A copy of the collection: frames in the histograms, histograms by tap, held-out network inputs."""
        with self._learnt:
            collection = self._collection
            return collection.frames, dict(collection.histograms), list(collection.held_out)

    def state(self) -> ObserverState:
        with self._learnt:
            return ObserverState(
                self._collection.frames,
                self._collection.telling,
                self._monitor.state if self._monitor else None,
                self._drift_since,
                self._fidelity.interval,
                self._fidelity_since,
                self._empty_frames,
                tuple(sorted(self._nonfinite)),
            )

    def history(self) -> list[tuple[float, float]]:
        """(capture time, fidelity) of the newest frames on which a calibrated engine was observed."""
        with self._learnt:
            return list(self._history)

    def stop(self) -> None:
        """End the thread after the frame in hand."""
        with self._handover:
            self._stopped = True
            self._handover.notify()

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        try:
            while (served := self._take()) is not None:
                with span("observe"):
                    self._observe(served)
                with self._handover:
                    self._busy = False
        except BaseException as error:
            self.error = error
        finally:
            self._observer.close()

    def _take(self) -> Served | None:
        with self._handover:
            self._handover.wait_for(lambda: self._offered is not None or self._stopped)
            served, self._offered = self._offered, None
            self._busy = True
            return None if self._stopped else served

    def _observe(self, served: Served) -> None:
        tensor, _ = self._task.preprocess(served.frame.image)
        observation = self._observer.observe(tensor)
        reference = self._task.decode(observation.outputs, tensor.shape)
        with self._learnt:
            self._nonfinite |= {name for name, h in observation.histograms.items() if h.nonfinite}
            self._collection.add(tensor, observation.histograms, telling=not is_empty(reference))
            if served.engine_id != self._watched or self._monitor is None:
                return
            self._compare(served, reference)
            if not self._monitor.update(served.frame.ts, observation.histograms):
                return
            before, self._drift_name = self._drift_name, self._monitor.state.state
            if before != self._drift_name:
                self._drift_since = served.frame.ts
                self._start_fidelity(served.frame.ts)
        if before == "calm" and self._drift_name != "calm":
            self.collect_afresh()  # what was seen before the warning is not what the cure is for

    def _compare(self, served: Served, reference: Prediction) -> None:
        """Count one frame's fidelity; a frame on which nobody found anything tells nothing, and is counted apart."""
        agreement = fidelity(served.result, reference, self._min_sqnr_db)
        if agreement.is_empty:
            self._empty_frames += 1
            return
        if self._fidelity.refuted:
            self._start_fidelity(served.frame.ts)
        self._history.append((served.frame.ts, agreement.value))
        self._fidelity.update(agreement.value)

    def _start_fidelity(self, since: float) -> None:
        self._fidelity, self._fidelity_since, self._empty_frames = ConfidenceSequence(), since, 0
