"""Would a recalibration on the newest frames gain more than is tolerated? Judged on frames that come after them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import inf
from typing import Any, Generic, TypeVar

from agent.config import DriftConfig
from calibrate.errors import CalibrationError
from calibrate.evidence import FULL_SCALE_DB, DriftDetector
from calibrate.histogram import AbsHistogram, merge_into, merged, nbytes
from calibrate.noise import NetworkNoise, TensorNoise, best_scales, tensor_noise
from engines.calibration import Calibration


class Blocks:
    """Puts observations into blocks of at least `block_s` of capture time: each ends with one, and the next follows it.

    Where observations are rarer, each is a block. A clock that jumps back starts a block anew.
    """

    def __init__(self, block_s: float) -> None:
        self.started_ts = float("inf")  # of the block of the observation that was placed last
        self._block_s = block_s
        self._ends = True  # whether that observation ended it
        self._last_ts = float("inf")

    def place(self, ts: float) -> tuple[bool, bool]:
        """Whether an observation of capture time `ts` is the first of its block, and whether it is the last."""
        jumped = ts < self._last_ts
        first = jumped or self._ends
        if first:
            self.started_ts = ts if jumped else self._last_ts
        self._last_ts = ts
        self._ends = ts - self.started_ts >= self._block_s
        return first, self._ends


_ENOUGH = 8  # frames, for scales that mean something
_IN_A_ROW = 2  # suspicious blocks: one is soon there
_LOOK_S = 60.0  # looking closely at a suspicion
_REST_S = 120.0, 1920.0  # from the beginning of one look to that of the next: doubled while suspicion comes back
_FORGIVEN_S = 600.0  # without suspicion
_WARNED_S = 600.0  # looking closely at a warning: one that lasts must not use up the credit
_WARNING_ENDS = 10.0  # the e-value; it began at 100
UNSEEN_S = 30.0  # between two observations, beyond which time that passed was not seen

Seen = TypeVar("Seen")
Scales = TypeVar("Scales")


class RecentScales(Generic[Seen, Scales]):
    """The scales that the newest frames would be given: of 8 to 24 of them, until the newest 8 are together."""

    def __init__(self, merge: Callable[[Seen, Seen], Seen], best: Callable[[Seen], Scales]) -> None:
        self.merged: Seen | None = None
        self.scales: Scales | None = None  # None while too few frames were seen
        self._merge, self._best = merge, best
        self._frames = 0

    def add(self, block: Seen, frames: int) -> None:
        if self._frames >= 2 * _ENOUGH:
            self.merged, self._frames = None, 0
        self.merged = block if self.merged is None else self._merge(self.merged, block)
        self._frames += frames
        if self._frames >= _ENOUGH:
            self.scales = self._best(self.merged)

    def restart(self) -> None:
        """What was seen says nothing of what comes."""
        self.merged, self.scales, self._frames = None, None, 0


class RecalibrationEvidence(Generic[Seen, Scales]):
    """Evidence from blocks of frames, one at a time, for a drift detector.

    The best scales of a block flatter it: of one frame, by half a dB in the mean, and by more than 2 now and then. So a
    block counts by the scales of the frames *before* it: by what a recalibration on those would gain on this one. These
    are chosen without looking at it, so that the detector's guarantee is about that gain, and until there are enough
    of them nothing counts.

    Blocks in a row that would gain too much under scales of their own are worth a closer look; where the newest frames'
    scales do not suit them either, the scene has just changed, and what was seen before is dropped.
    """

    def __init__(
        self,
        detector: DriftDetector,
        tolerance_db: float,
        merge: Callable[[Seen, Seen], Seen],
        best: Callable[[Seen], Scales],
    ) -> None:
        self.detector = detector
        self.recent = RecentScales(merge, best)
        self.warns = False
        self._tolerance_db = tolerance_db
        self._suspicious = 0  # blocks in a row
        self._looked_s = self._unsuspected_s = inf  # since the last look began, and since there was a suspicion
        self._rest_s, self._warned_s = _REST_S[0], 0.0

    @property
    def wants_more_frames(self) -> bool:
        """Whether more frames should be observed than usual."""
        return self._looked_s < _LOOK_S or (self.warns and self._warned_s < _WARNED_S)

    def update(self, block: Seen, frames: int, seconds: float, own_db: float, gain_db: float | None) -> None:
        """Take a block of so many frames that lasted so long.

        own_db: the gain in dB under the block's own best scales; gain_db: under `recent.scales`, None without them.
        """
        if gain_db is not None:
            self.detector.update(gain_db)
        self._suspicious = self._suspicious + 1 if own_db > self._tolerance_db else 0
        self._watch_closely(min(seconds, UNSEEN_S))
        if self._suspicious >= _IN_A_ROW and gain_db is not None and own_db - gain_db > self._tolerance_db:
            self.recent.restart()
        self.recent.add(block, frames)

    def _watch_closely(self, seconds: float) -> None:
        self._looked_s += seconds
        self._unsuspected_s += seconds
        if self._suspicious >= _IN_A_ROW:
            if self._looked_s >= self._rest_s:
                again = self._unsuspected_s < _FORGIVEN_S
                self._looked_s, self._rest_s = 0.0, min(2.0 * self._rest_s, _REST_S[1]) if again else _REST_S[0]
            self._unsuspected_s = 0.0
        before, e_value = self.warns, self.detector.e_value
        self.warns = self.detector.warning_detected or (before and e_value >= _WARNING_ENDS)
        self._warned_s = self._warned_s + seconds if before and self.warns else 0.0


_CALM_S = 120.0
_SWITCHES_PER_30D = 30.0  # for nothing, at most: one costs seconds, and no frame


@dataclass(frozen=True)
class Regime:
    """An artefact for one light: by tensor its scales, and the noise to signal it had where it was calibrated.

    weights: how much the noise of each tensor counts; those that it leaves float have none. own: under its scales, and
    the least: what a calibration leaves on the table is no drift.
    """

    artefact: str
    scales: Mapping[str, float]
    weights: Mapping[str, float]
    own: Mapping[str, tuple[float, float]]

    @classmethod
    def from_calibration(
        cls, artefact: str, calibration: Calibration, scales: Mapping[str, float], weights: Mapping[str, float]
    ) -> Regime:
        """scales: what serves, where a plan has chosen otherwise than the calibration."""
        noise = tensor_noise(calibration.histograms, [scales])
        totals = noise.ratios.sum(axis=2).tolist()
        own = {name: (today, least) for name, (today, least) in zip(noise.names, totals, strict=True)}
        return cls(artefact, dict(scales), dict(weights), own)

    def weights_compared_with(self, serving: Regime) -> dict[str, float]:
        """Its weights, those of the engine in service where that has them: of two, noise has to count alike."""
        return {name: serving.weights.get(name, own) for name, own in self.weights.items()}

    def baseline_db(self, weights: Mapping[str, float]) -> float:
        """The gain that its calibration left on the table."""
        today, least = (
            sum(weight * self.own[name][which] for name, weight in weights.items() if name in self.own)
            for which in (0, 1)
        )
        return 10.0 * math.log10(today / least) if least > 0.0 else 0.0


@dataclass(frozen=True)
class DriftState:
    """What the monitor knows; times are capture times, gains those of the latest block, 0 as long as none is judged.

    gain_db: of a recalibration over the known regime that fits best, in which the alarm believes with e_value.
    serving_db: the same over the engine in service. clipping_share: of that one's noise, what comes of values beyond
    the calibrated range; the rest is rounding, by steps that have become too wide. onset_ts: start of the present run
    of blocks that would gain more than is tolerated under scales of their own. switch_to: the artefact of the regime
    with the least noise, where another than the one in service has long been ahead; else empty. closely: whether more
    is to be observed than usual. gains_db: of a recalibration over each regime, by artefact.
    """

    judged: bool
    gain_db: float
    serving_db: float
    clipping_share: float
    e_value: float
    state: str  # calm, warning or alarm
    onset_ts: float | None
    switch_to: str
    closely: bool
    gains_db: Mapping[str, float]

    def is_worse_under(self, artefact: str, tolerance_db: float) -> bool:
        """Whether this scene would be worse off under another regime, and not well."""
        return self.gains_db.get(artefact, 0.0) > max(tolerance_db, self.serving_db)


class DriftMonitor:
    """Watches one calibration in service, beside those of other regimes.

    Frames of `block_s` seconds of capture time form a block, or a single frame where they are rarer; their merged
    histograms give the predicted gain of a recalibration in dB, under scales as a recalibration on the newest frames
    would choose them (see `RecalibrationEvidence`). What a calibration method itself leaves on the table, measured on
    the
    calibration's own histograms, is no drift and is taken off. The gain over the best of the regimes feeds a drift
    detector with the configured tolerance and false-alarm budget. Another hears how much less noise than the one in
    service the quietest would have, but no more than that one would gain: what fits is not left.
    """

    def __init__(
        self,
        config: DriftConfig,
        switch_db: float,
        serving: Regime,
        others: Sequence[Regime] = (),
        beside: Callable[[], Sequence[Mapping[str, AbsHistogram]]] = tuple,
    ) -> None:
        """switch_db: what another regime has to be ahead by. beside: what the newest frames show of each other camera
        that shares the calibration: a recalibration has to suit all of them."""
        self._beside = beside
        self._tolerance_db, self._switch_db = config.tolerance_db, switch_db
        self._detector = DriftDetector(config.false_alarms_per_30d, config.tolerance_db, config.block_s)
        # No method of this object: in a circle with its evidence, old histograms would stay for a hundred engines.
        self._best_scales = partial(_scales_beside, beside)
        self._evidence = RecalibrationEvidence(self._detector, config.tolerance_db, merged, self._best_scales)
        self._ahead = DriftDetector(_SWITCHES_PER_30D, switch_db, config.block_s)
        self._block: dict[str, AbsHistogram] = {}
        self._frames = 0  # of the block
        self._blocks = Blocks(config.block_s)
        self._gains_db: dict[str, float] = {}  # by artefact, in the latest block
        self._serving, self._quietest = serving, serving
        self._clipping_share = 0.0
        self._onset_ts: float | None = None
        self._calm_s = 0.0
        self.compare(others)

    def compare(self, others: Sequence[Regime]) -> None:
        """These are the other regimes from now on; one that leaves everything float has no gain to speak of."""
        self._regimes = (self._serving, *(regime for regime in others if regime.weights))
        self._weights = [regime.weights_compared_with(self._serving) for regime in self._regimes]
        pairs = zip(self._regimes, self._weights, strict=True)
        self._baselines_db = [regime.baseline_db(weights) for regime, weights in pairs]
        artefacts = {regime.artefact for regime in self._regimes}
        self._gains_db = {artefact: gain for artefact, gain in self._gains_db.items() if artefact in artefacts}
        if self._quietest.artefact not in artefacts:
            self._quietest = self._serving

    @property
    def nbytes(self) -> int:
        """What its histograms take."""
        return nbytes(self._block) + nbytes(self.recent)

    @property
    def recent(self) -> Mapping[str, AbsHistogram]:
        """What the newest frames show."""
        return self._evidence.recent.merged or {}

    @property
    def state(self) -> DriftState:
        serving = self._serving.artefact
        name = "alarm" if self._detector.drift_detected else "warning" if self._evidence.warns else "calm"
        switches = self._ahead.drift_detected and self._quietest is not self._serving
        return DriftState(
            judged=serving in self._gains_db,
            gain_db=min(self._gains_db.values(), default=0.0),
            serving_db=self._gains_db.get(serving, 0.0),
            clipping_share=self._clipping_share,
            e_value=self._detector.e_value,
            state=name,
            onset_ts=self._onset_ts,
            switch_to=self._quietest.artefact if switches else "",
            closely=self._evidence.wants_more_frames,
            gains_db=dict(self._gains_db),
        )

    def saved_state(self) -> dict[str, Any]:
        """What `restore` needs to go on after the last whole block, in JSON's types."""
        return {
            "detector": self._detector.state(),
            "warns": self._evidence.warns,
            "gains_db": self._gains_db,
            "clipping_share": self._clipping_share,
            "onset_ts": self._onset_ts,
            "calm_s": self._calm_s,
        }

    def restore(self, memory: Mapping[str, Any]) -> None:
        """Go on where `saved_state` was taken; who is ahead is found out anew, for other regimes may be known now.

        The newest frames are not remembered: eight have to come before another block counts. Raises CalibrationError
        (`evidence.state`), and then nothing is recalled.
        """
        try:
            onset_ts = None if memory["onset_ts"] is None else _finite(memory["onset_ts"])
            calm_s, clipping_share = _finite(memory["calm_s"]), _finite(memory["clipping_share"])
            known = {regime.artefact for regime in self._regimes}
            gains_db = {str(name): _finite(gain) for name, gain in memory["gains_db"].items() if name in known}
            detector, warns = memory["detector"], bool(memory["warns"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            found, expected = f"a drift monitor's state with {error!r}", "one as this version of tared wrote it"
            raise CalibrationError("evidence.state", found, expected, "start anew") from error
        self._detector.restore(detector)
        self._evidence.warns = warns
        self._onset_ts, self._calm_s, self._clipping_share = onset_ts, calm_s, clipping_share
        self._gains_db = gains_db

    def update(self, ts: float, histograms: dict[str, AbsHistogram]) -> bool:
        """Take one observed frame of capture time `ts`; True when it completed a block.

        A clock that jumps back starts the block anew; one that jumps ahead just ends it. Raises CalibrationError
        (`drift.tensors`) for histograms of another model.
        """
        if self._serving.weights and histograms.keys().isdisjoint(self._serving.weights):
            raise CalibrationError(
                "drift.tensors",
                f"histograms of {len(histograms)} tensors, such as {sorted(histograms)[:1]}",
                "those that the engine in service has in INT8",
                "restart the daemon: another model is observed than serves",
            )
        first, last = self._blocks.place(ts)
        if first:
            self._block, self._frames = {}, 0
        merge_into(self._block, histograms)
        self._frames += 1
        if last:
            self._judge(self._blocks.started_ts, ts)
        return last

    def _judge(self, began_ts: float, ended_ts: float) -> None:
        recent, own = self._evidence.recent.scales, self._best_scales(self._block) if self._beside() else None
        sets = [regime.scales for regime in self._regimes]
        others = [scales for scales in (recent, own) if scales is not None]
        found = tensor_noise(self._block, [*sets, *others])
        today = [found.under(which, weights) for which, weights in enumerate(self._weights)]
        # The last row is of the best for this block alone.
        which_own = -1 if own is None else len(sets) + len(others) - 1
        own_db = min(self._gains_under(found, which_own, today).values())
        gains_db = self._gains_under(found, len(sets), today)  # under recent scales; where there are none, its own
        self._gains_db = gains_db
        gain_db, seconds = min(gains_db.values()), ended_ts - began_ts
        self._evidence.update(self._block, self._frames, seconds, own_db, None if recent is None else gain_db)
        self._clipping_share = today[0].clipping / today[0].total if today[0].total > 0.0 else 0.0
        quietest = min(range(len(today)), key=lambda index: today[index].total)
        self._quietest = self._regimes[quietest]
        ahead_db = today[quietest].gain_db(today[0]) if today[quietest].total > 0.0 else FULL_SCALE_DB
        self._follow_calm(own_db, gain_db, began_ts, seconds)
        self._follow_ahead(min(ahead_db, gains_db[self._serving.artefact]))

    def _gains_under(self, found: TensorNoise, which: int, today: Sequence[NetworkNoise]) -> dict[str, float]:
        """By artefact what scales gain over its own, those of the set with this number."""
        rows = zip(self._regimes, self._weights, today, self._baselines_db, strict=True)
        return {
            regime.artefact: max(0.0, found.under(which, weights).gain_db(noise) - base)
            for regime, weights, noise, base in rows
        }

    def _follow_calm(self, own_db: float, gain_db: float, began_ts: float, seconds: float) -> None:
        """An alarm that nobody acted on is over when its cause has long been."""
        if own_db <= self._tolerance_db:
            self._onset_ts = None
        else:
            self._onset_ts = began_ts if self._onset_ts is None else min(began_ts, self._onset_ts)
        self._calm_s = self._calm_s + min(seconds, UNSEEN_S) if gain_db <= self._tolerance_db else 0.0
        if self._detector.drift_detected and self._calm_s >= _CALM_S:
            self._detector.reset()
            self._evidence.warns = False

    def _follow_ahead(self, ahead_db: float) -> None:
        if self._ahead.drift_detected and ahead_db <= self._switch_db:
            self._ahead.reset()  # nobody could switch, and it is no longer worth it
        self._ahead.update(ahead_db)


def _scales_beside(
    beside: Callable[[], Sequence[Mapping[str, AbsHistogram]]], seen: Mapping[str, AbsHistogram]
) -> dict[str, float]:
    """As a recalibration on these frames and on the newest ones of the other cameras would choose them."""
    return best_scales(reduce(merged, beside(), seen))


def _finite(value: Any) -> float:
    """Raises ValueError and the like for what is no finite number."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{value!r} where a number was kept")
    return number
