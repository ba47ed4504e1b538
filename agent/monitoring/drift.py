"""Detect drift: would a recalibration on the newest frames gain more than is tolerated, judged on later frames?

From bottom to top:

1. `Blocks` groups observations into blocks of some seconds, so that neighbours in a video count once.
2. `RecentScales` holds the scales that a recalibration on the newest frames would choose.
3. `RecalibrationEvidence` weighs a block by what those scales would gain on it, and feeds a `DriftDetector`.
4. `Regime` is what a block is compared with: the calibration in service, and the other known ones.
5. `DriftMonitor` does all this for one camera and one engine in service; `DriftState` is what it knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass
from functools import partial, reduce
from math import inf
from typing import Any, Generic, TypeVar

from agent.common.state_files import finite
from agent.config import DriftConfig
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, merge_into, merged, nbytes
from calibrate.noise import NetworkNoise, TensorNoise, best_scales, tensor_noise
from calibrate.statistics.evidence import FULL_SCALE_DB, DriftDetector, Interval
from engines.calibration import Calibration

_ENOUGH = 8  # frames, for scales that mean something
_IN_A_ROW = 2  # suspicious blocks, after which more frames are observed
_CLOSE_S = 60.0  # how long a suspicion gets more frames
_REST_S = 120.0, 1920.0  # from the start of one such time to the next: doubled while suspicion comes back
_FORGIVEN_S = 600.0  # without suspicion
_WARNED_S = 600.0  # how long a warning gets more frames: one that lasts must not use up the credit
_WARNING_ENDS = 10.0  # the e-value; it began at 100
_YOUNG = 16  # blocks, in which a new process does not raise an alarm that its predecessor found not worth it
_CALM_S = 120.0  # without drift, after which an alarm that nobody acted on ends
_SWITCHES_PER_30D = 30.0  # for nothing, at most: one costs seconds, and no frame
UNSEEN_S = 30.0  # between two observations; what passed beyond it was not seen

Block = TypeVar("Block")
Scales = TypeVar("Scales")


class Blocks:
    """Group observations into blocks of at least `block_s` of capture time: each ends with one, the next follows it.

    Where observations are rarer, each is a block. A clock that jumps back starts a new block.
    """

    def __init__(self, block_s: float) -> None:
        self.started_ts = inf  # when the block of the latest observation began
        self._block_s = block_s
        self._is_complete = True
        self._last_ts = inf

    def place(self, ts: float) -> tuple[bool, bool]:
        """Return whether an observation of capture time `ts` is the first of its block, and whether it is the last."""
        jumped = ts < self._last_ts
        first = jumped or self._is_complete
        if first:
            self.started_ts = ts if jumped else self._last_ts
        self._last_ts = ts
        self._is_complete = ts - self.started_ts >= self._block_s
        return first, self._is_complete


class RecentScales(Generic[Block, Scales]):
    """The scales that a recalibration on the newest 8 to 24 frames would choose; renewed from the newest 8 on."""

    def __init__(self, merge: Callable[[Block, Block], Block], best: Callable[[Block], Scales]) -> None:
        self.merged: Block | None = None
        self.scales: Scales | None = None  # None while too few frames were seen
        self._merge, self._best = merge, best
        self._frames = 0

    def add(self, block: Block, frames: int) -> None:
        if self._frames >= 2 * _ENOUGH:
            self.merged, self._frames = None, 0
        self.merged = block if self.merged is None else self._merge(self.merged, block)
        self._frames += frames
        if self._frames >= _ENOUGH:
            self.scales = self._best(self.merged)

    def restart(self) -> None:
        """Drop what was seen: the scene has changed."""
        self.merged, self.scales, self._frames = None, None, 0


@dataclass
class RecalibrationEvidence(Generic[Block, Scales]):
    """Feed a drift detector with the gain that a recalibration would have on each block of frames.

    The best scales of a block flatter it: of one frame, by half a dB in the mean, and by more than 2 now and then. So a
    block counts by the scales of the frames *before* it: by what a recalibration on those would gain on this one. These
    are chosen without seeing it, so that the detector's guarantee is about that gain. Until there are enough frames
    nothing counts.

    Blocks in a row that would gain too much under scales of their own are suspicious: more frames are wanted. If the
    newest frames' scales do not suit them either, the scene has just changed, and what was seen before is dropped.
    """

    detector: DriftDetector
    tolerance_db: float
    merge: Callable[[Block, Block], Block]
    best: Callable[[Block], Scales]

    def __post_init__(self) -> None:
        self.recent = RecentScales(self.merge, self.best)
        self.warns = False
        self._suspicious = 0  # blocks in a row
        self._close_s = self._unsuspected_s = inf  # since more frames were first wanted; since the latest suspicion
        self._rest_s, self._warned_s = _REST_S[0], 0.0

    @property
    def wants_more_frames(self) -> bool:
        """True if more frames should be observed than usual."""
        return self._close_s < _CLOSE_S or (self.warns and self._warned_s < _WARNED_S)

    def update(self, block: Block, frames: int, seconds: float, own_db: float, gain_db: float | None) -> None:
        """Weigh a block.

        Args:
            block: The merged contents of its frames.
            frames: How many they are.
            seconds: How long it lasted.
            own_db: The gain in dB under the block's own best scales.
            gain_db: The gain in dB under `recent.scales`; None without them.
        """
        if gain_db is not None:
            self.detector.update(gain_db)
        self._suspicious = self._suspicious + 1 if own_db > self.tolerance_db else 0
        is_suspicious = self._suspicious >= _IN_A_ROW
        seconds = min(seconds, UNSEEN_S)
        self._close_s += seconds
        self._unsuspected_s += seconds
        if is_suspicious:
            if self._close_s >= self._rest_s:
                is_back = self._unsuspected_s < _FORGIVEN_S
                self._close_s, self._rest_s = 0.0, min(2.0 * self._rest_s, _REST_S[1]) if is_back else _REST_S[0]
            self._unsuspected_s = 0.0
        warned = self.warns
        self.warns = self.detector.warning_detected or (warned and self.detector.e_value >= _WARNING_ENDS)
        self._warned_s = self._warned_s + seconds if warned and self.warns else 0.0
        if is_suspicious and gain_db is not None and own_db - gain_db > self.tolerance_db:
            self.recent.restart()
        self.recent.add(block, frames)


@dataclass(frozen=True)
class Regime:
    """An artefact for one light.

    artefact: Its id.
    scales: By tensor.
    weights: By tensor, how much its noise counts; a tensor that the artefact leaves float has none.
    own: By tensor, the noise to signal where it was calibrated: under its scales, and the least possible. The
        difference is left on the table by the calibration method, and is no drift.
    """

    artefact: str
    scales: Mapping[str, float]
    weights: Mapping[str, float]
    own: Mapping[str, tuple[float, float]]

    @classmethod
    def from_calibration(
        cls, artefact: str, calibration: Calibration, scales: Mapping[str, float], weights: Mapping[str, float]
    ) -> Regime:
        """scales: those that serve, where a plan has chosen otherwise than the calibration."""
        return cls(artefact, dict(scales), dict(weights), _own_noise(calibration.histograms, scales))

    @classmethod
    def from_scene(cls, histograms: Mapping[str, AbsHistogram]) -> Regime:
        """Return the regime that suits these frames best; no artefact is built for it, and every tensor adds the same.

        Watching it says how far a later scene is from this one, in dB.
        """
        scales = best_scales(histograms)
        own = {name: noise for name, noise in _own_noise(histograms, scales).items() if noise[1] > 0.0}
        weights = {name: 1.0 / present for name, (present, _) in own.items()}
        return cls("scene", {name: scales[name] for name in own}, weights, own)

    def weights_compared_with(self, serving: Regime) -> dict[str, float]:
        """Return its weights, taken from the engine in service where that has them: noise has to count alike."""
        return {name: serving.weights.get(name, own) for name, own in self.weights.items()}

    def baseline_db(self, weights: Mapping[str, float]) -> float:
        """Return the gain in dB that its own calibration left on the table."""
        present, least = (
            sum(weight * self.own[name][which] for name, weight in weights.items() if name in self.own)
            for which in (0, 1)
        )
        return 10.0 * math.log10(present / least) if least > 0.0 else 0.0


def _own_noise(histograms: Mapping[str, AbsHistogram], scales: Mapping[str, float]) -> dict[str, tuple[float, float]]:
    noise = tensor_noise(histograms, [scales])
    totals = noise.ratios.sum(axis=2).tolist()
    return {name: (present, least) for name, (present, least) in zip(noise.names, totals, strict=True)}


@dataclass(frozen=True)
class DriftState:
    """A snapshot of the drift monitor. Times are capture times; gains are of the latest block, 0 until one is judged.

    judged: Whether a block was judged yet.
    gain_db: Of a recalibration over the known regime that fits best; `e_value` is the evidence for it.
    serving_db: The same over the engine in service.
    clipping_share: Of the noise of the engine in service, the share of values beyond the calibrated range. The rest is
        rounding, by steps that have become too wide.
    e_value: The evidence of the drift detector.
    state: calm, warning or alarm.
    onset_ts: Start of the present run of blocks that would gain more than is tolerated under scales of their own.
    switch_to: The artefact of the regime with the least noise, if another one than the one in service has long been
        ahead; else empty.
    closely: Whether more frames should be observed than usual.
    gains_db: Of a recalibration over each regime, by artefact.
    gain: The fidelity that the recalibration of `gain_db` is expected to gain; None where that cannot be said.
    """

    judged: bool
    gain_db: float
    serving_db: float
    clipping_share: float
    e_value: float
    state: str
    onset_ts: float | None
    switch_to: str
    closely: bool
    gains_db: Mapping[str, float]
    gain: Interval | None = None


# Returns the fidelity that a recalibration would gain, by its gain in dB and by the onset of the drift, as in
# DriftState; None where that cannot be said.
ExpectedGain = Callable[[float, "float | None"], "Interval | None"]


def unknown_gain(_gain_db: float, _onset_ts: float | None) -> None:
    """Say nothing of fidelity."""
    return


@dataclass
class DriftMonitor:
    """Watch one calibration in service, and compare it with other regimes.

    Frames of `block_s` seconds of capture time form a block, or a single frame where they are rarer. The merged
    histograms of a block give the predicted gain of a recalibration in dB, under scales as a recalibration on the
    newest frames would choose them (see `RecalibrationEvidence`). The gain that a calibration method leaves on the
    table, measured on the calibration's own histograms, is no drift and is subtracted.

    The gain over the best of the regimes feeds a drift detector with the configured tolerance and false-alarm budget.
    An alarm needs more than the detector: the fidelity that is expected to be gained must reach `min_gain`, too. Of
    what the detector has found, this only takes alarms away, so that its budget holds. An alarm lasts as long as the
    detector's.

    A second detector decides when to switch: it is fed with how much less noise the quietest regime would have than
    the one in service, but no more than that one would gain, for a regime that fits is not left.

    Args:
        config: Tolerance, length of a block and false-alarm budget.
        switch_db: By how many dB another regime has to be ahead.
        other_cameras: Returns the histograms of the newest frames of each other camera that shares the calibration: a
            recalibration has to suit all of them.
        expected_gain: Where it cannot say anything, the detector alone decides.
    """

    config: DriftConfig
    switch_db: float
    serving: Regime
    others: InitVar[Sequence[Regime]] = ()
    other_cameras: Callable[[], Sequence[Mapping[str, AbsHistogram]]] = tuple
    expected_gain: ExpectedGain = unknown_gain

    def __post_init__(self, others: Sequence[Regime]) -> None:
        self._detector = DriftDetector(self.config.false_alarms_per_30d, self.config.tolerance_db, self.config.block_s)
        # No method of this object: in a circle with its evidence, old histograms would stay for a hundred engines.
        self._best_scales = partial(_best_scales, self.other_cameras)
        self._evidence = RecalibrationEvidence(self._detector, self.config.tolerance_db, merged, self._best_scales)
        self._ahead = DriftDetector(_SWITCHES_PER_30D, self.switch_db, self.config.block_s)
        self._block: dict[str, AbsHistogram] = {}
        self._frames = 0  # frames in the block
        self._blocks = Blocks(self.config.block_s)
        self._gains_db: dict[str, float] = {}  # by artefact, in the latest block
        self._quietest = self.serving
        self._clipping_share = 0.0
        self._onset_ts: float | None = None
        self._calm_s = 0.0
        self._gain: Interval | None = None
        self._alarms, self._waits = False, 0
        self.compare(others)

    def compare(self, others: Sequence[Regime]) -> None:
        """Replace the other regimes; one that leaves everything float is ignored, for it has no gain."""
        self._regimes = (self.serving, *(regime for regime in others if regime.weights))
        self._weights = [regime.weights_compared_with(self.serving) for regime in self._regimes]
        pairs = zip(self._regimes, self._weights, strict=True)
        self._baselines_db = [regime.baseline_db(weights) for regime, weights in pairs]
        artefacts = {regime.artefact for regime in self._regimes}
        self._gains_db = {artefact: gain for artefact, gain in self._gains_db.items() if artefact in artefacts}
        if self._quietest.artefact not in artefacts:
            self._quietest = self.serving

    @property
    def nbytes(self) -> int:
        """Memory of its histograms."""
        return nbytes(self._block) + nbytes(self.recent)

    @property
    def recent(self) -> Mapping[str, AbsHistogram]:
        """The histograms of the newest frames."""
        return self._evidence.recent.merged or {}

    @property
    def state(self) -> DriftState:
        serving = self.serving.artefact
        switches = self._ahead.drift_detected and self._quietest is not self.serving
        return DriftState(
            judged=serving in self._gains_db,
            gain_db=min(self._gains_db.values(), default=0.0),
            serving_db=self._gains_db.get(serving, 0.0),
            clipping_share=self._clipping_share,
            e_value=self._detector.e_value,
            state="alarm" if self._alarms else "warning" if self._evidence.warns else "calm",
            onset_ts=self._onset_ts,
            switch_to=self._quietest.artefact if switches else "",
            closely=self._evidence.wants_more_frames,
            gains_db=dict(self._gains_db),
            gain=self._gain,
        )

    def gain_on(self, histograms: Mapping[str, AbsHistogram]) -> float:
        """Return what a recalibration would gain on these frames over the engine in service, in dB."""
        noise = tensor_noise(histograms, [self.serving.scales])
        weights = self._weights[0]
        return max(0.0, noise.under(-1, weights).gain_db(noise.under(0, weights)) - self._baselines_db[0])

    def raised_gain_on(self, histograms: Mapping[str, AbsHistogram], tensors: int) -> float:
        """Return what leaving so many of the loudest tensors float would gain under the present scales, in dB."""
        noise, weights = tensor_noise(histograms, [self.serving.scales]), self._weights[0]
        each = sorted(
            weights.get(name, 0.0) * float(ratios[0].sum())
            for name, ratios in zip(noise.names, noise.ratios, strict=True)
        )
        rest, total = sum(each[:-tensors]), sum(each)
        if total <= 0.0:  # there is no noise that could go
            return 0.0
        return 10.0 * math.log10(total / rest) if rest > 0.0 else FULL_SCALE_DB

    def saved_state(self) -> dict[str, Any]:
        """Return the state after the last whole block, for `restore`, in JSON's types."""
        return {
            "detector": self._detector.state(),
            "warns": self._evidence.warns,
            "gains_db": self._gains_db,
            "clipping_share": self._clipping_share,
            "onset_ts": self._onset_ts,
            "calm_s": self._calm_s,
            "alarms": self._alarms,
            "gain": None if self._gain is None else asdict(self._gain),
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from a `saved_state`. The quietest regime is determined again, for other ones may be known now.

        The newest frames are not kept: eight have to come before another block counts.

        Raises CalibrationError: `evidence.state` for what no `saved_state` has given; then nothing is restored.
        """
        try:
            onset_ts = None if saved["onset_ts"] is None else finite(saved["onset_ts"])
            calm_s, clipping_share = finite(saved["calm_s"]), finite(saved["clipping_share"])
            known = {regime.artefact for regime in self._regimes}
            gains_db = {str(name): finite(gain) for name, gain in saved["gains_db"].items() if name in known}
            detector, warns, alarms = saved["detector"], bool(saved["warns"]), bool(saved["alarms"])
            gain = None if saved["gain"] is None else Interval(**saved["gain"])
            for bound in () if gain is None else (gain.estimate, gain.low, gain.high, gain.n):
                finite(bound)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            found, expected = f"a drift monitor's state with {error!r}", "one as this version of tared wrote it"
            raise CalibrationError("evidence.state", found, expected, "start anew") from error
        self._detector.restore(detector)
        self._evidence.warns = warns
        self._alarms, self._gain = alarms and self._detector.drift_detected, gain
        self._waits = _YOUNG if self._detector.drift_detected and not alarms else 0
        self._onset_ts, self._calm_s, self._clipping_share = onset_ts, calm_s, clipping_share
        self._gains_db = gains_db

    def update(self, ts: float, histograms: dict[str, AbsHistogram]) -> bool:
        """Add an observed frame of capture time `ts`; True when it completed a block.

        A clock that jumps back starts the block again; one that jumps ahead just ends it.

        Raises CalibrationError: `drift.tensors` for histograms of another model.
        """
        if self.serving.weights and histograms.keys().isdisjoint(self.serving.weights):
            found = f"histograms of {len(histograms)} tensors, such as {sorted(histograms)[:1]}"
            expected = "those of the tensors that the engine in service has in INT8"
            remedy = "restart the daemon: the observed model is not the model in service"
            raise CalibrationError("drift.tensors", found, expected, remedy)
        first, last = self._blocks.place(ts)
        if first:
            self._block, self._frames = {}, 0
        merge_into(self._block, histograms)
        self._frames += 1
        if last:
            self._judge(self._blocks.started_ts, ts)
        return last

    def _judge(self, started_ts: float, ended_ts: float) -> None:
        """Weigh the block that is complete, by its noise under three kinds of scales."""
        # 1. The scales of each regime; 2. those of the newest frames before it; 3. its own best ones, which are the
        # last row of the noise anyway unless other cameras have to be suited as well.
        recent = self._evidence.recent.scales
        own = self._best_scales(self._block) if self.other_cameras() else None
        sets = [regime.scales for regime in self._regimes]
        candidates = [scales for scales in (recent, own) if scales is not None]
        noise = tensor_noise(self._block, [*sets, *candidates])
        present = [noise.under(which, weights) for which, weights in enumerate(self._weights)]
        own_row = -1 if own is None else len(sets) + len(candidates) - 1
        own_db = min(self._gains_under(noise, own_row, present).values())
        # Without recent scales this row is of its own ones.
        self._gains_db = self._gains_under(noise, len(sets), present)
        gain_db, seconds = min(self._gains_db.values()), ended_ts - started_ts
        self._evidence.update(self._block, self._frames, seconds, own_db, None if recent is None else gain_db)
        self._clipping_share = present[0].clipping / present[0].total if present[0].total > 0.0 else 0.0

        if own_db <= self.config.tolerance_db:
            self._onset_ts = None
        else:
            self._onset_ts = started_ts if self._onset_ts is None else min(started_ts, self._onset_ts)
        self._calm_s = self._calm_s + min(seconds, UNSEEN_S) if gain_db <= self.config.tolerance_db else 0.0
        if self._detector.drift_detected and self._calm_s >= _CALM_S:
            self._detector.reset()  # nobody acted on the alarm, and its cause has long gone
            self._evidence.warns = False
        self._gain = self.expected_gain(gain_db, self._onset_ts)
        # A process that has just begun has not seen the frames that kept its predecessor from an alarm.
        self._waits = max(self._waits - 1, 0)
        is_worth_it = not self._waits if self._gain is None else self._gain.estimate >= self.config.min_gain
        is_worth_it = is_worth_it or not self.config.min_gain  # tolerance_db alone decides
        self._alarms = self._detector.drift_detected and (self._alarms or is_worth_it)

        quietest = min(range(len(present)), key=lambda index: present[index].total)
        self._quietest = self._regimes[quietest]
        ahead_db = present[quietest].gain_db(present[0]) if present[quietest].total > 0.0 else FULL_SCALE_DB
        ahead_db = min(ahead_db, self._gains_db[self.serving.artefact])
        if self._ahead.drift_detected and ahead_db <= self.switch_db:
            self._ahead.reset()  # nobody could switch, and it is no longer worth it
        self._ahead.update(ahead_db)

    def _gains_under(self, noise: TensorNoise, row: int, present: Sequence[NetworkNoise]) -> dict[str, float]:
        """Return by artefact what the scales of a row of `noise` gain over its own."""
        rows = zip(self._regimes, self._weights, present, self._baselines_db, strict=True)
        return {
            regime.artefact: max(0.0, noise.under(row, weights).gain_db(own) - baseline_db)
            for regime, weights, own, baseline_db in rows
        }


def _best_scales(
    other_cameras: Callable[[], Sequence[Mapping[str, AbsHistogram]]], block: Mapping[str, AbsHistogram]
) -> dict[str, float]:
    """Choose scales as a recalibration on these frames and on the newest ones of the other cameras would."""
    return best_scales(reduce(merged, other_cameras(), block))
