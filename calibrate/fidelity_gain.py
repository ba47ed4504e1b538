"""Say in fidelity what so many dB of quantisation noise are worth: for this model, from what recalibrations gained.

Two things bound what less noise can gain. No more can be won back than is lost now; and of that, the share that goes
with the noise. Answers change where a score lies within the noise of a threshold, so that they change in proportion to
the amplitude of the noise: of a loss, G dB less noise take away the share 1 - 10^(-G/20). Their product is the
*recoverable loss*. `GainMap` maps it to the gain by isotonic regression, the least-squares fit that never falls.

It begins with a prior, measured on several models and clips by `benchmarks.drift_ladder --prior`, and goes on with what
recalibrations of this model gained: a map of its own, once there are enough of them.

Source: Barlow, Bartholomew, Bremner and Brunk, "Statistical Inference under Order Restrictions" (1972), section 1.2,
for the pool-adjacent-violators algorithm; Lei et al., "Distribution-Free Predictive Inference for Regression" (JASA
2018), section 5.2, for bounds that are as wide as residuals in units of the spread that was expected of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.evidence import Interval

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recalibrated:
    """What a recalibration really gained, on the same frames before and after.

    gain_db: As it was predicted. loss: 1 - fidelity before. gained: Of fidelity, below 0 where it lost.
    frames: On which that was measured.
    """

    gain_db: float
    loss: float
    gained: float
    frames: int


def recoverable_loss(gain_db: float, loss: float, frames: int) -> float:
    """Return the part of a loss in [0, 1], seen on so many frames, that goes with `gain_db` less noise.

    A few frames without a fault are no proof that nothing is lost: they count as if one more had lost a usual share.

    >>> round(recoverable_loss(6.0, 0.2, 24), 3)      # half of the amplitude of the noise goes, and half of the loss
    0.098
    """
    seen = (loss * frames + _USUAL_LOSS) / (frames + 1)
    return seen * -math.expm1(-max(gain_db, 0.0) * math.log(10.0) / 20.0)


# TABLE
_USUAL_LOSS = 0.1  # that of one frame more
_PRIOR = np.array([(0.0, 0.0, 10.0), (0.05, 0.02, 10.0), (0.1, 0.08, 10.0), (0.3, 0.25, 10.0), (1.0, 0.9, 10.0)])
_PRIOR_MISSES = np.linspace(0.1, 1.2, 19)
_OWN_WEIGHT, _MOST_FRAMES = 10.0, 64
_LEAST_SPREAD = 0.02
_COVERED = 0.8


class GainMap:
    """From the recoverable loss to the fidelity that a recalibration gains, with bounds.

    >>> prior, taught = GainMap(), GainMap([Recalibrated(12.0, 0.3, 0.0, 64)] * 8)
    >>> prior.gain(12.0, 0.3, 24).estimate > 0.1      # models in general
    True
    >>> taught.gain(12.0, 0.3, 24).estimate < 0.05    # one to which recalibrations gave nothing back eight times
    True
    """

    def __init__(self, known: Sequence[Recalibrated] = ()) -> None:
        """known: Of this model."""
        own = np.array([recoverable_loss(each.gain_db, each.loss, each.frames) for each in known])
        gained = np.array([each.gained for each in known])
        weights = np.array([_OWN_WEIGHT * min(each.frames, _MOST_FRAMES) / _MOST_FRAMES for each in known])
        order = np.argsort(np.concatenate((_PRIOR[:, 0], own)), kind="stable")
        self._places = np.concatenate((_PRIOR[:, 0], own))[order]
        self._gains = isotonic(
            np.concatenate((_PRIOR[:, 1], gained))[order], np.concatenate((_PRIOR[:, 2], weights))[order]
        )
        misses = np.abs(gained - self._at(own)) / _spread(own)
        self._widths = _quantile(np.concatenate((_PRIOR_MISSES, misses)), _COVERED)

    def gain(self, gain_db: float, loss: float, frames: int) -> Interval:
        """Return what a recalibration is expected to gain; low and high hold for four in five of them.

        Args:
            gain_db: As predicted.
            loss: 1 - fidelity now, on so many frames.
        """
        place = np.array([recoverable_loss(gain_db, loss, frames)])
        expected, margin = float(self._at(place)[0]), float(self._widths * _spread(place)[0])
        return Interval(expected, max(expected - margin, -1.0), min(expected + margin, 1.0), frames)

    def _at(self, places: Floats) -> Floats:
        return np.interp(places, self._places, self._gains)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Return the fit to values (n,) that never falls and has the least squared error, by weights (n,), all positive.

    >>> isotonic(np.array([1.0, 3.0, 2.0, 5.0]), np.ones(4))
    array([1. , 2.5, 2.5, 5. ])
    """
    blocks: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while blocks and blocks[-1][0] >= mean:
            before, mass, members = blocks.pop()
            mean = (before * mass + mean * total) / (mass + total)
            total, count = total + mass, count + members
        blocks.append((mean, total, count))
    return np.repeat([mean for mean, _, _ in blocks], [count for _, _, count in blocks])


def _spread(places: Floats) -> Floats:
    """Return how far gains lie about the map, up to a factor that is the same everywhere."""
    return _LEAST_SPREAD + places


def _quantile(misses: Floats, share: float) -> float:
    """Return the value that a further miss is below in `share` of cases, if it is one of the same kind."""
    rank = min(math.ceil((misses.size + 1) * share), misses.size)
    return float(np.sort(misses)[rank - 1])
