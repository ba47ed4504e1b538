"""Collect what the observed frames of one camera show: drift, fidelity, and trouble with its view.

The observer hands every observed frame to the `CameraMonitor` of its camera. That feeds the shared collection, the
drift monitor and the fidelity record of the engine in service, and writes them to an evidence file. `CameraState` is
the picture of it all that telemetry and the control logic read. While a candidate is on probation,
`PairedFidelityGain` compares it with the previous engine on the same frames.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from agent.collection.collection import SharedCollection
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.state_files import parse_or_none
from agent.config import Config
from agent.monitoring.causes import LIGHT, Appearance, AppearanceHistory, Explanation, Relighting, explanation
from agent.monitoring.class_losses import ClassLosses, LostClass
from agent.monitoring.drift import DriftMonitor, DriftState, ExpectedGain, Regime, unknown_gain
from agent.monitoring.estimates import Estimate, FidelityRecord, SinceStart, SinceStartBySecond
from agent.monitoring.evidence_file import EvidenceFile
from agent.monitoring.gains import GainRecord
from agent.monitoring.view import FROZEN, ViewMonitor, ViewState
from agent.vision.answer import Answer, ServedClass
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram
from calibrate.statistics.evidence import Interval, shows_loss
from engines.interface import Array, Observation

_ABSENT_S = 600.0
_RAISED_TENSORS = 4  # which raised precision is reckoned to leave float
_MOST_GAINS = 4096  # seconds of a probation
_NEWEST = 24  # frames, whose fidelity says how much there is to gain
_KEPT_EVERY = 64  # values of classes, between two writes of their state


@dataclass(frozen=True)
class Spending:
    """The time that observing takes. share: of inference so far, 0.02 for one part in fifty. debt_s: spent ahead.

    audited: Frames on which the reference was compared with ONNX Runtime; None where it is ONNX Runtime itself.
    """

    share: float
    debt_s: float
    audited: int | None = None


@dataclass(frozen=True)
class CameraState:
    """A consistent snapshot of one camera, for telemetry and for the code that starts jobs.

    collected: Chosen frames, of all cameras, in the histograms of the current collection.
    informative: Held-out frames beside them on which the reference found something.
    drift: None while nothing is calibrated.
    drift_since: Capture time at which drift.state was reached.
    since_refusal: How far the scene is from that of the job that was refused; None where none is to be compared.
    fidelity: Of the frames since `fidelity_since` on which either engine found something.
    empty_frames: Frames since then on which neither found anything.
    fidelity_hour: Over the last hour, whatever served.
    settled: Fidelity of frames on which the scales fitted the scene, since the last drift or trouble.
    gain: Of the engine on probation over the previous one, in [-1, 1].
    is_loss: As `PairedFidelityGain.is_loss`, of the same.
    nonfinite: Tensors in which NaN or infinity was seen.
    outage: Why nothing is observed now: PREPARING, or the code of the error; empty while frames are observed.
    spending: Of all observations, whatever they were for.
    view: Trouble that no recalibration cures.
    nbytes: Of all histograms of this camera, and of the collection.
    absent: As `CameraMonitor.absent`.
    lost_classes: Classes of which the engine in service loses too much.
    explanation: Of the alarm that lasts; None without one, and until its remedies were tried out.
    """

    collected: int
    informative: int
    drift: DriftState | None
    drift_since: float
    since_refusal: DriftState | None
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
    lost_classes: tuple[LostClass, ...] = ()
    explanation: Explanation | None = None
    is_loss: bool = False


CameraStates = Mapping[str, CameraState]  # by camera


def least_faithful(states: CameraStates) -> str:
    """Return the camera with the lowest estimate of fidelity; the first one where nothing was judged yet."""
    return min(states, key=lambda camera: states[camera].fidelity.estimate if states[camera].fidelity.n else math.inf)


class PairedFidelityGain:
    """The gain in fidelity of a candidate over the previous engine, on live frames that both have answered.

    Only their difference on the same frame counts, for a scene that is hard for both says nothing of either. A second
    of frames is one value, for neighbours in a video are right and wrong together.
    """

    def __init__(self) -> None:
        self._seconds = SinceStartBySecond()
        self._gains = array("d")  # one a second, the sum of its frames'
        self._second_ts = -math.inf

    def add(self, ts: float, candidate: Fidelity, previous: Fidelity) -> None:
        """Add a frame of capture time `ts`, by each engine's fidelity."""
        if candidate.is_empty and previous.is_empty:
            return
        gain = candidate.value - previous.value
        self._seconds.add(ts, (1.0 + gain) / 2.0)
        if abs(ts - self._second_ts) < 1.0:
            self._gains[-1] += gain
        else:
            self._gains.append(gain)
            self._second_ts = ts
        del self._gains[:-_MOST_GAINS]

    @property
    def is_loss(self) -> bool:
        """True if the candidate is less faithful, with 95 % confidence at one look: the last one of a probation."""
        return shows_loss(np.array(self._gains))

    @property
    def gain(self) -> Interval:
        """In [-1, 1]; low and high hold at all times at once, with 95 % confidence."""
        mean = self._seconds.estimate.interval
        if not mean.n:
            return Interval(0.0, -1.0, 1.0, 0)
        return Interval(2.0 * mean.estimate - 1.0, 2.0 * mean.low - 1.0, 2.0 * mean.high - 1.0, mean.n)


@dataclass(frozen=True)
class _Judged:
    """An answer, compared with the reference's. pairs: as `Answer.pairs`. previous: of the previous engine's answer."""

    served: Fidelity
    pairs: Sequence[ServedClass]
    previous: Fidelity | None


def _judge(served: Answer, reference: Answer, previous: Answer | None) -> _Judged:
    before = fidelity(previous, reference) if previous is not None else None
    return _Judged(fidelity(served, reference), reference.pairs(served), before)


@dataclass
class CameraMonitor:
    """Collect what the observed frames of one camera show. One thread adds frames; any thread may read.

    Args:
        config: May be replaced at any time.
        collection: Shared by all cameras of the model.
        other_cameras: Returns the histograms of the newest frames of each other camera.

    `gains` says in fidelity what dB would gain; it is shared by all cameras of the model.
    """

    spec: ModelSpec
    config: Config
    collection: SharedCollection
    camera: str = "camera"
    other_cameras: Callable[[], Sequence[Mapping[str, AbsHistogram]]] = tuple
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._lock = threading.Lock()  # guards everything below
        self._drift: DriftMonitor | None = None
        self._since_refusal: DriftMonitor | None = None
        self._view = ViewMonitor()
        self._watched = ""
        self._drift_name, self._drift_since = "calm", 0.0
        self._fidelity = FidelityRecord()
        self._settled = SinceStart()
        self._paired = PairedFidelityGain()
        self._evidence = EvidenceFile(None)
        self.gains = GainRecord()
        self._classes = ClassLosses(self.config.observe.period_s, self.config.drift.false_alarms_per_30d)
        self._appearance = AppearanceHistory()
        self._relighting: Relighting | None = None
        self._explanation: Explanation | None = None
        self._nonfinite: set[str] = set()
        self._observed_s: float | None = None  # monotonic, the newest frame

    def remember(self, evidence: EvidenceFile) -> None:
        """Keep what is found from now on in a file, and let `watch` recall what is in it."""
        self._evidence = evidence

    def watch(self, serving: Regime, others: Sequence[Regime], since: float, recall: bool = False) -> None:
        """Watch what serves from capture time `since` on, compared with other regimes.

        The evidence starts from scratch. With `recall` it goes on with what the file has of the same artefact.
        """
        with self._lock:
            self._drift = self._drift_from(serving, others, self._expected_gain)
            self._watched = serving.artefact
            self._drift_since = since
            self._settled.start(since)
            self._paired = PairedFidelityGain()
            self._classes.start()
            self._appearance = AppearanceHistory()
            self._relighting = self._explanation = None
            recalled = self._evidence.start(serving.artefact, since, recall, self._fidelity)
            if recalled is not None:
                self._drift_since = recalled.since  # fidelity was started with the state of drift that lasts
                try:
                    if recalled.parts["drift"] is not None:
                        self._drift.restore(recalled.parts["drift"])
                except CalibrationError:  # evidence that was weighed under other settings
                    self._start_fidelity(since)
                for part, restore in (("classes", self._classes.restore), ("appearances", self._appearance.restore)):
                    if (kept := recalled.parts[part]) is not None:
                        parse_or_none(partial(restore, kept))  # a damaged one stays as new
            self._drift_name = self._drift.state.state
            self._alert_collection()

    def unwatch(self) -> None:
        """Stop watching: from now on the reference serves, with which nothing can be compared."""
        with self._lock:
            self._drift, self._watched = None, ""
            self._classes.start()
            self._relighting = self._explanation = None
            self._drift_name = "calm"
            self._fidelity.start(0.0)
            self._settled.start(0.0)
            self._alert_collection()

    def compare(self, others: Sequence[Regime]) -> None:
        """Replace the other regimes; the evidence for the engine in service keeps serving."""
        with self._lock:
            if self._drift is not None:
                self._drift.compare(others)

    def compare_with_refused(self, scene: Regime | None) -> None:
        """Start to compare the scene with that of a refused job, whatever serves; None ends it."""
        with self._lock:
            self._since_refusal = self._drift_from(scene) if scene is not None else None

    def reset_view(self) -> None:
        """Take the present view as the usual one: the operator says that it is how it is meant to be."""
        with self._lock:
            self._view = ViewMonitor()

    @property
    def recent(self) -> Mapping[str, AbsHistogram]:
        """The histograms of the newest frames; empty while nothing is watched."""
        drift = self._drift or self._since_refusal  # which another thread may take away meanwhile
        return drift.recent if drift is not None and not self.absent else {}

    @property
    def absent(self) -> bool:
        """True if nothing has been observed for so long that what is known may be of another light."""
        return self._observed_s is not None and self.clock.monotonic_s() - self._observed_s > _ABSENT_S

    def state(self, outage: str, spending: Spending) -> CameraState:
        """Return what is known, with the reason why nothing is observed now, if so."""
        with self._lock:
            collected, informative = self.collection.counts
            since_start = self._fidelity.since_start.estimate
            return CameraState(
                collected=collected,
                informative=informative,
                drift=self._drift.state if self._drift else None,
                drift_since=self._drift_since,
                since_refusal=self._since_refusal.state if self._since_refusal else None,
                fidelity=since_start.interval,
                fidelity_since=since_start.since,
                empty_frames=since_start.empty,
                fidelity_hour=self._fidelity.hour.estimate,
                settled=self._settled.estimate,
                gain=self._paired.gain,
                nonfinite=tuple(sorted(self._nonfinite)),
                outage=outage,
                spending=spending,
                view=self._view.state,
                nbytes=self.collection.nbytes + sum(each.nbytes for each in (self._drift, self._since_refusal) if each),
                absent=self.absent,
                lost_classes=self._classes.lost,
                explanation=self._explanation,
                is_loss=self._paired.is_loss,
            )

    def history(self) -> list[tuple[float, float]]:
        """(capture time, fidelity) of the newest frames on which a calibrated engine was observed."""
        with self._lock:
            return self._fidelity.newest()

    def add(
        self,
        served: ServedFrame,
        tensor: Array,
        observation: Observation,
        reference: Answer,
        previous: Answer | None = None,
    ) -> None:
        """Add an observed frame.

        Args:
            served: The frame, and what the engine in service answered.
            tensor: Its network input (1, C, H, W).
            observation: The histograms of the reference engine.
            reference: The answer of the reference engine.
            previous: The answer of the previous engine, while a candidate is on probation.
        """
        self._observed_s = self.clock.monotonic_s()
        ts = served.frame.ts
        with self._lock:
            self._view.update(ts, served.frame.image)
            if self._view.state.trouble == FROZEN:
                return  # the same frame once more shows nothing
            is_watched = served.engine_id == self._watched and self._drift is not None
        # Without the lock: a crowd takes tenths of a second, and the supervisor and the frame path read meanwhile.
        judged = _judge(served.result, reference, previous) if is_watched else None
        with self._lock:
            self._nonfinite |= {name for name, h in observation.histograms.items() if h.nonfinite}
            self.collection.add(served.frame, tensor, observation, reference)
            if self._since_refusal is not None:
                self._since_refusal.update(ts, observation.histograms)
            drift = self._drift
            if judged is None or served.engine_id != self._watched or drift is None:
                return
            if judged.previous is not None:
                self._paired.add(ts, judged.served, judged.previous)
            value = None if judged.served.is_empty else judged.served.value
            self._fidelity.add(ts, value)
            self._evidence.note_frame(ts, value)
            kept = self._classes.values // _KEPT_EVERY
            self._classes.add(served.frame.id, ts, judged.pairs)
            if self._classes.values // _KEPT_EVERY > kept:
                self._evidence.note("classes", self._classes.state())
            features = self._view.features  # the newest frame's
            if features and self._appearance.add(Appearance.from_features(features, reference.confidence)):
                self._evidence.note("appearances", self._appearance.state())
            if drift.update(ts, observation.histograms):
                self._end_block(ts, drift)
            state = drift.state
            if state.state != "calm" or self._view.state.trouble:
                self._settled.start(ts)
            elif state.judged and state.serving_db <= self.config.drift.tolerance_db:
                self._settled.add(ts, value)

    @property
    def relighting(self) -> Relighting | None:
        """The relighting under which the observed frame is observed once more; None if it is not."""
        with self._lock:
            return self._relighting

    def add_relit(self, histograms: Mapping[str, AbsHistogram]) -> None:
        """Add what the reference saw of the relit frame."""
        with self._lock:
            if self._relighting is None or self._drift is None:
                return
            seen = self._relighting.add(histograms)
            if seen is not None:
                self._relighting = None
                self._explain(self._drift, self._drift.gain_on(seen))

    def _explain(self, drift: DriftMonitor, relit_db: float | None) -> None:
        """Put the remedies for an alarm beside each other."""
        gains_db = {name: gain for name, gain in drift.state.gains_db.items() if name != self._watched}
        hour = self._fidelity.hour.estimate.interval
        self._explanation = explanation(
            self._appearance,
            drift.gain_on(drift.recent) if drift.recent else drift.state.serving_db,
            drift.raised_gain_on(drift.recent, _RAISED_TENSORS) if drift.recent else 0.0,
            gains_db,
            relit_db,
            hour.n > 0 and hour.estimate >= 1.0 - self.config.max_loss,
            lambda gain_db: self._expected_gain(gain_db, drift.state.onset_ts),
        )

    def _expected_gain(self, gain_db: float, onset_ts: float | None) -> Interval | None:
        """Return the fidelity that so many dB would gain on the newest frames, of a drift that began then."""
        newest = self._fidelity.newest(_NEWEST)
        return self.gains.expected_gain(gain_db, [value for ts, value in newest if onset_ts is None or ts >= onset_ts])

    def _drift_from(
        self, regime: Regime, others: Sequence[Regime] = (), expected_gain: ExpectedGain = unknown_gain
    ) -> DriftMonitor:
        return DriftMonitor(
            self.config.drift, self.config.regimes.switch_db, regime, others, self.other_cameras, expected_gain
        )

    def _end_block(self, ts: float, drift: DriftMonitor) -> None:
        """Note a block that ended at capture time `ts`. An alarm begins another scene, and so does its end."""
        last, self._drift_name = self._drift_name, drift.state.state
        self._evidence.note("drift", drift.saved_state())
        if last != self._drift_name:
            self._drift_since = ts
            self._relighting = self._explanation = None
            if "alarm" in (last, self._drift_name):
                self._start_fidelity(ts)
            self._alert_collection()
        # Also where the alarm has outlived a process.
        if self._drift_name == "alarm" and self._relighting is None and self._explanation is None:
            if self._appearance.changes[0].cause == LIGHT:  # other light has to be tried out first
                self._relighting = Relighting(self._appearance.relighting)
            else:
                self._explain(drift, None)

    def _start_fidelity(self, ts: float) -> None:
        self._drift_since = ts
        self._fidelity.start(ts)
        self._evidence.note_start(ts)

    def _alert_collection(self) -> None:
        (self.collection.calm if self._drift_name == "calm" else self.collection.alert)(self.camera)
