"""What histograms say of a scene, ours and others' way, and how well that goes with what a recalibration gained.

PSI and the Jensen-Shannon distance are those of Evidently (calculations/stattests): as many equal bins of both together
as Sturges' rule says, empty ones filled for PSI; the mean over the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import jensenshannon
from scipy.stats import rankdata

from calibrate.histogram import AbsHistogram
from calibrate.noise import tensor_noise
from engines.calibration import Calibration

OURS, EVEN, OWN = "predicted gain", "predicted gain, tensors alike", "predicted gain, by the calibration's own noise"
SIGNALS = (OURS, OWN, EVEN, "PSI", "JS distance")

_RESAMPLES = 2000

Floats = NDArray[np.float64]


class Signals:
    """What histograms alone say of a scene, against one calibration."""

    def __init__(self, calibration: Calibration, weights: Mapping[str, Mapping[str, float]]) -> None:
        """weights: by tap, for each of OURS, OWN and EVEN."""
        self._calibration = calibration
        self._weights = weights
        self._baselines_db = {name: self._gain_db(calibration.histograms, name) for name in weights}

    def of(self, live: Mapping[str, AbsHistogram]) -> dict[str, float]:
        gains_db = {name: self._gain_db(live, name) - base for name, base in self._baselines_db.items()}
        known = self._calibration.histograms
        shifts = np.array([shift(known[tap], seen) for tap, seen in live.items() if seen.amax and known[tap].amax])
        psi, distance = shifts.mean(axis=0)
        return {**gains_db, "PSI": float(psi), "JS distance": float(distance)}

    def _gain_db(self, live: Mapping[str, AbsHistogram], weighting: str) -> float:
        noise, weights = tensor_noise(live, [self._calibration.scales]), self._weights[weighting]
        return noise.under(1, weights).gain_db(noise.under(0, weights))


def shift(known: AbsHistogram, live: AbsHistogram) -> tuple[float, float]:
    """PSI, natural logarithm, and Jensen-Shannon distance to base 2, as Evidently has them."""
    range_exp = max(known.range_exp, live.range_exp)
    counts = [each.widened(range_exp).counts for each in (known, live)]
    parts = int(np.ceil(np.log2(sum(each.sum() for each in counts)) + 1.0))  # Sturges
    bins = max(known.amax, live.amax) / np.ldexp(1.0, range_exp) * known.counts.size
    cuts = np.unique(np.rint(np.arange(parts) * bins / parts).astype(int))
    p, q = (np.add.reduceat(each, cuts) / each.sum() for each in counts)
    filled = [np.where(each > 0.0, each, _filling(each[each > 0.0].min())) for each in (p, q)]
    psi = ((filled[0] - filled[1]) * np.log(filled[0] / filled[1])).sum()
    return float(psi), float(jensenshannon(p, q, 2.0))


def _filling(least: float) -> float:
    return least / 1e6 if least <= 1e-4 else 1e-4


def auc(signal: Floats, positive: NDArray[np.bool_]) -> float:
    """Area under the ROC curve, from the rank sum (Hanley & McNeil 1982); NaN where all conditions are alike."""
    count = int(positive.sum())
    others = positive.size - count
    if not count or not others:
        return float("nan")
    return float((rankdata(signal)[positive].sum() - count * (count + 1) / 2.0) / (count * others))


def spearman(signal: Floats, gain_db: Floats) -> float:
    return float(np.corrcoef(rankdata(signal), rankdata(gain_db))[0, 1])


@dataclass(frozen=True)
class Score:
    """A figure, and its 95 % bootstrap interval over conditions (percentiles; Efron 1979)."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def bootstrapped(statistic: Callable[[Floats, Floats], float], signal: Floats, gain_db: Floats) -> Score:
    rng = np.random.default_rng(0)
    picks = rng.integers(signal.size, size=(_RESAMPLES, signal.size))
    low, high = np.nanpercentile([statistic(signal[pick], gain_db[pick]) for pick in picks], (2.5, 97.5))
    return Score(statistic(signal, gain_db), float(low), float(high))
