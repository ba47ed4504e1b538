"""Predict the noise-to-signal ratio of one tensor, for tests of what is derived from it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from calibrate.histogram import AbsHistogram
from calibrate.noise import Density, noise_power

Floats = NDArray[np.float64]


def noise_to_signal(histogram: AbsHistogram, scales: Floats) -> Floats:
    """Return the total noise over the signal's power, (n,), at scales (n,), all positive: at 1.0 no signal is left."""
    density = Density.from_histogram(histogram)
    power = density.density @ np.diff(density.edges**3) / 3.0
    return np.asarray(np.add(*noise_power(histogram, scales)) / power)
