"""The noise that INT8 quantisation adds, predicted from histograms alone.

Per tensor: the mean squared error of quantise-dequantise under a scale, rounding and clipping apart. Over a
network: the noise-to-signal ratio under today's scales against the best ones; their ratio in dB is the *predicted
gain* of a recalibration, which is also tared's drift signal.

Between neighbouring edges the values are taken as evenly spread, and the error of rounding and clipping is integrated
exactly: with t in steps, (t - rint t)**2 has the antiderivative rint(t) / 12 + (t - rint t)**3 / 3, whose first term is
the step**2 / 12 of a uniform quantiser (Widrow & Kollar, "Quantization Noise", 2008).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram

QMAX = 127  # symmetric int8
_PER_OCTAVE = 32  # edges; a histogram has far more near amax than the noise needs
_HEAVY = 1.0 / 32.0  # of all values: what holds more is not merged, for within it the density may be steep
_CANDIDATES = 96  # amax candidates per search, over 12 octaves: 1/8 octave apart
_REFINED = np.exp2(np.linspace(-1.0 / 8.0, 1.0 / 8.0, 17))

Floats = NDArray[np.float64]


class Density:
    """A histogram as a piecewise constant density, with a mass of its own at zero.

    Bins are merged to 1/32 octave, where that does not put more than 1/32 of all values into one. The last bin ends at
    amax where it is known: what saturates (ReLU6, a hard sigmoid) piles up there, on the grid.
    """

    def __init__(self, counts: NDArray[np.int64], bin_width: float, zeros: int = 0, amax: float = 0.0) -> None:
        """counts (bins,) in bins of `bin_width`, of which `zeros` of counts[0] are exactly zero; amax 0: not known."""
        used = np.flatnonzero(counts)
        bins = int(used[-1]) + 1 if used.size else 1
        mass = counts[:bins].astype(np.float64)
        mass[0] -= zeros
        cumulative = np.concatenate(([0.0], np.cumsum(mass)))
        cuts = _cuts(cumulative)
        self.edges = cuts * np.float64(bin_width)
        if amax > 0.0:
            self.edges[-1] = max(amax, self.edges[-2] + 1e-6 * bin_width)  # on its lower edge, a bin is a point
        self.density: Floats = np.diff(cumulative[cuts]) / np.diff(self.edges) / max(cumulative[-1] + zeros, 1.0)

    @classmethod
    def of(cls, histogram: AbsHistogram) -> Density:
        """With the zeros and the exact amax that the histogram knows."""
        return cls(histogram.counts, histogram.bin_width, histogram.zeros, histogram.amax)

    def power(self) -> float:
        """Mean of x**2."""
        return float(self.density @ np.diff(self.edges**3)) / 3.0

    def noise(self, scales: Floats) -> tuple[Floats, Floats]:
        """Mean squared rounding and clipping error for scales (n,), all positive: two arrays (n,)."""
        steps = self.edges / scales[:, None]
        inside = np.minimum(steps, QMAX)
        nearest = np.rint(inside)
        rounding = np.diff(nearest / 12.0 + (inside - nearest) ** 3 / 3.0, axis=1)
        clipping = np.diff((steps - inside) ** 3 / 3.0, axis=1)
        return (rounding @ self.density) * scales**3, (clipping @ self.density) * scales**3

    def best_amax(self) -> float:
        """The amax of least total noise, to within 1/64 octave."""
        candidates, noise = self._noise_by_amax()
        refined = np.minimum(candidates[np.argmin(noise)] * _REFINED, self.edges[-1])
        return float(refined[np.argmin(np.add(*self.noise(refined / QMAX)))])

    def amax_range(self, excess: float) -> tuple[float, float]:
        """Smallest and largest amax, to within 1/8 octave, whose noise is at most `excess` >= 1 times the least."""
        candidates, noise = self._noise_by_amax()
        near = candidates[noise <= excess * noise.min()]
        return float(near.min()), float(near.max())

    def _noise_by_amax(self) -> tuple[Floats, Floats]:
        candidates = _amax_candidates(self.edges[-1])
        return candidates, np.add(*self.noise(candidates / QMAX))


def _cuts(cumulative: Floats) -> NDArray[np.int64]:
    """Bin indices to merge between, ascending from 0 to the number of bins; `cumulative` is (bins + 1,)."""
    bins = cumulative.size - 1
    octaves = np.arange(bins.bit_length() * _PER_OCTAVE, -1, -1) / _PER_OCTAVE
    cuts = np.rint(bins * np.exp2(-octaves)).astype(np.int64)
    cuts = np.unique(np.concatenate(([0], cuts, [bins - 1])))
    heavy = np.flatnonzero(np.diff(cumulative[cuts]) > _HEAVY * cumulative[-1])
    return np.unique(np.concatenate((cuts, *(np.arange(cuts[i], cuts[i + 1]) for i in heavy))))


def _amax_candidates(largest: float) -> Floats:
    return largest * np.exp2(-np.arange(_CANDIDATES) / 8.0)


def noise_power(histogram: AbsHistogram, scales: Floats) -> tuple[Floats, Floats]:
    """Predicted mean squared (rounding, clipping) error of int8 at scales (n,), all positive: two arrays (n,).

    In the squared units of x. Within 2 % of quantise-dequantise on the data while the step is wider than a bin and the
    values are spread out. What a histogram does not know is where in a bin the values lie: that counts for a tensor of
    a few distinct values (2 to 3 % for one of pixels / 255), and where nearly all values are in bin 0, far below amax.
    """
    return Density.of(histogram).noise(scales)


def noise_to_signal(histogram: AbsHistogram, scales: Floats) -> Floats:
    """Total noise over signal power, (n,), at scales (n,), all positive: 1.0 is no signal left. All zeros: NaN."""
    density = Density.of(histogram)
    rounding, clipping = density.noise(scales)
    with np.errstate(invalid="ignore"):
        return (rounding + clipping) / density.power()


def predicted_gain_db(
    live: Mapping[str, AbsHistogram],
    scales: Mapping[str, float],
    weights: Mapping[str, float] | None = None,
) -> float:
    """How many dB a recalibration would take off the network's quantisation noise.

    The sum over tensors of weight * noise / signal under `scales`, over the same sum under each tensor's best
    scale for `live`. Tensors that saw only zeros, or that have no scale, say nothing. `weights` are relative
    sensitivities, 1 for every tensor when absent. Returns 0.0 when nothing was seen.
    """
    today = best = 0.0
    for name, histogram in live.items():
        scale = scales.get(name, 0.0)
        if scale <= 0.0 or histogram.total == histogram.zeros:
            continue
        weight = 1.0 if weights is None else weights.get(name, 0.0)
        candidates = np.append(_amax_candidates(histogram.amax) / QMAX, scale)
        noise = weight * noise_to_signal(histogram, candidates)
        today += float(noise[-1])
        best += float(noise.min())
    return 10.0 * float(np.log10(today / best)) if best > 0.0 else 0.0
