"""The noise that INT8 quantisation adds, predicted from histograms alone.

Per tensor: the mean squared error of quantise-dequantise under a scale, rounding and clipping apart. Over a
network: the noise-to-signal ratio under today's scales against the best ones; their ratio in dB is the *predicted
gain* of a recalibration, which is also tared's drift signal.

Rounding is exact per value below about 23 steps; above, where a histogram bin spans a whole step, it is the
step**2 / 12 of a uniform quantiser (Widrow & Kollar, "Quantization Noise", 2008).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram

QMAX = 127  # symmetric int8
_PER_OCTAVE = 16
_UNIFORM_FROM = 23.0  # in steps: from here a bin of 1/16 octave spans more than one step
_CANDIDATES = 96  # amax candidates per search, over 12 octaves: 1/8 octave apart
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(3)

Floats = NDArray[np.float64]


class _LogBins:
    """A histogram resampled to 1/16 octave, three quadrature points per bin: magnitudes and their weights.

    4096 linear bins hold far more resolution near amax than the noise needs and make a search of many scales
    slow; the cumulative counts, interpolated at logarithmic edges, keep the mass exactly.
    """

    def __init__(self, counts: NDArray[np.int64], bin_width: float) -> None:
        octaves = counts.size.bit_length() + 3  # below a fraction of a linear bin the shape is not known anyway
        top = counts.size * bin_width
        edges = top * np.exp2(-np.arange(octaves * _PER_OCTAVE, -1, -1) / _PER_OCTAVE)
        linear_edges = np.arange(counts.size + 1) * bin_width
        cumulative = np.concatenate(([0.0], np.cumsum(counts, dtype=np.float64)))
        mass = np.diff(np.interp(edges, linear_edges, cumulative))
        half, middle = np.diff(edges) / 2.0, (edges[1:] + edges[:-1]) / 2.0
        self.magnitude: Floats = (middle[:, None] + half[:, None] * _NODES).ravel()
        self.weight: Floats = (mass[:, None] * _WEIGHTS / 2.0).ravel() / max(cumulative[-1], 1.0)

    def power(self) -> float:
        """Mean of x**2."""
        return float(self.weight @ self.magnitude**2)

    def noise(self, scales: Floats) -> tuple[Floats, Floats]:
        """Mean squared rounding and clipping error for scales (n,), all positive: two arrays (n,)."""
        steps = self.magnitude / scales[:, None]
        clipped = steps > QMAX
        exact = (steps - np.rint(steps)) ** 2
        rounding = np.where(steps < _UNIFORM_FROM, exact, 1.0 / 12.0) * ~clipped
        clipping = np.where(clipped, steps - QMAX, 0.0) ** 2
        return (rounding @ self.weight) * scales**2, (clipping @ self.weight) * scales**2


def noise_power(histogram: AbsHistogram, scale: float) -> tuple[float, float]:
    """Predicted mean squared (rounding, clipping) error of int8 at `scale` > 0, in the squared units of x."""
    rounding, clipping = _LogBins(histogram.counts, histogram.bin_width).noise(np.array([scale]))
    return float(rounding[0]), float(clipping[0])


def best_amax(counts: NDArray[np.int64], bin_width: float) -> float:
    """The amax of least total noise for counts (bins,), to within 1/8 octave; 0.0 for a histogram without counts."""
    if not counts.any():
        return 0.0
    candidates, noise = _noise_by_amax(counts, bin_width)
    return float(candidates[np.argmin(noise)])


def amax_range(counts: NDArray[np.int64], bin_width: float, excess: float) -> tuple[float, float]:
    """Smallest and largest amax, to within 1/8 octave, whose noise is at most `excess` times the least noise.

    counts (bins,) must hold counts; excess >= 1.
    """
    candidates, noise = _noise_by_amax(counts, bin_width)
    near = candidates[noise <= excess * noise.min()]
    return float(near.min()), float(near.max())


def _noise_by_amax(counts: NDArray[np.int64], bin_width: float) -> tuple[Floats, Floats]:
    """Candidate amax values and their total noise."""
    candidates = _amax_candidates(counts, bin_width)
    rounding, clipping = _LogBins(counts, bin_width).noise(candidates / QMAX)
    return candidates, rounding + clipping


def _amax_candidates(counts: NDArray[np.int64], bin_width: float) -> Floats:
    largest = (int(np.flatnonzero(counts)[-1]) + 1) * bin_width
    return largest * np.exp2(-np.arange(_CANDIDATES) / 8.0)


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
        bins = _LogBins(histogram.counts, histogram.bin_width)
        signal = bins.power()
        if scale <= 0.0 or histogram.total == histogram.zeros or signal <= 0.0:
            continue
        weight = (1.0 if weights is None else weights.get(name, 0.0)) / signal
        candidates = np.append(_amax_candidates(histogram.counts, histogram.bin_width) / QMAX, scale)
        noise = np.add(*bins.noise(candidates))
        today += weight * float(noise[-1])
        best += weight * float(noise.min())
    return 10.0 * float(np.log10(today / best)) if best > 0.0 else 0.0
