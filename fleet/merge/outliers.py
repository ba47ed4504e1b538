"""Boards whose frames are unlike those of their group, by what sharing one calibration would cost.

The distance of a board to its group is told in dB of quantisation noise, as tared's drift is: how much more noise the
group's scales make on what the board has seen than its own best scales would (`calibrate.noise`), and how much more its
scales would make on what the group has seen. The first is what sharing a calibration does to the board, the second what
its share in it does to the others. Both are needed: on real models a dark or blurred view shows by the second, noise
and a covered lens by the first (benchmarks/RESULTS.md). A distance between scales alone would not know which tensor's
matter.

The group's scales are the medians of the boards' own: half of the boards would have to lie to move them. A distance is
too large beyond the median of all by five times their spread (the median absolute deviation, scaled to a standard
deviation: Rousseeuw & Croux, "Alternatives to the Median Absolute Deviation", 1993), and never below 3 dB, the gain for
which no board would recalibrate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram
from calibrate.noise import best_scales, network_noise, predicted_gain_db

LEAST_LIMIT_DB = 3.0
_SPREADS = 5.0
_TO_SIGMA = 1.4826  # of a normal distribution, from its median absolute deviation
_MOST_VALUES = 16.0  # times the group's median: what counts more than that is not one board among many

Scales = NDArray[np.float64]


@dataclass(frozen=True)
class Sketch:
    """What is kept of a board: log2 of each tensor's best scale, NaN where it saw nothing, and how many values it had.

    octaves: float64 (tensors,), values: int64 (tensors,), in the order of the group's tensors.
    """

    octaves: Scales
    values: NDArray[np.int64]

    @classmethod
    def from_histograms(cls, histograms: Mapping[str, AbsHistogram], tensors: Sequence[str]) -> Sketch:
        scales = best_scales(histograms)
        octaves = np.array([math.log2(scales[tensor]) if tensor in scales else math.nan for tensor in tensors])
        return cls(octaves, np.array([histograms[tensor].total for tensor in tensors]))


@dataclass(frozen=True)
class Distance:
    """Of a board and its group, in dB: what the group's scales cost it, and what its scales would cost the group."""

    to_board_db: float
    to_group_db: float


@dataclass(frozen=True)
class OutlierLimits:
    """Beyond which distances, in dB, a board is an outlier; and the median distances."""

    to_board_db: float
    to_group_db: float
    median: Distance

    @classmethod
    def from_distances(cls, distances: Sequence[Distance]) -> OutlierLimits:
        to_board = [each.to_board_db for each in distances]
        to_group = [each.to_group_db for each in distances]
        median = Distance(float(np.median(to_board)), float(np.median(to_group)))
        return cls(_limit(to_board), _limit(to_group), median)

    def reason(self, distance: Distance) -> str:
        """Why a board is an outlier; empty where it is none."""
        if distance.to_board_db > self.to_board_db:
            cost, usual, limit = distance.to_board_db, self.median.to_board_db, self.to_board_db
            harm = "the group's scales would cost this board"
        elif distance.to_group_db > self.to_group_db:
            cost, usual, limit = distance.to_group_db, self.median.to_group_db, self.to_group_db
            harm = "this board's scales would cost the group"
        else:
            return ""
        return f"{harm} {cost:.1f} dB, the median of all is {usual:.1f}, the limit {limit:.1f}"


class Group:
    """Of boards, by their sketches."""

    def __init__(self, tensors: Sequence[str], sketches: Sequence[Sketch]) -> None:
        self._tensors = tensors
        self._values = np.median([each.values for each in sketches], axis=0)
        stacked = np.stack([each.octaves for each in sketches])
        seen = ~np.isnan(stacked).all(axis=0)
        self._octaves = np.full(len(tensors), np.nan)
        self._octaves[seen] = np.nanmedian(stacked[:, seen], axis=0)
        self.scales = self._scales(self._octaves)

    def outweighed(self, sketch: Sketch) -> str:
        """Why a board would count for more than one; empty where it would not.

        Tensor by tensor, for they differ in size by thousands: what is little beside an image is all that a head has.
        Beyond this counts do not matter, since a distance has each tensor's noise beside that tensor's own signal.
        """
        beyond = sketch.values / np.maximum(self._values, 1.0)
        worst = int(np.argmax(beyond))
        if beyond[worst] <= _MOST_VALUES:
            return ""
        found = f"{sketch.values[worst]} values of '{self._tensors[worst]}'"
        return f"{found}, the median of all is {self._values[worst]:.0f}: no other board would count"

    def cost_to_board_db(self, histograms: Mapping[str, AbsHistogram]) -> float:
        """What the group's scales cost who has seen this."""
        return predicted_gain_db(histograms, self.scales)

    def costs_to_group_db(self, seen: Mapping[str, AbsHistogram], sketches: Sequence[Sketch]) -> list[float]:
        """What the scales of each of these boards would cost the group, which has `seen` this."""
        # For a tensor on which a board has nothing to say the group's own scale stands in.
        sets = [self._scales(np.where(np.isnan(each.octaves), self._octaves, each.octaves)) for each in sketches]
        noises, least = network_noise(seen, sets)
        return [least.gain_db(noise) for noise in noises]

    def _scales(self, octaves: Scales) -> dict[str, float]:
        rows = zip(self._tensors, np.exp2(octaves).tolist(), strict=True)
        return {tensor: scale for tensor, scale in rows if not math.isnan(scale)}


def _limit(costs_db: Sequence[float]) -> float:
    median = float(np.median(costs_db))
    spread = _TO_SIGMA * float(np.median(np.abs(np.asarray(costs_db) - median)))
    return max(median + _SPREADS * spread, LEAST_LIMIT_DB)
