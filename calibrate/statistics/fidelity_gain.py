"""Say in fidelity what so many dB of quantisation noise are worth: for this model, from what recalibrations gained.

Two things bound what less noise can gain. No more can be won back than is lost now; and of that, the share that goes
with the noise. Answers change where a score lies within the noise of a threshold, so that they change in proportion to
the amplitude of the noise: of a loss, G dB less noise take away the share 1 - 10^(-G/20). Their product is the
*recoverable loss*. `GainMap` maps it to the gain by isotonic regression, the least-squares fit that never falls.

It begins with a prior, measured on four models (`python -m benchmarks.drift_ladder`), and goes on with what
recalibrations of this model gained.

Source: Barlow, Bartholomew, Bremner and Brunk, "Statistical Inference under Order Restrictions" (1972), section 1.2,
for the pool-adjacent-violators algorithm; Lei et al., "Distribution-Free Predictive Inference for Regression" (JASA
2018), section 5.2, for bounds as wide as residuals are, in units of the spread that is expected of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from calibrate.statistics.evidence import Interval

Floats = NDArray[np.float64]

_USUAL_LOSS = 0.1  # that of one frame more than were seen
_LEAST_SPREAD = 0.02
_COVERED = 0.8
# Where a map has the prior beside what this model gained, denser where most losses are; each weighs as a quarter of a
# recalibration.
_PLACES = np.linspace(0.0, 1.0, 17) ** 2
_PRIOR_WEIGHT = 0.25
_FULL_WEIGHT = 24  # frames that one was measured on; fewer weigh less


@dataclass(frozen=True)
class Recalibrated:
    """Hold the real gain of a recalibration, on the same frames before and after.

    Args:
        gain_db: The predicted gain in dB.
        loss: 1 - fidelity before, in [0, 1].
        gained: Fidelity after, less fidelity before; below 0 where it lost.
        frames: Number of frames on which the loss was seen.

    >>> Recalibrated(gain_db=12.0, loss=0.3, gained=0.2, frames=64).recoverable > 0.2      # 12 dB are worth most of 0.3
    True
    """

    gain_db: float
    loss: float
    gained: float
    frames: int

    @property
    def recoverable(self) -> float:
        """The part of the loss that goes with the predicted gain: `recoverable_loss`."""
        return recoverable_loss(self.gain_db, self.loss, self.frames)


def recoverable_loss(gain_db: float, loss: float, frames: int) -> float:
    """Return the part of a loss that goes with `gain_db` less noise, in [0, 1].

    A few frames without a fault are no proof that nothing is lost: they count with one more, of a usual loss.

    Args:
        gain_db: The predicted gain in dB; a negative one counts as 0.
        loss: 1 - fidelity, in [0, 1].
        frames: Number of frames on which the loss was seen.

    >>> round(recoverable_loss(6.0, 0.2, 24), 3)      # half of the amplitude of the noise goes, and half of the loss
    0.098
    """
    seen = (loss * frames + _USUAL_LOSS) / (frames + 1)
    return seen * -math.expm1(-max(gain_db, 0.0) * math.log(10.0) / 20.0)


@dataclass(frozen=True)
class Prior:
    """Describe the gains of other models' recalibrations: `slope * r**2 / (r + chance)`, with the recoverable loss r.

    Args:
        slope: Factor of the curve.
        chance: The loss that is mostly chance: answers that flip either way, some right again by any other scales, and
            as many others wrong.
        misses: Quantiles, evenly spaced, of how far gains were from the curve, in units of the spread that is expected.

    >>> PRIOR.gains(np.array([0.0, 0.02, 0.5])).round(3)     # most of a small loss is chance
    array([0.   , 0.004, 0.453])
    """

    slope: float
    chance: float
    misses: tuple[float, ...]

    def gains(self, recoverable: Floats) -> Floats:
        """Return the mean gain of recoverable losses (n,): (n,)."""
        return self.slope * recoverable**2 / (recoverable + self.chance)


# Of 468 conditions of four models (benchmarks/RESULTS.md).
PRIOR = Prior(
    slope=1.051,
    chance=0.08,
    misses=(
        *(0.0, 0.0, 0.001, 0.003, 0.02, 0.058, 0.106, 0.149, 0.239, 0.314),
        *(0.378, 0.42, 0.483, 0.559, 0.684, 0.906, 1.201, 1.593, 2.978),
    ),
)


class GainMap:
    """Map the recoverable loss to the fidelity that a recalibration gains, with bounds.

    >>> prior, taught = GainMap(), GainMap([Recalibrated(12.0, 0.3, 0.0, 64)] * 8)
    >>> prior.gain(12.0, 0.3, 24).estimate > 0.1      # models in general
    True
    >>> taught.gain(12.0, 0.3, 24).estimate < 0.05    # one to which recalibrations gave nothing back eight times
    True
    """

    def __init__(self, known: Sequence[Recalibrated] = (), prior: Prior = PRIOR) -> None:
        """Fit the map to the prior and to the recalibrations of this model.

        Args:
            known: Recalibrations of this model, in any order.
            prior: The gains of other models.
        """
        own = np.array([each.recoverable for each in known])
        gained = np.array([each.gained for each in known])
        places = np.concatenate((_PLACES, own))
        weights = [min(each.frames, _FULL_WEIGHT) / _FULL_WEIGHT for each in known]
        order = np.argsort(places, kind="stable")
        self._places = places[order]
        self._gains = isotonic(
            np.concatenate((prior.gains(_PLACES), gained))[order],
            np.concatenate((np.full(_PLACES.size, _PRIOR_WEIGHT), weights))[order],
        )
        misses = np.sort(np.concatenate((prior.misses, np.abs(gained - self._at(own)) / spread(own))))
        rank = min(math.ceil((misses.size + 1) * _COVERED), misses.size)
        self._width = float(misses[rank - 1])

    def gain(self, gain_db: float, loss: float, frames: int) -> Interval:
        """Return the gain in fidelity that is expected of a recalibration; low and high hold for four in five of them.

        Args:
            gain_db: The predicted gain in dB.
            loss: 1 - fidelity now, in [0, 1].
            frames: Number of frames on which the loss was seen.
        """
        place = np.array([recoverable_loss(gain_db, loss, frames)])
        expected, margin = float(self._at(place)[0]), self._width * float(spread(place)[0])
        return Interval(expected, max(expected - margin, -1.0), min(expected + margin, 1.0), frames)

    def _at(self, places: Floats) -> Floats:
        return np.interp(places, self._places, self._gains)


def isotonic(values: Floats, weights: Floats) -> Floats:
    """Return the fit to values that never falls and has the least squared error.

    Args:
        values: (n,).
        weights: (n,), all positive.

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


def spread(places: Floats) -> Floats:
    """Return how far gains lie about the map, up to a factor that is the same everywhere.

    >>> spread(np.array([0.0, 0.3])).tolist()
    [0.02, 0.32]
    """
    return _LEAST_SPREAD + places
