"""Predict the noise that INT8 quantisation adds, from histograms alone.

For one tensor, `Density.noise` predicts the mean squared error of quantise-dequantise under a scale, rounding and
clipping apart. For a network, `tensor_noise` compares the noise-to-signal ratio under today's scales with the ratio
under the best ones. Their ratio in dB is the *predicted gain* of a recalibration, which is also tared's drift signal.

Between neighbouring edges the values are taken as evenly spread, and the error of rounding and clipping is integrated
exactly: with t in steps, (t - rint t)**2 has the antiderivative rint(t) / 12 + (t - rint t)**3 / 3. Its first term is
the step**2 / 12 of a uniform quantiser (Widrow & Kollar, "Quantization Noise", 2008).

Read in this order: Density, `predicted_gain_db`, `tensor_noise`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram
from calibrate.scale import QMAX

# Edges per octave after merging. Fewer: a coarser density. More: slower; near amax a histogram has far more bins than
# the noise needs.
_PER_OCTAVE = 32
# A merged bin with a larger share of all values stays apart: the density inside it may be steep.
_HEAVY = 1.0 / 32.0
_CANDIDATES = 96  # amax candidates of a search, 1/8 octave apart: 12 octaves below the largest value
_REFINED = np.exp2(np.linspace(-1.0 / 8.0, 1.0 / 8.0, 17))  # around the best of them, 1/64 octave apart
# The same two for a whole network at once. Coarser, since a sum over tensors hides what finer ones would gain; the
# least noise is still within 0.1 dB (tests/calibrate/test_noise.py).
_NETWORK_HEAVY = 1.0 / 8.0
_NETWORK_CANDIDATES = np.exp2(-np.arange(12 * 16) / 16.0) / QMAX  # scales over the range, 1/16 octave apart
_POINT = 1e-9  # share of the range: the width of a bin that begins at amax, which would otherwise be zero

Floats = NDArray[np.float64]


def sqnr_db(reference: NDArray[Any], found: NDArray[Any]) -> float:
    """Return 10 log10(sum reference^2 / sum (found - reference)^2) in dB: the SQNR of one tensor.

    No noise at all is +inf. Noise without a signal is -inf, and so are shapes or places of values that are not finite,
    if they differ.

    >>> round(sqnr_db(np.array([3.0, 4.0]), np.array([3.0, 4.5])))       # a power of 25 against 0.25
    20
    """
    a, b = reference.astype(np.float64), found.astype(np.float64)
    if a.shape != b.shape or not np.array_equal(finite := np.isfinite(a), np.isfinite(b)):
        return -np.inf
    signal, noise = float(np.square(a[finite]).sum()), float(np.square(a[finite] - b[finite]).sum())
    return np.inf if noise == 0.0 else float(10.0 * np.log10(signal / noise)) if signal else -np.inf


def worst_sqnr_db(reference: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]) -> float:
    """Return the least `sqnr_db` of a network's outputs, by name: pooled, a large one would hide a small one.

    >>> worst_sqnr_db({"boxes": np.array([500.0]), "scores": np.array([0.1])},
    ...               {"boxes": np.array([500.0]), "scores": np.array([0.2])})
    0.0
    """
    return min(sqnr_db(output, found[name]) for name, output in reference.items())


class Density:
    """Treat a histogram as a piecewise constant density, with a mass of its own at zero.

    Bins are merged to 1/32 octave, where that does not put more than 1/32 of all values into one. The last bin ends at
    amax: saturating functions (ReLU6, a hard sigmoid) pile their values up there, on the grid.

    >>> from calibrate.histogram import abs_histogram
    >>> values = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    >>> density = Density(abs_histogram(values))
    >>> round(density.best_amax(), 1), round(float(np.abs(values).max()), 1)     # clipping the rarest pays off
    (3.9, 4.7)
    >>> rounding, clipping = density.noise(np.array([4.7, 1.0]) / QMAX)
    >>> (rounding * 1e6).round(1), clipping.round(3)          # nothing is clipped; a third of the values is
    (array([114.4,   3.5]), array([0.   , 0.152]))
    """

    def __init__(self, histogram: AbsHistogram) -> None:
        used = np.flatnonzero(histogram.counts)
        bins = int(used[-1]) + 1 if used.size else 1
        mass = histogram.counts[:bins].astype(np.float64)
        mass[0] -= histogram.zeros
        cumulative = np.concatenate(([0.0], np.cumsum(mass)))
        cuts = _cuts_per_octave(bins)
        cuts = _finer(cuts, np.diff(cumulative[cuts]) > _HEAVY * cumulative[-1])
        self.edges = cuts * np.float64(histogram.bin_width)
        if histogram.amax > 0.0:  # if it lies on its bin's lower edge, the bin is a point
            self.edges[-1] = max(histogram.amax, self.edges[-2] + 1e-6 * histogram.bin_width)
        total = max(cumulative[-1] + histogram.zeros, 1.0)
        self.density: Floats = np.diff(cumulative[cuts]) / np.diff(self.edges) / total

    def noise(self, scales: Floats) -> tuple[Floats, Floats]:
        """Predict the mean squared rounding and clipping error of int8 at scales (n,), all positive: two arrays (n,).

        The errors are in the squared units of x. They are within 2 % of quantise-dequantise on the data while the step
        is wider than a bin and the values are spread out. A histogram does not know where in a bin the values lie. That
        matters for a tensor of a few distinct values (2 to 3 % for one of pixels / 255), and where nearly all values
        are in bin 0, far below amax.
        """
        rounding, clipping = _squared_errors(self.edges / scales[:, None])
        return (rounding @ self.density) * scales**3, (clipping @ self.density) * scales**3

    def best_amax(self) -> float:
        """Return the amax of least total noise, to within 1/64 octave."""
        candidates, noise = self._noise_by_amax()
        refined = np.minimum(candidates[np.argmin(noise)] * _REFINED, self.edges[-1])
        return float(refined[np.argmin(np.add(*self.noise(refined / QMAX)))])

    def amax_range(self, excess: float) -> tuple[float, float]:
        """Return the smallest and the largest amax whose noise is at most `excess` >= 1 times the least.

        Both are exact to within 1/8 octave.
        """
        candidates, noise = self._noise_by_amax()
        near = candidates[noise <= excess * noise.min()]
        return float(near.min()), float(near.max())

    def _noise_by_amax(self) -> tuple[Floats, Floats]:
        """Return the candidates, 1/8 octave apart over 12 octaves, and the total noise of each."""
        candidates = self.edges[-1] * np.exp2(-np.arange(_CANDIDATES) / 8.0)
        return candidates, np.add(*self.noise(candidates / QMAX))


def _squared_errors(steps: Floats) -> tuple[Floats, Floats]:
    """Integrate the squared rounding and clipping error between edges (..., n) in steps: two arrays (..., n - 1).

    With t in steps: (t - rint t)**2 has the antiderivative rint(t) / 12 + (t - rint t)**3 / 3.
    """
    inside = np.minimum(steps, QMAX)
    nearest = np.rint(inside)
    left, beyond = inside - nearest, steps - inside
    rounding = np.diff(nearest / 12.0 + left * left * left / 3.0)
    clipping = np.diff(beyond * beyond * beyond / 3.0)
    return rounding, clipping


def _cuts_per_octave(bins: int) -> NDArray[np.int64]:
    """Return the bin indices to merge between, from 0 up to `bins`, 1/32 octave apart."""
    octaves = np.arange(bins.bit_length() * _PER_OCTAVE, -1, -1) / _PER_OCTAVE
    cuts = np.rint(bins * np.exp2(-octaves)).astype(np.int64)
    return np.unique(np.concatenate(([0], cuts, [bins - 1])))


def _finer(cuts: NDArray[np.int64], heavy: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the cuts with every single bin of those merged ones (cuts - 1,) that are heavy."""
    return np.unique(np.concatenate((cuts, *(np.arange(cuts[i], cuts[i + 1]) for i in np.flatnonzero(heavy)))))


@dataclass(frozen=True)
class NetworkNoise:
    """Hold noise over signal by its cause: the weighted sum over a network's tensors.

    Args:
        rounding: Noise power over signal power from rounding, summed over the tensors.
        clipping: The same from clipping.

    >>> today, recalibrated = NetworkNoise(rounding=0.001, clipping=0.009), NetworkNoise(rounding=0.001, clipping=0.0)
    >>> round(recalibrated.gain_db(today), 1)
    10.0
    """

    rounding: float
    clipping: float

    @property
    def total(self) -> float:
        """Noise power over signal power from both causes."""
        return self.rounding + self.clipping

    def gain_db(self, today: NetworkNoise) -> float:
        """Return by how many dB this is less than `today`; 0.0 when nothing was seen."""
        return 10.0 * float(np.log10(today.total / self.total)) if self.total > 0.0 else 0.0


@dataclass(frozen=True)
class TensorNoise:
    """Hold the noise of each of a network's tensors under several sets of scales, and under its best scale.

    Args:
        names: One for each tensor.
        ratios: (tensors, sets + 1, 2), noise over signal by rounding and clipping; the last set is `best`.
        best: (tensors,), each tensor's best scale.

    >>> noise = TensorNoise(("conv1",), np.array([[[0.001, 0.009], [0.001, 0.0]]]), np.array([0.02]))
    >>> noise.under(0), noise.under(1)                        # under the given scales, and under the best
    (NetworkNoise(rounding=0.001, clipping=0.009), NetworkNoise(rounding=0.001, clipping=0.0))
    """

    names: tuple[str, ...]
    ratios: Floats
    best: Floats

    def under(self, set_index: int, weights: Mapping[str, float] | None = None) -> NetworkNoise:
        """Return the sum over the tensors under one set of scales.

        Args:
            set_index: Index of the set; the index after the last set gives the least noise.
            weights: Relative sensitivity of each tensor, 0 for a tensor that is not named; None: 1 for every tensor.
        """
        relative = np.array([1.0 if weights is None else weights.get(name, 0.0) for name in self.names])
        return NetworkNoise(*(relative[:, None] * self.ratios[:, set_index]).sum(axis=0).tolist())


def tensor_noise(live: Mapping[str, AbsHistogram], scale_sets: Sequence[Mapping[str, float]]) -> TensorNoise:
    """Predict the noise of each tensor under each of several sets of scales, and under its best scale.

    Args:
        live: Histograms by tensor.
        scale_sets: Sets of scales by tensor, in the units of x for each INT8 step.

    Tensors that saw only zeros, or that have no scale in one of the sets, are left out: all sums are of the same
    tensors. The least noise is never more than under a given set. On real networks it is within 0.1 dB of the optimum.

    All tensors are computed at once, so that the daemon can do it every few seconds: their histograms are cut alike,
    relative to their ranges, and one table of candidate scales serves them all.

    >>> from calibrate.histogram import abs_histogram
    >>> live = {"conv1": abs_histogram(np.linspace(-1.0, 1.0, 10_001, dtype=np.float32))}
    >>> noise = tensor_noise(live, [{"conv1": 0.5 / QMAX}, {"conv1": 1.0 / QMAX}])
    >>> noise.ratios.sum(axis=2).round(5)                     # amax 0.5, amax 1.0, the best
    array([[1.2505e-01, 2.0000e-05, 2.0000e-05]])
    """
    compared = [
        name for name, seen in live.items() if seen.amax > 0.0 and all(s.get(name, 0.0) > 0.0 for s in scale_sets)
    ]
    names, ratios, best = list[str](), [np.empty((0, len(scale_sets) + 1, 2))], [np.empty(0)]
    for bits in sorted({live[name].bits for name in compared}):
        alike = [name for name in compared if live[name].bits == bits]
        scales = np.array([[each[name] for each in scale_sets] for name in alike])
        alike_ratios, alike_best = _network_ratios([live[name] for name in alike], scales)
        names, ratios, best = [*names, *alike], [*ratios, alike_ratios], [*best, alike_best]
    return TensorNoise(tuple(names), np.concatenate(ratios), np.concatenate(best))


def best_scales(live: Mapping[str, AbsHistogram]) -> dict[str, float]:
    """Return, for each tensor that saw anything, the scale of least noise, as `tensor_noise` searches it.

    >>> from calibrate.histogram import abs_histogram
    >>> live = {"conv1": abs_histogram(np.linspace(-1.0, 1.0, 10_001, dtype=np.float32))}
    >>> {name: round(scale * QMAX, 2) for name, scale in best_scales(live).items()}
    {'conv1': 1.0}
    """
    noise = tensor_noise(live, [])
    return dict(zip(noise.names, noise.best.tolist(), strict=True))


def network_noise(
    live: Mapping[str, AbsHistogram], scale_sets: Sequence[Mapping[str, float]]
) -> tuple[list[NetworkNoise], NetworkNoise]:
    """Return the network's noise under each set of scales, and the least noise.

    Args:
        live: Histograms by tensor.
        scale_sets: Sets of scales by tensor.

    >>> from calibrate.histogram import abs_histogram
    >>> live = {"conv1": abs_histogram(np.linspace(-1.0, 1.0, 10_001, dtype=np.float32))}
    >>> (narrow,), least = network_noise(live, [{"conv1": 0.5 / QMAX}])
    >>> narrow.clipping > 0.1, least.total < 1e-4             # half of the values were clipped
    (True, True)
    """
    noise = tensor_noise(live, scale_sets)
    *given, least = (noise.under(index) for index in range(len(scale_sets) + 1))
    return given, least


def _network_ratios(histograms: Sequence[AbsHistogram], scales: Floats) -> tuple[Floats, Floats]:
    """Return the ratios of TensorNoise under scales (tensors, sets) and the best, and the best scales (tensors,)."""
    edges, mass = _cut_alike(histograms)
    units = np.exp2([[float(histogram.range_exp)] for histogram in histograms])
    amax = np.array([[histogram.amax] for histogram in histograms]) / units
    ending = np.minimum(edges, amax + _POINT)  # as in Density: saturating functions pile values up at amax
    density = mass / np.maximum(np.diff(ending), _POINT)
    relative = np.hstack((scales / units, amax / QMAX))  # amax is best for a saturating function, between candidates
    errors = np.stack(_squared_errors(ending[:, None] / relative[..., None]), axis=2)
    noise = np.einsum("tsce,te->tsc", errors, density) * relative[..., None] ** 3
    table = np.stack(_squared_errors(edges / _NETWORK_CANDIDATES[:, None])) * _NETWORK_CANDIDATES[:, None] ** 3
    even = mass / np.diff(edges)
    total = np.einsum("te,ne->tn", even, table.sum(axis=0))  # not @: BLAS would wake every core for it
    nearest = np.argmin(total, axis=1)
    noise = np.concatenate((noise, np.einsum("cte,te->tc", table[:, nearest], even)[:, None]), axis=1)
    quietest = noise.sum(axis=2).argmin(axis=1)[:, None]
    best = np.take_along_axis(noise, quietest[..., None], axis=1)
    candidates = np.hstack((relative, _NETWORK_CANDIDATES[nearest, None])) * units
    power = (density * np.diff(ending**3)).sum(axis=1) / 3.0
    ratios: Floats = np.concatenate((noise[:, : scales.shape[1]], best), axis=1) / power[:, None, None]
    return ratios, np.take_along_axis(candidates, quietest, axis=1)[:, 0]


def _cut_alike(histograms: Sequence[AbsHistogram]) -> tuple[Floats, Floats]:
    """Return edges (n,) from 0 to 1, in units of each histogram's range, and the shares of values between them.

    The shares, (tensors, n - 1), count the values that are not exactly zero, over the number of all values.
    """
    totals = np.array([[histogram.total] for histogram in histograms])
    zeros = np.array([[histogram.zeros] for histogram in histograms])
    bins = histograms[0].counts.size

    def cut(cuts: NDArray[np.int64]) -> NDArray[np.int64]:
        mass = np.stack([np.add.reduceat(histogram.counts, cuts[:-1]) for histogram in histograms])
        mass[:, :1] -= zeros
        return mass

    cuts = _cuts_per_octave(bins)
    cuts = _finer(cuts, (cut(cuts) > _NETWORK_HEAVY * (totals - zeros)).any(axis=0))
    return cuts / bins, cut(cuts) / totals


def predicted_gain_db(live: Mapping[str, AbsHistogram], scales: Mapping[str, float]) -> float:
    """Return by how many dB a recalibration would reduce the network's quantisation noise; 0.0 when nothing was seen.

    gain = 10 log10 (sum of noise / signal under `scales`, over the same sum under each tensor's best scale)

    Args:
        live: Histograms by tensor.
        scales: The scales in use, by tensor.

    >>> from calibrate.histogram import abs_histogram
    >>> dark = abs_histogram(np.linspace(-0.5, 0.5, 10_001, dtype=np.float32))
    >>> bright = abs_histogram(np.linspace(-4.0, 4.0, 10_001, dtype=np.float32))
    >>> round(predicted_gain_db({"conv1": dark}, {"conv1": 0.5 / QMAX}), 1)       # calibrated for this light
    0.0
    >>> round(predicted_gain_db({"conv1": bright}, {"conv1": 0.5 / QMAX}))        # for another: nearly all is clipped
    46
    """
    (today,), least = network_noise(live, [scales])
    return least.gain_db(today)
