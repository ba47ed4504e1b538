"""The noise that INT8 quantisation adds, predicted from histograms alone.

Per tensor: the mean squared error of quantise-dequantise under a scale, rounding and clipping apart. Over a
network: the noise-to-signal ratio under today's scales against the best ones; their ratio in dB is the *predicted
gain* of a recalibration, which is also tared's drift signal.

Between neighbouring edges the values are taken as evenly spread, and the error of rounding and clipping is integrated
exactly: with t in steps, (t - rint t)**2 has the antiderivative rint(t) / 12 + (t - rint t)**3 / 3, whose first term is
the step**2 / 12 of a uniform quantiser (Widrow & Kollar, "Quantization Noise", 2008).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram

QMAX = 127  # symmetric int8
_PER_OCTAVE = 32  # edges; a histogram has far more near amax than the noise needs
_HEAVY = 1.0 / 32.0  # of all values: what holds more is not merged, for within it the density may be steep
_CANDIDATES = 96  # amax candidates per search, over 12 octaves: 1/8 octave apart
_REFINED = np.exp2(np.linspace(-1.0 / 8.0, 1.0 / 8.0, 17))
# Over a whole network at once, where what a single tensor gains by more is lost in the sum.
_NETWORK_HEAVY = 1.0 / 8.0
_NETWORK_CANDIDATES = np.exp2(-np.arange(12 * 16) / 16.0) / QMAX  # of the range: 1/16 octave apart
_POINT = 1e-9  # of the range: the width of a bin that begins at amax

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
        rounding, clipping = _squared_errors(self.edges / scales[:, None])
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


def _squared_errors(steps: Floats) -> tuple[Floats, Floats]:
    """Integrals of the squared rounding and clipping error between edges (..., n) in steps: two arrays (..., n - 1)."""
    inside = np.minimum(steps, QMAX)
    nearest = np.rint(inside)
    left, beyond = inside - nearest, steps - inside
    rounding = np.diff(nearest / 12.0 + left * left * left / 3.0)
    clipping = np.diff(beyond * beyond * beyond / 3.0)
    return rounding, clipping


def _cuts(cumulative: Floats) -> NDArray[np.int64]:
    """Bin indices to merge between, ascending from 0 to the number of bins; `cumulative` is (bins + 1,)."""
    cuts = _cuts_per_octave(cumulative.size - 1)
    return _finer(cuts, np.diff(cumulative[cuts]) > _HEAVY * cumulative[-1])


def _cuts_per_octave(bins: int) -> NDArray[np.int64]:
    octaves = np.arange(bins.bit_length() * _PER_OCTAVE, -1, -1) / _PER_OCTAVE
    cuts = np.rint(bins * np.exp2(-octaves)).astype(np.int64)
    return np.unique(np.concatenate(([0], cuts, [bins - 1])))


def _finer(cuts: NDArray[np.int64], heavy: NDArray[np.bool_]) -> NDArray[np.int64]:
    """With every bin of those merged ones (cuts - 1,) that are heavy."""
    return np.unique(np.concatenate((cuts, *(np.arange(cuts[i], cuts[i + 1]) for i in np.flatnonzero(heavy)))))


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


@dataclass(frozen=True)
class NetworkNoise:
    """Noise over signal by its cause, summed over a network's tensors by their weights."""

    rounding: float
    clipping: float

    @property
    def total(self) -> float:
        return self.rounding + self.clipping

    def gain_db(self, today: NetworkNoise) -> float:
        """How many dB less this is than `today`. Returns 0.0 when nothing was seen."""
        return 10.0 * float(np.log10(today.total / self.total)) if self.total > 0.0 else 0.0


@dataclass(frozen=True)
class TensorNoise:
    """What each of a network's tensors suffers under several sets of scales, and the least that it could.

    names: (tensors,). ratios: noise over signal by rounding and clipping, (tensors, sets + 1, 2), the last under
    `best`: each tensor's best scale, (tensors,).
    """

    names: tuple[str, ...]
    ratios: Floats
    best: Floats

    def under(self, which: int, weights: Mapping[str, float] | None = None) -> NetworkNoise:
        """The sum under one of the sets by its number, the number of sets itself for the least.

        weights: relative sensitivities, 1 for every tensor when absent, 0 for one that they lack.
        """
        relative = np.array([1.0 if weights is None else weights.get(name, 0.0) for name in self.names])
        return NetworkNoise(*(relative[:, None] * self.ratios[:, which]).sum(axis=0).tolist())


def tensor_noise(live: Mapping[str, AbsHistogram], scale_sets: Sequence[Mapping[str, float]]) -> TensorNoise:
    """What `live` suffers under each of several sets of scales, and the least it could.

    Tensors that saw only zeros, or that have no scale in one of the sets, are left out: all sums are of the same
    tensors. The least is never more than under a given set, and of a real network within 0.1 dB of the least there is.

    All tensors are taken at once, so that it can be asked every few seconds: their histograms are cut alike, relative
    to their ranges, and one table of candidate scales serves them all.
    """
    spoken = [
        name for name, seen in live.items() if seen.amax > 0.0 and all(s.get(name, 0.0) > 0.0 for s in scale_sets)
    ]
    names, ratios, best = list[str](), [np.empty((0, len(scale_sets) + 1, 2))], [np.empty(0)]
    for bits in sorted({live[name].bits for name in spoken}):
        alike = [name for name in spoken if live[name].bits == bits]
        scales = np.array([[each[name] for each in scale_sets] for name in alike])
        found = _network_ratios([live[name] for name in alike], scales)
        names, ratios, best = [*names, *alike], [*ratios, found[0]], [*best, found[1]]
    return TensorNoise(tuple(names), np.concatenate(ratios), np.concatenate(best))


def best_scales(live: Mapping[str, AbsHistogram]) -> dict[str, float]:
    """Per tensor that saw anything the scale of least noise, found as in `tensor_noise`."""
    found = tensor_noise(live, [])
    return dict(zip(found.names, found.best.tolist(), strict=True))


def network_noise(
    live: Mapping[str, AbsHistogram],
    scale_sets: Sequence[Mapping[str, float]],
    weights: Mapping[str, float] | None = None,
) -> tuple[list[NetworkNoise], NetworkNoise]:
    """The sums of `tensor_noise` under each set, and the least; weights as in `TensorNoise.under`."""
    found = tensor_noise(live, scale_sets)
    *given, least = (found.under(which, weights) for which in range(len(scale_sets) + 1))
    return given, least


def _network_ratios(histograms: Sequence[AbsHistogram], scales: Floats) -> tuple[Floats, Floats]:
    """Ratios as in TensorNoise under scales (tensors, sets) and the best, and the best scales (tensors,)."""
    edges, mass = _cut_alike(histograms)
    units = np.exp2([[float(histogram.range_exp)] for histogram in histograms])
    amax = np.array([[histogram.amax] for histogram in histograms]) / units
    ending = np.minimum(edges, amax + _POINT)  # as in Density: what saturates piles up at amax
    density = mass / np.maximum(np.diff(ending), _POINT)
    relative = np.hstack((scales / units, amax / QMAX))  # what saturates has its best scale there, between candidates
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
    """Edges (n,) from 0 to 1, in units of each histogram's range, and the shares of all values between them.

    The shares, (tensors, n - 1), are of all values, without those that are exactly zero.
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


def predicted_gain_db(
    live: Mapping[str, AbsHistogram],
    scales: Mapping[str, float],
    weights: Mapping[str, float] | None = None,
) -> float:
    """How many dB a recalibration would take off the network's quantisation noise.

    The sum over tensors of weight * noise / signal under `scales`, over the same sum under each tensor's best
    scale for `live`: see `network_noise`. Returns 0.0 when nothing was seen.
    """
    (today,), least = network_noise(live, [scales], weights)
    return least.gain_db(today)
