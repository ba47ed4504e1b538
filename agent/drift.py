"""Has the scene left the known calibrations behind? The predicted gain of a recalibration, block by block."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.config import DriftConfig
from agent.sampling import Blocks
from calibrate.errors import CalibrationError
from calibrate.evidence import DriftDetector
from calibrate.histogram import AbsHistogram, merge_into, nbytes
from calibrate.noise import best_scales, tensor_noise
from engines.calibration import Calibration

_CALM_S = 120.0
_UNSEEN_S = 30.0  # between two observations, beyond which time that passed was not seen
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
    def of(
        cls, artefact: str, calibration: Calibration, scales: Mapping[str, float], weights: Mapping[str, float]
    ) -> Regime:
        """scales: what serves, where a plan has chosen otherwise than the calibration."""
        noise = tensor_noise(calibration.histograms, [scales])
        totals = noise.ratios.sum(axis=2).tolist()
        own = {name: (today, least) for name, (today, least) in zip(noise.names, totals, strict=True)}
        return cls(artefact, dict(scales), dict(weights), own)

    def weights_beside(self, serving: Regime) -> dict[str, float]:
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
    """What the monitor knows; times are capture times, gains those of the latest block.

    gain_db: of a recalibration over the known regime that fits best, in which the alarm believes with e_value.
    serving_db: the same over the engine in service. clipping_share: of that one's noise, what comes of values beyond
    the calibrated range; the rest is rounding, by steps that have become too wide. onset_ts: start of the present run
    of blocks whose gain_db is above the tolerance. switch_to: the artefact of the regime with the least noise, where
    another than the one in service has long been ahead; else empty.
    """

    gain_db: float
    serving_db: float
    clipping_share: float
    e_value: float
    state: str  # calm, warning or alarm
    onset_ts: float | None
    switch_to: str


class DriftMonitor:
    """Watches one calibration in service, beside those of other regimes.

    Frames of `block_s` seconds of capture time form a block, or a single frame where they are rarer; their merged
    histograms give the predicted gain of a recalibration in dB. What a calibration method itself leaves on the table,
    measured on the calibration's own histograms, is no drift and is taken off. The gain over the best of the regimes
    feeds a drift detector with the configured tolerance and false-alarm budget; how much less noise than the one in
    service the quietest would have, another.

    A block of few frames has scales that suit it better than any calibration could: of one frame, by 0.1 to 0.6 dB in
    the mean and up to 2.4. So from a warning on, a block is held against the best scales of all that was seen since.
    """

    def __init__(self, config: DriftConfig, switch_db: float, serving: Regime, others: Sequence[Regime] = ()) -> None:
        """switch_db: what another regime has to be ahead by."""
        self._tolerance_db, self._switch_db = config.tolerance_db, switch_db
        self._regimes = (serving, *others)
        self._weights = [regime.weights_beside(serving) for regime in self._regimes]
        pairs = zip(self._regimes, self._weights, strict=True)
        self._baselines_db = [regime.baseline_db(weights) for regime, weights in pairs]
        self._detector = DriftDetector(config.false_alarms_per_30d, config.tolerance_db, config.block_s)
        self._ahead = DriftDetector(_SWITCHES_PER_30D, switch_db, config.block_s)
        self._block: dict[str, AbsHistogram] = {}
        self._since_warning: dict[str, AbsHistogram] = {}
        self._blocks = Blocks(config.block_s)
        self._gains_db = [0.0] * len(self._regimes)
        self._quietest = 0  # of the regimes, in the latest block
        self._clipping_share = 0.0
        self._onset_ts: float | None = None
        self._calm_s = 0.0

    @property
    def nbytes(self) -> int:
        """What its histograms take."""
        return nbytes(self._block) + nbytes(self._since_warning)

    @property
    def state(self) -> DriftState:
        reached = self._detector.drift_detected, self._detector.warning_detected
        name = {(True, True): "alarm", (False, True): "warning"}.get(reached, "calm")
        switch_to = self._regimes[self._quietest].artefact if self._ahead.drift_detected and self._quietest else ""
        serving_db, e_value = self._gains_db[0], self._detector.e_value
        return DriftState(
            min(self._gains_db), serving_db, self._clipping_share, e_value, name, self._onset_ts, switch_to
        )

    def memory(self) -> dict[str, Any]:
        """What `recall` needs to go on after the last whole block, in JSON's types."""
        return {
            "detector": self._detector.state(),
            "gains_db": self._gains_db,
            "clipping_share": self._clipping_share,
            "onset_ts": self._onset_ts,
            "calm_s": self._calm_s,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on where `memory` was taken; who is ahead is found out anew, for other regimes may be known now.

        Raises CalibrationError (`evidence.state`).
        """
        try:
            onset_ts = None if memory["onset_ts"] is None else float(memory["onset_ts"])
            calm_s, clipping_share = float(memory["calm_s"]), float(memory["clipping_share"])
            gains_db = [float(gain) for gain in memory["gains_db"]]
            detector = memory["detector"]
        except (KeyError, TypeError, ValueError) as error:
            found, expected = f"a drift monitor's state with {error!r}", "one as this version of tared wrote it"
            raise CalibrationError("evidence.state", found, expected, "start anew") from error
        self._detector.restore(detector)
        self._onset_ts, self._calm_s, self._clipping_share = onset_ts, calm_s, clipping_share
        if len(gains_db) == len(self._gains_db):
            self._gains_db = gains_db

    def update(self, ts: float, histograms: dict[str, AbsHistogram]) -> bool:
        """Take one observed frame of capture time `ts`; True when it completed a block.

        A clock that jumps back starts the block anew; one that jumps ahead just ends it.
        """
        first, last = self._blocks.place(ts)
        if first:
            self._block = {}
        merge_into(self._block, histograms)
        if last:
            self._judge(self._blocks.began_ts, ts)
        return last

    def _judge(self, began_ts: float, ended_ts: float) -> None:
        sets = [regime.scales for regime in self._regimes]
        if self._detector.warning_detected:
            merge_into(self._since_warning, self._block)
            sets.append(best_scales(self._since_warning))
        else:
            self._since_warning = {}
        found = tensor_noise(self._block, sets)
        today = [found.under(which, weights) for which, weights in enumerate(self._weights)]
        best = len(self._regimes)  # the set after theirs; where there is none, the least of the block itself
        gains_db = [
            found.under(best, weights).gain_db(noise) for noise, weights in zip(today, self._weights, strict=True)
        ]
        self._gains_db = [max(0.0, gain - base) for gain, base in zip(gains_db, self._baselines_db, strict=True)]
        self._quietest = min(range(len(today)), key=lambda index: today[index].total)
        self._clipping_share = today[0].clipping / today[0].total if today[0].total > 0.0 else 0.0
        self._weigh(min(self._gains_db), today[self._quietest].gain_db(today[0]), began_ts, ended_ts)

    def _weigh(self, gain_db: float, ahead_db: float, began_ts: float, ended_ts: float) -> None:
        """Take a block's gain as evidence, and by how much the quietest regime is ahead."""
        if gain_db <= self._tolerance_db:
            self._onset_ts = None
            self._calm_s += min(ended_ts - began_ts, _UNSEEN_S)
        else:
            self._onset_ts = min(began_ts, ended_ts if self._onset_ts is None else self._onset_ts)
            self._calm_s = 0.0
        if self._detector.drift_detected and self._calm_s >= _CALM_S:
            self._detector.reset()  # an alarm nobody acted on is over when its cause is
        self._detector.update(gain_db)
        if self._ahead.drift_detected and ahead_db <= self._switch_db:
            self._ahead.reset()  # nobody could switch, and it is no longer worth it
        self._ahead.update(ahead_db)
