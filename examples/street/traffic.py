"""Who is in the street when: timetables of vehicles and pedestrians, given by a seed and the time.

Vehicles of one lane share its speed, so they keep their gaps; pedestrians walk at a pace of their own and may
overtake.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from examples.street.light import Colour
from examples.street.vehicles import KINDS, shape
from examples.street.view import SEEN_X

_LANES = ((10.6, 1.0, 6.3), (13.8, -1.0, 5.4))  # centre Z in metres, direction along X, speed in m/s
_PAVEMENTS = ((7.75, 8.55, 0.085), (16.1, 17.4, 0.17))  # nearest and farthest Z, arrivals per second
_MEAN_GAP_M, _LEAST_GAP_M = 7.5, 3.5
_KIND_SHARES = (0.28, 0.27, 0.20, 0.15, 0.10)
_STREET_M = SEEN_X[1] - SEEN_X[0]
# Linear blue, green, red reflectances.
_PAINTS = (
    (0.62, 0.63, 0.64), (0.30, 0.30, 0.30), (0.13, 0.13, 0.13), (0.025, 0.025, 0.028), (0.03, 0.03, 0.36),
    (0.30, 0.10, 0.04), (0.10, 0.20, 0.05), (0.08, 0.38, 0.55), (0.45, 0.38, 0.25), (0.04, 0.14, 0.42),
)  # fmt: skip
_TOPS = (
    (0.55, 0.55, 0.56), (0.06, 0.06, 0.42), (0.35, 0.15, 0.06), (0.06, 0.40, 0.50), (0.10, 0.28, 0.10),
    (0.05, 0.05, 0.05), (0.18, 0.17, 0.20), (0.40, 0.20, 0.45), (0.15, 0.35, 0.62),
)  # fmt: skip
_TROUSERS = ((0.035, 0.035, 0.04), (0.20, 0.10, 0.05), (0.12, 0.20, 0.27), (0.10, 0.10, 0.11))
_SKINS = ((0.25, 0.35, 0.55), (0.18, 0.27, 0.45), (0.09, 0.14, 0.25))


@dataclass(frozen=True)
class Vehicle:
    """A vehicle at one moment: centre (x, z) on the road in metres, `heading` +1 or -1 along X."""

    kind: str
    paint: Colour
    x: float
    z: float
    heading: float


@dataclass(frozen=True)
class Pedestrian:
    """A pedestrian at one moment: feet at (x, z) in metres, `stride` the phase of the walk in radians."""

    x: float
    z: float
    heading: float
    height: float
    stride: float
    top: Colour
    trousers: Colour
    skin: Colour
    carries: str  # nothing, rucksack or bag


class Traffic:
    """The timetable of `duration_s` seconds, drawn from `seed`; the street is already busy at time zero."""

    def __init__(self, seed: int, duration_s: float) -> None:
        self._rng = np.random.default_rng((seed, 2))
        self._lanes = [self._drive(lane, duration_s) for lane in _LANES]
        self._walks = [walk for pavement in _PAVEMENTS for walk in self._walk(pavement, duration_s)]

    def _drive(self, lane: tuple[float, float, float], duration_s: float) -> list[tuple[float, Vehicle]]:
        """Every vehicle of a lane with the distance in metres at which it follows the lane's start."""
        z, heading, speed = lane
        cars, behind = [], -_STREET_M
        while behind < speed * duration_s:
            kind = str(self._rng.choice(KINDS, p=_KIND_SHARES))
            length = shape(kind).length
            paint = _PAINTS[int(self._rng.integers(len(_PAINTS)))]
            wander = float(self._rng.uniform(-0.15, 0.15))
            cars.append((behind + length / 2, Vehicle(kind, paint, 0.0, z + wander, heading)))
            behind += length + _LEAST_GAP_M + float(self._rng.exponential(_MEAN_GAP_M))
        return cars

    def _walk(self, pavement: tuple[float, float, float], duration_s: float) -> list[tuple[float, float, Pedestrian]]:
        """Every pedestrian of a pavement with the time of arrival in seconds and the pace in m/s."""
        nearest, farthest, rate = pavement
        longest_s = _STREET_M / 0.9
        rng, walks = self._rng, []
        for _ in range(int(rng.poisson(rate * (duration_s + longest_s)))):
            walker = Pedestrian(
                x=0.0,
                z=float(rng.uniform(nearest, farthest)),
                heading=float(rng.choice((-1.0, 1.0))),
                height=float(rng.uniform(1.58, 1.88)),
                stride=float(rng.uniform(0.0, 2 * np.pi)),
                top=_TOPS[int(rng.integers(len(_TOPS)))],
                trousers=_TROUSERS[int(rng.integers(len(_TROUSERS)))],
                skin=_SKINS[int(rng.integers(len(_SKINS)))],
                carries=str(rng.choice(("nothing", "nothing", "rucksack", "bag"))),
            )
            walks.append((float(rng.uniform(-longest_s, duration_s)), float(rng.uniform(0.9, 1.6)), walker))
        return walks

    def vehicles(self, ts: float) -> list[Vehicle]:
        """The vehicles between the ends of the street `ts` seconds after the start."""
        present = []
        for (_, heading, speed), cars in zip(_LANES, self._lanes, strict=True):
            for behind, car in cars:
                driven = speed * ts - behind
                if 0.0 <= driven <= _STREET_M:
                    x = SEEN_X[0] + driven if heading > 0 else SEEN_X[1] - driven
                    present.append(Vehicle(car.kind, car.paint, x, car.z, heading))
        return present

    def pedestrians(self, ts: float) -> list[Pedestrian]:
        """The pedestrians between the ends of the street `ts` seconds after the start."""
        present = []
        for arrival, pace, walker in self._walks:
            walked = pace * (ts - arrival)
            if 0.0 <= walked <= _STREET_M:
                x = SEEN_X[0] + walked if walker.heading > 0 else SEEN_X[1] - walked
                stride = walker.stride + walked * 2 * np.pi / (0.85 * walker.height)
                present.append(Pedestrian(x, walker.z, walker.heading, walker.height, stride, walker.top,
                                          walker.trousers, walker.skin, walker.carries))  # fmt: skip
        return present
