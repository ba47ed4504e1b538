"""Has the scene left the calibration behind? The predicted gain of a recalibration, block by block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agent.config import DriftConfig
from calibrate.evidence import EDetector
from calibrate.histogram import AbsHistogram, merge
from calibrate.noise import predicted_gain_db
from engines.calibration import Calibration

FULL_SCALE_DB = 12.0  # gains from here on count as 1 on the detector's [0, 1] scale
_WARNING_BLOCKS = 100.0  # a warning only starts a fresh collection: at most one false one in so many blocks
_CALM_BLOCKS = 24
_MONTH_S = 30 * 86400.0


@dataclass(frozen=True)
class DriftState:
    """What the monitor knows: the latest block's predicted gain and the evidence so far; times are capture times."""

    gain_db: float
    e_value: float
    state: str  # calm, warning or alarm
    onset_ts: float | None  # start of the present run of blocks above the tolerance


class DriftMonitor:
    """Watches one calibration in service.

    Frames of `block_s` seconds of capture time form a block; their merged histograms give the predicted gain of a
    recalibration in dB. What the calibration method itself leaves on the table, measured on the calibration's own
    histograms, is no drift and is taken off. The gain, clipped to [0, 12] dB, feeds an e-detector with the
    configured tolerance and false-alarm budget.
    """

    def __init__(self, config: DriftConfig, calibration: Calibration, amax: Mapping[str, float] | None = None) -> None:
        """amax: per tap what serves, where a plan has chosen otherwise than the calibration."""
        self._block_s = config.block_s
        self._tolerance_db = config.tolerance_db
        self._scales = replace(calibration, amax={**calibration.amax, **(amax or {})}).scales
        self._baseline_db = predicted_gain_db(calibration.histograms, self._scales)
        threshold = _MONTH_S / config.block_s / config.false_alarms_per_30d
        self._detector = EDetector(config.tolerance_db / FULL_SCALE_DB, threshold, min(_WARNING_BLOCKS, threshold))
        self._block: dict[str, AbsHistogram] = {}
        self._block_start: float | None = None
        self._gain_db = 0.0
        self._onset_ts: float | None = None
        self._calm_blocks = 0

    @property
    def state(self) -> DriftState:
        reached = self._detector.drift_detected, self._detector.warning_detected
        name = {(True, True): "alarm", (False, True): "warning"}.get(reached, "calm")
        return DriftState(self._gain_db, self._detector.e_value, name, self._onset_ts)

    def update(self, ts: float, histograms: dict[str, AbsHistogram]) -> bool:
        """Take one observed frame of capture time `ts`; True when it completed a block.

        A clock that jumps back starts the block anew; one that jumps ahead just ends it.
        """
        completed = False
        if self._block_start is None or ts < self._block_start:
            self._block, self._block_start = {}, ts
        elif ts - self._block_start >= self._block_s:
            self._judge(self._block_start)
            self._block, self._block_start = {}, ts
            completed = True
        for name, histogram in histograms.items():
            known = self._block.get(name)
            self._block[name] = histogram if known is None else merge(known, histogram)
        return completed

    def _judge(self, block_start: float) -> None:
        self._gain_db = max(0.0, predicted_gain_db(self._block, self._scales) - self._baseline_db)
        if self._gain_db <= self._tolerance_db:
            self._onset_ts = None
        elif self._onset_ts is None:
            self._onset_ts = block_start
        self._calm_blocks = 0 if self._onset_ts is not None else self._calm_blocks + 1
        if self._detector.drift_detected and self._calm_blocks >= _CALM_BLOCKS:
            self._detector.reset()  # an alarm nobody acted on is over when its cause is
        self._detector.update(min(self._gain_db / FULL_SCALE_DB, 1.0))
