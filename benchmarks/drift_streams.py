"""Simulated months of video: the level of a network's values, second by second, and what a recalibration would gain.

The level is log2 of a tensor's RMS relative to its calibration, in octaves. Its parts have the standard deviations and
the correlation times of real fixed cameras (FACTS: integrated times of 11 to 43 frames at 30 fps):

    S1   jitter from frame to frame: 0.05 octaves, 0.67 s
    S2   S1, scenes that pass (0.08 octaves, 30 s) and weather (0.10 octaves, 20 min)
    S3   S4 and a day: a sine of one octave each way
    S4   S2 and 20 transients a day, 3 to 15 s of 2.5 octaves darker: headlights, somebody before the lens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy.signal import lfilter

from calibrate.histogram import abs_histogram
from calibrate.noise import Density
from calibrate.scale import QMAX
from calibrate.threshold import histogram_amax

DAY_S = 86_400
MONTH_S = 30 * DAY_S
REGIMES = (-1.2, -0.6, 0.0, 0.6, 1.2)  # octaves: five calibrations, cached over the day of S3

_JITTER, _SCENE, _WEATHER = (0.05, 0.67), (0.08, 30.0), (0.10, 1200.0)  # octaves, s
_MEASURED = 0.01  # octaves: what one frame's histogram is off
_TRANSIENTS_PER_DAY, _TRANSIENT_S, _TRANSIENT_OCTAVES = 20, (3.0, 15.0), -2.5

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Change:
    """From second `at_s` on the level is other by `octaves`; it gets there evenly within `ramp_s`."""

    at_s: int
    octaves: float
    ramp_s: float = 0.0


def levels(kind: str, seconds: int, seed: int, change: Change | None = None) -> Floats:
    """One stream (seconds,), in octaves; the same for equal arguments."""
    rng = np.random.default_rng(seed)
    found = _wander(rng, seconds, *_JITTER) + rng.normal(0.0, _MEASURED, seconds)
    if kind != "S1":
        found += _wander(rng, seconds, *_SCENE) + _wander(rng, seconds, *_WEATHER)
    if kind in ("S3", "S4"):
        found += _transients(rng, seconds)
    if kind == "S3":
        found += np.sin(2.0 * np.pi * (np.arange(seconds) / DAY_S + rng.random()))
    if change is not None:
        since = np.arange(seconds) - change.at_s
        found += change.octaves * np.where(since < 0, 0.0, np.clip(since / max(change.ramp_s, 1e-9), 0.0, 1.0))
    return found


def gains_db(octaves: Floats, regimes: Sequence[float] = (0.0,), method: str = "max") -> Floats:
    """What a recalibration would gain at these levels, beside the best of the calibrations cached at `regimes`.

    method: that chose the scales. Scales of the largest value clip nothing until the light grows by a quarter octave;
    those of least noise clip at once, so that the same light is worth more.
    """
    best: Floats = np.min([noises_db(octaves - regime, method) for regime in regimes], axis=0)
    return np.maximum(best, 0.0)


def noises_db(octaves: Floats, method: str) -> Floats:
    """Noise to signal of values that have moved by so many octaves since their calibration, over that of then."""
    shifts, noises = _noise_curve(method)
    return np.interp(octaves, shifts, noises)


def _wander(rng: np.random.Generator, seconds: int, octaves: float, time_s: float) -> Floats:
    """An autoregressive process of this standard deviation and correlation time, from its stationary state on."""
    kept = np.exp(-1.0 / time_s)
    noise = rng.normal(0.0, octaves * np.sqrt(1.0 - kept**2), seconds)
    noise[0] = rng.normal(0.0, octaves)
    wandered: Floats = lfilter([1.0], [1.0, -kept], noise)
    return wandered


def _transients(rng: np.random.Generator, seconds: int) -> Floats:
    darker = np.zeros(seconds)
    for start in np.flatnonzero(rng.random(seconds) < _TRANSIENTS_PER_DAY / DAY_S):
        darker[start : start + round(rng.uniform(*_TRANSIENT_S))] = _TRANSIENT_OCTAVES
    return darker


@cache
def _noise_curve(method: str) -> tuple[Floats, Floats]:
    """Octaves that values have moved by, and what that does in dB, for values spread as Laplace's."""
    values = np.abs(np.random.default_rng(0).laplace(size=400_000)).clip(0.0, 12.0).astype(np.float32)
    seen = abs_histogram(values)
    shifts = np.linspace(-8.0, 4.0, 241)
    rounding, clipping = Density(seen).noise(histogram_amax(seen, method) / QMAX * np.exp2(-shifts))
    noise = rounding + clipping
    return shifts, 10.0 * np.log10(noise / noise[np.argmin(np.abs(shifts))])
