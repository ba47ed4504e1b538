"""Has the scene left the known calibrations behind? The predicted gain of a recalibration, block by block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.config import DriftConfig
from agent.sampling import Blocks
from calibrate.errors import CalibrationError
from calibrate.evidence import DriftDetector
from calibrate.histogram import AbsHistogram, merge
from calibrate.noise import network_noise
from engines.calibration import Calibration

_CALM_S = 120.0
_SWITCHES_PER_30D = 30.0  # for nothing, at most: one costs seconds, and no frame


@dataclass(frozen=True)
class Regime:
    """An artefact's scales by tensor, and the gain in dB that its calibration left on the table where it was made."""

    artefact: str
    scales: Mapping[str, float]
    baseline_db: float

    @classmethod
    def of(cls, artefact: str, calibration: Calibration, scales: Mapping[str, float]) -> Regime:
        """scales: what serves, where a plan has chosen otherwise than the calibration."""
        today, least = network_noise(calibration.histograms, [scales])
        return cls(artefact, dict(scales), least.gain_db(today[0]))


@dataclass(frozen=True)
class DriftState:
    """What the monitor knows; times are capture times, gains those of the latest block.

    gain_db: of a recalibration over the known regime that fits best, in which the alarm believes with e_value.
    serving_db: the same over the engine in service. onset_ts: start of the present run of blocks whose gain_db is above
    the tolerance. switch_to: the artefact of the regime with the least noise, where another than the one in service has
    long been ahead; else empty.
    """

    gain_db: float
    serving_db: float
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
    """

    def __init__(self, config: DriftConfig, switch_db: float, serving: Regime, others: Sequence[Regime] = ()) -> None:
        """switch_db: what another regime has to be ahead by."""
        self._tolerance_db, self._switch_db = config.tolerance_db, switch_db
        self._regimes = (serving, *others)
        self._detector = DriftDetector(config.false_alarms_per_30d, config.tolerance_db, config.block_s)
        self._ahead = DriftDetector(_SWITCHES_PER_30D, switch_db, config.block_s)
        self._block: dict[str, AbsHistogram] = {}
        self._blocks = Blocks(config.block_s)
        self._gains_db = [0.0] * len(self._regimes)
        self._quietest = 0  # of the regimes, in the latest block
        self._onset_ts: float | None = None
        self._calm_since: float | None = None

    @property
    def state(self) -> DriftState:
        reached = self._detector.drift_detected, self._detector.warning_detected
        name = {(True, True): "alarm", (False, True): "warning"}.get(reached, "calm")
        switch_to = self._regimes[self._quietest].artefact if self._ahead.drift_detected and self._quietest else ""
        serving_db, e_value = self._gains_db[0], self._detector.e_value
        return DriftState(min(self._gains_db), serving_db, e_value, name, self._onset_ts, switch_to)

    def memory(self) -> dict[str, Any]:
        """What `recall` needs to go on after the last whole block, in JSON's types."""
        return {
            "detector": self._detector.state(),
            "gains_db": self._gains_db,
            "onset_ts": self._onset_ts,
            "calm_since": self._calm_since,
        }

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on where `memory` was taken; who is ahead is found out anew, for other regimes may be known now.

        Raises CalibrationError (`evidence.state`).
        """
        try:
            times = [None if memory[key] is None else float(memory[key]) for key in ("onset_ts", "calm_since")]
            gains_db = [float(gain) for gain in memory["gains_db"]]
            detector = memory["detector"]
        except (KeyError, TypeError, ValueError) as error:
            found, expected = f"a drift monitor's state with {error!r}", "one as this version of tared wrote it"
            raise CalibrationError("evidence.state", found, expected, "start anew") from error
        self._detector.restore(detector)
        self._onset_ts, self._calm_since = times
        if len(gains_db) == len(self._gains_db):
            self._gains_db = gains_db

    def update(self, ts: float, histograms: dict[str, AbsHistogram]) -> bool:
        """Take one observed frame of capture time `ts`; True when it completed a block.

        A clock that jumps back starts the block anew; one that jumps ahead just ends it.
        """
        first, last = self._blocks.place(ts)
        if first:
            self._block = {}
        for name, histogram in histograms.items():
            known = self._block.get(name)
            self._block[name] = histogram if known is None else merge(known, histogram)
        if last:
            self._judge(self._blocks.began_ts, ts)
        return last

    def _judge(self, began_ts: float, ended_ts: float) -> None:
        today, least = network_noise(self._block, [regime.scales for regime in self._regimes])
        self._gains_db = [
            max(0.0, least.gain_db(noise) - regime.baseline_db)
            for noise, regime in zip(today, self._regimes, strict=True)
        ]
        gain_db = min(self._gains_db)
        self._quietest = min(range(len(today)), key=lambda index: today[index].total)
        ahead_db = today[self._quietest].gain_db(today[0])
        if gain_db <= self._tolerance_db:
            self._onset_ts = None
            self._calm_since = began_ts if self._calm_since is None else self._calm_since
        else:
            self._onset_ts = began_ts if self._onset_ts is None else self._onset_ts
            self._calm_since = None
        if self._detector.drift_detected and self._calm_since is not None and ended_ts - self._calm_since >= _CALM_S:
            self._detector.reset()  # an alarm nobody acted on is over when its cause is
        self._detector.update(gain_db)
        if self._ahead.drift_detected and ahead_db <= self._switch_db:
            self._ahead.reset()  # nobody could switch, and it is no longer worth it
        self._ahead.update(ahead_db)
