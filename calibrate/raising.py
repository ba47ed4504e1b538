"""Which groups of layers to leave float first, where INT8 itself is what costs fidelity: those that make the noise."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def rungs(noise: NDArray[np.float64]) -> list[tuple[int, ...]]:
    """Ever more of the loudest groups, by index, the loudest first; noise (n,) >= 0.

    Without the first tuple's groups at most half of the noise is left (3 dB less), without the next one's at most half
    of that, and so on to the last, which leaves none. Groups without noise are in none. Raises ValueError where a noise
    is negative, or their sum not finite.
    """
    with np.errstate(over="ignore"):
        total = float(noise.sum())
    if not (np.isfinite(total) and (noise >= 0.0).all()):
        raise ValueError(f"noise has to be finite and not negative, got {noise}")
    order = [index for index in np.argsort(-noise, kind="stable").tolist() if noise[index] > 0.0]
    left = np.append(np.cumsum(noise[order][::-1])[::-1], 0.0)  # when the first so many are float
    found: list[tuple[int, ...]] = []
    taken = 0
    while taken < len(order):
        taken = int(np.argmax(left <= 0.5 * left[taken]))  # left never rises: the first of them
        found.append(tuple(order[:taken]))
    return found
