"""The mean of paired differences between two engines, with bounds that hold for few frames of any distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

ERROR = 0.05
_MEANS = np.linspace(-1.0, 1.0, 501)  # candidate means; the bounds are wider than exact by up to one step a side
# Of the bet at which one value can cost a gambler everything. Of 64 pairs that gain 0.1 with a deviation of 0.2, half
# shows a gain in 17 samples of 100 and nine tenths in 71, and misses the mean no more often than it may.
_BOLDEST = 0.9


def gain_bounds(differences: NDArray[np.float64], error: float = ERROR) -> tuple[float, float]:
    """Two-sided bounds of the mean of differences (n,) in [-1, 1]; they miss it with probability `error` at most.

    For every mean two gamblers bet against it, on higher and on lower differences, each value before they see it. A
    mean is ruled out once one has made 2 / error out of 1. Source: Waudby-Smith and Ramdas, "Estimating means of
    bounded random variables by betting" (JRSS B 2024), the hedged capital of Theorem 3 with the predictable bets of
    Section 4.3, for a number of values that is known beforehand. Holds when the conditional mean is constant, and for
    the one order in which the values came: bounds averaged over several orders hold for none.

    No values: (-1, 1). Where chance rules out what the values themselves have as mean, the bounds are widened to it.
    Raises ValueError for values outside [-1, 1], NaN among them, and for an error outside (0, 1).
    """
    if not 0.0 < error < 1.0:
        raise ValueError(f"error must lie in (0, 1), got {error}")
    if not (np.abs(differences) <= 1.0).all():
        raise ValueError("differences of two fidelities lie in [-1, 1]")
    if not differences.size:
        return -1.0, 1.0
    ruin = math.log(2.0 / error)
    bets = _bets(differences, ruin)[:, np.newaxis]
    with np.errstate(divide="ignore"):  # at the ends of the range no bet is too bold
        higher = np.minimum(bets, _BOLDEST / (_MEANS + 1.0)) * (differences[:, np.newaxis] - _MEANS)
        lower = np.minimum(bets, _BOLDEST / (1.0 - _MEANS)) * (_MEANS - differences[:, np.newaxis])
    too_low = (np.log1p(higher).cumsum(axis=0) >= ruin).any(axis=0)
    too_high = (np.log1p(lower).cumsum(axis=0) >= ruin).any(axis=0)
    mean = float(differences.mean())
    low = float(_MEANS[too_low].max(initial=-1.0))
    high = float(_MEANS[too_high].min(initial=1.0))
    return min(low, mean), max(high, mean)


def _bets(differences: NDArray[np.float64], ruin: float) -> NDArray[np.float64]:
    """(n,): each from the values before it alone, with one prior value of variance 1."""
    n = differences.size
    counts = np.arange(1, n + 1)
    means = differences.cumsum() / (counts + 1)
    squares = 1.0 + np.square(differences - means).cumsum()
    variances = np.concatenate(([1.0], (squares / (counts + 1))[:-1]))
    bets: NDArray[np.float64] = np.sqrt(2.0 * ruin / (n * variances))
    return bets
