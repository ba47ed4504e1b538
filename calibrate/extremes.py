"""Keep the least and the largest value of each channel of what a layer reads: exact, and mergeable in any order.

Histograms are of |x| and of whole tensors. The range of an input that is divided channel by channel does not follow
from them; it does from these, for any divisors.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

Extremes = NDArray[np.float32]  # (2, channels): the least and the largest value of each channel


def merge_extremes(into: dict[str, Extremes], others: Mapping[str, Extremes]) -> None:
    """Merge extremes by name into those that are known."""
    for name, seen in others.items():
        known = into.get(name, seen)
        into[name] = np.stack((np.minimum(known[0], seen[0]), np.maximum(known[1], seen[1])))


def divided_ends(extremes: Extremes, divisors: ArrayLike, offsets: ArrayLike) -> tuple[float, float]:
    """Return the least and the largest value of (x - offset) / divisor over all channels.

    divisors: (channels,), positive. offsets: (channels,), or one for all.
    """
    low, high = (extremes.astype(np.float64) - np.asarray(offsets)) / np.asarray(divisors)
    return float(low.min()), float(high.max())


def kept_amax(ends: tuple[float, float], reach: float, centred: bool) -> float:
    """Return the range of a tensor from its least and largest value, of which it keeps the fraction `reach`.

    A centred tensor, one with offsets, is clipped at its high end alone: at the low one ReLU and SiLU have most values.
    """
    low, high = ends
    return max(-low, reach * high) if centred else reach * max(-low, high)


def undivided(extremes: Extremes, divisors: ArrayLike, offsets: ArrayLike) -> Extremes:
    """Return the extremes of x from those of (x - offset) / divisor; the rest as for `divided_ends`."""
    original: Extremes = (extremes.astype(np.float64) * np.asarray(divisors) + np.asarray(offsets)).astype(np.float32)
    return original
