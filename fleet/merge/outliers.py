"""Find boards whose frames are unlike those of their group, by what sharing one calibration would cost.

The distance of a board to its group is in dB of quantisation noise, like tared's drift. It has two directions:
1. How much more noise the group's scales make on what the board has seen than its own best scales would
   (`calibrate.noise`): what sharing a calibration does to the board.
2. How much more noise the board's scales would make on what the group has seen: what its share does to the others.
Both are needed: on real models a dark or blurred view shows in the second, noise and a covered lens in the first
(benchmarks/RESULTS.md). A distance between scales alone would not know which tensors matter.

The group's scales are the medians of the boards' own: half of the boards would have to lie to move them. A distance is
too large if it exceeds the median of all by five times their spread, and 3 dB, the gain for which no board would
recalibrate. The spread is the median absolute deviation, scaled to a standard deviation (Rousseeuw & Croux,
"Alternatives to the Median Absolute Deviation", 1993).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram
from calibrate.noise import best_scales, network_noise, predicted_gain_db

LEAST_LIMIT_DB = 3.0
_SPREADS = 5.0
_TO_SIGMA = 1.4826  # the standard deviation of a normal distribution, in median absolute deviations
_MOST_VALUES = 16.0  # times the group's median: a board that counts for more is not one among many

Scales = NDArray[np.float64]


@dataclass(frozen=True)
class Sketch:
    """Summary of a board's histograms, in the order of the group's tensors.

    octaves: float64 (tensors,): log2 of each tensor's best scale; NaN for a tensor without values. values: int64
    (tensors,): how many values each tensor had.
    """

    octaves: Scales
    values: NDArray[np.int64]

    @classmethod
    def from_histograms(cls, histograms: Mapping[str, AbsHistogram], tensors: Sequence[str]) -> Sketch:
        scales = best_scales(histograms)
        octaves = np.array([math.log2(scales[tensor]) if tensor in scales else math.nan for tensor in tensors])
        return cls(octaves, np.array([histograms[tensor].total for tensor in tensors]))


class Distance(NamedTuple):
    """The costs of the group's scales for a board, and of the board's scales for the group, in dB."""

    to_board_db: float
    to_group_db: float


@dataclass(frozen=True)
class OutlierLimits:
    """The distances beyond which a board is an outlier, and the median distances."""

    limit: Distance
    median: Distance

    @classmethod
    def from_distances(cls, distances: Sequence[Distance]) -> OutlierLimits:
        costs_db = np.array(distances)
        median = np.median(costs_db, axis=0)
        spread = _TO_SIGMA * np.median(np.abs(costs_db - median), axis=0)
        limit = np.maximum(median + _SPREADS * spread, LEAST_LIMIT_DB)
        return cls(Distance(*limit.tolist()), Distance(*median.tolist()))

    def reason(self, distance: Distance) -> str:
        """Return why a board is an outlier; empty if it is none."""
        harms = "the group's scales would cost this board", "this board's scales would cost the group"
        for harm, cost, usual, limit in zip(harms, distance, self.median, self.limit, strict=True):
            if cost > limit:
                return f"{harm} {cost:.1f} dB, the median of all is {usual:.1f}, the limit {limit:.1f}"
        return ""


class Group:
    """Compare boards with all boards of a group, by their sketches."""

    def __init__(self, tensors: Sequence[str], sketches: Sequence[Sketch]) -> None:
        self._tensors = tensors
        self._values = np.median([each.values for each in sketches], axis=0)
        stacked = np.stack([each.octaves for each in sketches])
        seen = ~np.isnan(stacked).all(axis=0)
        self._octaves = np.full(len(tensors), np.nan)
        self._octaves[seen] = np.nanmedian(stacked[:, seen], axis=0)
        self.scales = self._scales(self._octaves)

    def outweighed(self, sketch: Sketch) -> str:
        """Return why a board would count for more than one; empty if it would not.

        Tensors are compared one by one, because they differ in size by thousands: what is little for an image is all
        that a head has. Below this limit counts do not matter: a distance relates each tensor's noise to its signal.
        """
        beyond = sketch.values / np.maximum(self._values, 1.0)
        worst = int(np.argmax(beyond))
        if beyond[worst] <= _MOST_VALUES:
            return ""
        found = f"{sketch.values[worst]} values of '{self._tensors[worst]}'"
        return f"{found}, the median of all is {self._values[worst]:.0f}: no other board would count"

    def cost_to_board_db(self, histograms: Mapping[str, AbsHistogram]) -> float:
        """Return what the group's scales cost a board with these histograms."""
        return predicted_gain_db(histograms, self.scales)

    def costs_to_group_db(self, seen: Mapping[str, AbsHistogram], sketches: Sequence[Sketch]) -> list[float]:
        """Return what the scales of each board would cost the group. seen: the histograms of the whole group."""
        # For a tensor of which a board has no values the group's own scale stands in.
        sets = [self._scales(np.where(np.isnan(each.octaves), self._octaves, each.octaves)) for each in sketches]
        noises, least = network_noise(seen, sets)
        return [least.gain_db(noise) for noise in noises]

    def _scales(self, octaves: Scales) -> dict[str, float]:
        rows = zip(self._tensors, np.exp2(octaves).tolist(), strict=True)
        return {tensor: scale for tensor, scale in rows if not math.isnan(scale)}
