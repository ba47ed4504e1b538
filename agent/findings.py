"""What observed frames have shown: a calibration's data, the drift of the scene, the fidelity of what serves."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agent.capture import Frame
from agent.config import Config
from agent.decode import Prediction
from agent.drift import DriftMonitor, DriftState
from agent.fidelity import fidelity, is_empty
from agent.model_spec import ModelSpec
from agent.sampling import Collection
from calibrate.evidence import ConfidenceSequence, Interval
from calibrate.histogram import AbsHistogram
from engines.backend import Observation
from engines.calibration import Calibration

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
    anything; empty_frames showed nothing to either engine. outage: why nothing is observed now: PREPARING, or the code
    of the error; empty while frames are observed.
    """

    collected: int
    telling: int
    drift: DriftState | None
    drift_since: float
    fidelity: Interval
    fidelity_since: float
    empty_frames: int
    nonfinite: tuple[str, ...]
    outage: str


class Findings:
    """Any thread may ask; one adds.

    From a drift warning on it collects afresh, so that by the alarm most of the cure has been collected.
    """

    def __init__(self, spec: ModelSpec, config: Config) -> None:
        self._spec = spec
        self._config = config
        self._lock = threading.Lock()  # guards everything below
        self._collection = Collection(config.observe.held_out)
        self._monitor: DriftMonitor | None = None
        self._watched = ""
        self._drift_name, self._drift_since = "calm", 0.0
        self._fidelity, self._fidelity_since, self._empty_frames = ConfidenceSequence(), 0.0, 0
        self._nonfinite: set[str] = set()
        self._history: deque[tuple[float, float]] = deque(maxlen=_HISTORY)

    def watch(self, engine_id: str, calibration: Calibration, amax: Mapping[str, float], since: float) -> None:
        """From capture time `since` on watch this calibration in service: fresh evidence, fresh collection.

        amax: as for DriftMonitor.
        """
        with self._lock:
            self._monitor = DriftMonitor(self._config.drift, calibration, amax)
            self._watched = engine_id
            self._drift_name = "calm"
            self._start_fidelity(since)
            self._collection = Collection(self._config.observe.held_out)

    def collect_afresh(self) -> None:
        """Drop the collection and start a new one."""
        with self._lock:
            self._collection = Collection(self._config.observe.held_out)

    def collected(self) -> tuple[int, dict[str, AbsHistogram], list[NDArray[np.float32]]]:
        """A copy of the collection: frames in the histograms, histograms by tap, held-out network inputs."""
        with self._lock:
            collection = self._collection
            return collection.frames, dict(collection.histograms), list(collection.held_out)

    def state(self, outage: str) -> ObserverState:
        """What is known, with why nothing is observed now, if so."""
        with self._lock:
            return ObserverState(
                self._collection.frames,
                self._collection.telling,
                self._monitor.state if self._monitor else None,
                self._drift_since,
                self._fidelity.interval,
                self._fidelity_since,
                self._empty_frames,
                tuple(sorted(self._nonfinite)),
                outage,
            )

    def history(self) -> list[tuple[float, float]]:
        """(capture time, fidelity) of the newest frames on which a calibrated engine was observed."""
        with self._lock:
            return list(self._history)

    def add(self, served: Served, tensor: NDArray[np.float32], observation: Observation, reference: Prediction) -> None:
        """Take an observed frame: as it was answered, its network input (1, C, H, W), what the reference says of it."""
        with self._lock:
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
        agreement = fidelity(served.result, reference, self._spec.min_sqnr_db)
        if agreement.is_empty:
            self._empty_frames += 1
            return
        if self._fidelity.refuted:
            self._start_fidelity(served.frame.ts)
        self._history.append((served.frame.ts, agreement.value))
        self._fidelity.update(agreement.value)

    def _start_fidelity(self, since: float) -> None:
        self._fidelity, self._fidelity_since, self._empty_frames = ConfidenceSequence(), since, 0
