"""How an engine on probation does beside the one before, on live frames that both have answered."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from agent.collection.collection import SharedCollection
from agent.config import Config
from agent.monitoring.drift import DriftMonitor, DriftState, Regime
from agent.monitoring.estimates import Estimate, FidelityRecord, SinceStart, SinceStartBySecond
from agent.monitoring.evidence_file import EvidenceFile, RecalledEvidence
from agent.monitoring.view import FROZEN, ViewMonitor, ViewState
from agent.vision.decode import Prediction
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame
from calibrate.errors import CalibrationError
from calibrate.evidence import Interval
from calibrate.histogram import AbsHistogram
from engines.interface import Array, Observation


class PairedFidelityGain:
    """What it gains in fidelity. A scene that is hard for both tells nothing of either, so that only their difference
    on the same frame counts; and neighbours in a video are right and wrong together, so that a second is one value."""

    def __init__(self) -> None:
        self._seconds = SinceStartBySecond()

    def add(self, ts: float, candidate: Fidelity, before: Fidelity) -> None:
        """A frame of capture time `ts`, by each engine's fidelity."""
        if not (candidate.is_empty and before.is_empty):
            self._seconds.add(ts, (1.0 + candidate.value - before.value) / 2.0)

    @property
    def gain(self) -> Interval:
        """In [-1, 1]; low and high hold at all times at once, with 95 % confidence."""
        mean = self._seconds.estimate.interval
        if not mean.n:
            return Interval(0.0, -1.0, 1.0, 0)
        return Interval(2.0 * mean.estimate - 1.0, 2.0 * mean.low - 1.0, 2.0 * mean.high - 1.0, mean.n)


@dataclass(frozen=True)
class Spending:
    """What observing takes. share: of inference so far, 0.02 for one part in fifty. debt_s: spent ahead, owed."""

    share: float
    debt_s: float


@dataclass(frozen=True)
class CameraState:
    """A consistent picture of what is known of one camera, for telemetry and for whoever starts a job.

    collected: chosen frames, of all cameras, in the histograms of the current collection; telling: held-out ones beside
    them on which the reference found something. drift is None while nothing is calibrated.
    drift_since: capture time at which drift.state was reached. fidelity: of frames since fidelity_since that showed
    anything; empty_frames showed nothing to either engine. fidelity_hour: over the last hour, whatever served.
    settled: the same of frames on which the scales fitted the scene, since something was last amiss.
    outage: why nothing is observed now: PREPARING, or the code of the error; empty while frames are observed.
    gain: of what serves, while it is on probation, over the engine before; in [-1, 1].
    spending: of all observations, whatever they were for. view: what no recalibration cures. nbytes: of all histograms
    of this camera, and of the collection. absent: as `CameraMonitor.absent`.
    """

    collected: int
    telling: int
    drift: DriftState | None
    drift_since: float
    fidelity: Interval
    fidelity_since: float
    empty_frames: int
    fidelity_hour: Estimate
    settled: Estimate
    gain: Interval
    nonfinite: tuple[str, ...]
    outage: str
    spending: Spending
    view: ViewState
    nbytes: int
    absent: bool


_ABSENT_S = 600.0

CameraStates = Mapping[str, CameraState]  # by camera


def least_faithful(states: CameraStates) -> str:
    """The camera whose fidelity is lowest, by its estimate; of those on which nothing was judged, the first."""
    return min(states, key=lambda camera: states[camera].fidelity.estimate if states[camera].fidelity.n else math.inf)


class CameraMonitor:
    """Of one camera. Any thread may ask; one adds."""

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        gathering: SharedCollection,
        camera: str = "camera",
        beside: Callable[[], Sequence[Mapping[str, AbsHistogram]]] = tuple,
    ) -> None:
        """gathering: shared by all cameras of the model. beside: what the newest frames of each of the others show."""
        self._spec = spec
        self._config = config
        self._gathering = gathering
        self.camera = camera
        self._beside_us = beside
        self._lock = threading.Lock()  # guards everything below
        self._monitor: DriftMonitor | None = None
        self._view = ViewMonitor()
        self._watched = ""
        self._drift_name, self._drift_since = "calm", 0.0
        self._fidelity = FidelityRecord()
        self._settled = SinceStart()
        self._beside = PairedFidelityGain()
        self._memory: EvidenceFile | None = None
        self._nonfinite: set[str] = set()
        self._observed_s: float | None = None  # monotonic, the newest frame

    def remember(self, memory: EvidenceFile) -> None:
        """Keep what is found from now on, and recall what `watch` asks for."""
        self._memory = memory

    def watch(self, serving: Regime, others: Sequence[Regime], since: float, recall: bool = False) -> None:
        """From capture time `since` on watch what serves, beside other regimes: fresh evidence, unless what is
        remembered of this one is to be recalled."""
        with self._lock:
            switch_db = self._config.regimes.switch_db
            self._monitor = DriftMonitor(self._config.drift, switch_db, serving, others, self._beside_us)
            self._watched = serving.artefact
            self._drift_since = since
            self._drift_name = "calm"
            self._settled.start(since)
            self._beside = PairedFidelityGain()
            if self._memory is None:
                self._fidelity.start(since)
            else:
                recalled = self._memory.begin(serving.artefact, since, recall, self._fidelity)
                if recalled is not None:
                    self._recall(recalled, self._monitor, since)
            self._tell_gathering()

    def unwatch(self) -> None:
        """What serves from now on is the reference: there is nothing to hold against it."""
        with self._lock:
            self._monitor, self._watched = None, ""
            self._drift_name = "calm"
            self._fidelity.start(0.0)
            self._settled.start(0.0)
            self._tell_gathering()

    def compare(self, others: Sequence[Regime]) -> None:
        """These are the other regimes from now on; the evidence for what serves goes on."""
        with self._lock:
            if self._monitor is not None:
                self._monitor.compare(others)

    def renew_view(self) -> None:
        """What the camera shows is how it is meant to be: the operator says so."""
        with self._lock:
            self._view = ViewMonitor()

    def _recall(self, recalled: RecalledEvidence, monitor: DriftMonitor, since: float) -> None:
        """What cannot be gone on with, as evidence weighed under other settings, begins anew, and fidelity with it."""
        self._drift_since = recalled.since  # fidelity was started with the state of drift that lasts
        try:
            if recalled.drift is not None:
                monitor.recall(recalled.drift)
        except CalibrationError:
            self._start_fidelity(since)
        self._drift_name = monitor.state.state

    def _start_fidelity(self, ts: float) -> None:
        """What comes is of another engine, or of another scene."""
        self._drift_since = ts
        self._fidelity.start(ts)
        if self._memory is not None:
            self._memory.starts(ts)

    @property
    def recent(self) -> Mapping[str, AbsHistogram]:
        """What the newest frames show; empty while nothing is watched."""
        monitor = self._monitor  # which another thread may take away meanwhile
        return monitor.recent if monitor is not None and not self.absent else {}

    @property
    def absent(self) -> bool:
        """Whether nothing has been observed for so long that what is known of it may be of another light."""
        return self._observed_s is not None and time.monotonic() - self._observed_s > _ABSENT_S

    def state(self, outage: str, spending: Spending) -> CameraState:
        """What is known, with why nothing is observed now, if so."""
        with self._lock:
            since_start = self._fidelity.since_start
            return CameraState(
                *self._gathering.counts,
                self._monitor.state if self._monitor else None,
                self._drift_since,
                since_start.interval,
                since_start.since,
                since_start.empty,
                self._fidelity.hour,
                self._settled.estimate,
                self._beside.gain,
                tuple(sorted(self._nonfinite)),
                outage,
                spending,
                self._view.state,
                self._gathering.nbytes + (self._monitor.nbytes if self._monitor else 0),
                self.absent,
            )

    def history(self) -> list[tuple[float, float]]:
        """(capture time, fidelity) of the newest frames on which a calibrated engine was observed."""
        with self._lock:
            return self._fidelity.history

    def add(
        self,
        served: ServedFrame,
        tensor: Array,
        observation: Observation,
        reference: Prediction,
        before: Prediction | None = None,
    ) -> None:
        """Take an observed frame: as it was answered, its network input (1, C, H, W), what the reference says of it,
        and the engine before, if one on probation has answered it."""
        self._observed_s = time.monotonic()
        with self._lock:
            self._view.look(served.frame.ts, served.frame.image)
            if self._view.state.trouble == FROZEN:
                return  # nothing new is seen, however often
            self._nonfinite |= {name for name, h in observation.histograms.items() if h.nonfinite}
            self._gathering.add(served.frame, tensor, observation, reference)
            if served.engine_id != self._watched or self._monitor is None:
                return
            agreement = fidelity(served.result, reference, self._spec.min_sqnr_db)
            if before is not None:
                self._beside.add(served.frame.ts, agreement, fidelity(before, reference, self._spec.min_sqnr_db))
            value = None if agreement.is_empty else agreement.value
            self._fidelity.add(served.frame.ts, value)
            if self._memory is not None:
                self._memory.frame(served.frame.ts, value)
            if self._monitor.update(served.frame.ts, observation.histograms):
                self._judge(served.frame.ts, self._monitor)
            self._settle(served.frame.ts, value, self._monitor.state)

    def _settle(self, ts: float, value: float | None, drift: DriftState) -> None:
        """A block by itself may look worse than it is; where something is amiss, what came before counts no more."""
        if drift.state != "calm" or self._view.state.trouble:
            self._settled.start(ts)
        elif drift.judged and drift.serving_db <= self._config.drift.tolerance_db:
            self._settled.add(ts, value)

    def _judge(self, ts: float, monitor: DriftMonitor) -> None:
        """A block is over, at capture time `ts`. With an alarm another scene begins, and another with its end."""
        before, self._drift_name = self._drift_name, monitor.state.state
        if self._memory is not None:
            self._memory.block(monitor.memory())
        if before == self._drift_name:
            return
        self._drift_since = ts
        if "alarm" in (before, self._drift_name):
            self._start_fidelity(ts)
        self._tell_gathering()

    def _tell_gathering(self) -> None:
        (self._gathering.calm if self._drift_name == "calm" else self._gathering.alert)(self.camera)
