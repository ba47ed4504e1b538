"""Fit the times of each fusion group in INT8 and in float, and of their boundaries, to a few measured designs.

A design is a colouring of the groups: which are INT8. The time of a group, with what is put before and behind it to
convert between the types, is modelled as its time in INT8 or in float, plus a share for each of its edges that the
design cuts. Both ends of an edge see their share of its boundary apart from one another, so every group is a small
regression of its own, by non-negative least squares (Lawson & Hanson, "Solving Least Squares Problems", 1974).

Read in this order: `designs` says what to measure, `fit_costs` fits the times, `Noise` and `is_noise` say whether the
fitted differences are more than chance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

# Random designs beside all float and all INT8. More: a better fit, and one more engine to build for each.
_WORD = 6
# Weight of one observation that pulls boundaries to zero: a time that no design separates goes to the group itself, or
# evenly to its edges. Larger: boundaries are underestimated.
_RIDGE = 0.01
# Squared: the types count as different if their difference is twice what chance alone would show. Smaller: noise passes
# for costs.
_SIGNAL = 4.0

Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]
Edges = NDArray[np.int64]


@dataclass(frozen=True)
class CostFit:
    """Hold the fitted times, in the unit of the observations, none negative.

    Args:
        time_int8: (n,), time of each group in INT8. It includes the boundaries to neighbours that are never INT8.
        time_float: (n,), time of each group in float; equal to `time_int8` for a group that was seen in one type only.
        boundary: (m,), the time that an edge adds where its ends differ.
        residual: The root mean square, over designs, of (fitted - measured) / measured total.
        weights: (d, n), the weights of the designs' times in `saving`; 0 for a group that was seen in one type only.

    >>> fit = CostFit(np.array([1.0, 4.0]), np.array([3.0, 2.0]), np.zeros(1), 0.0, np.zeros((4, 2)))
    >>> fit.saving                                # the second group is slower in INT8
    array([ 2., -2.])
    """

    time_int8: Floats
    time_float: Floats
    boundary: Floats
    residual: float
    weights: Floats

    @property
    def saving(self) -> Floats:
        """The time that INT8 saves in each group, (n,); negative where INT8 is slower."""
        return self.time_float - self.time_int8


def designs(free: Labels, edges: Edges, seed: int = 0) -> Labels:
    """Return the designs to measure, (d, n), d <= 8, True for INT8: all float first, all INT8 second, then random ones.

    Args:
        free: (n,), True for groups that may be INT8.
        edges: (m, 2), indices of neighbouring groups.
        seed: Seed of the random designs; equal seeds give equal designs.

    In the random designs every group is INT8 in half of them, and as far as 20 patterns go, neighbours and neighbours'
    neighbours follow different patterns. Two different patterns of equal weight differ both ways, so an edge is cut in
    both directions, and no two edges of a group are always cut together.

    >>> chain = np.array([[0, 1], [1, 2]])
    >>> measured = designs(np.array([True, True, False]), chain)
    >>> measured.shape, measured[0].tolist(), measured[1].tolist()
    ((4, 3), [False, False, False], [True, True, False])
    """
    rng = np.random.default_rng(seed)
    words = np.array([np.isin(np.arange(_WORD), chosen) for chosen in combinations(range(_WORD), _WORD // 2)])
    near = np.zeros((free.size, free.size))
    near[edges[:, 0], edges[:, 1]] = near[edges[:, 1], edges[:, 0]] = 1.0
    near += (near @ near > 0.0) / free.size  # to differ from a neighbour comes first
    chosen = np.full(free.size, -1)
    for group in np.flatnonzero(free):
        known = chosen >= 0
        conflicts = np.bincount(chosen[known], near[group, known], minlength=len(words))
        chosen[group] = rng.choice(np.flatnonzero(conflicts == conflicts.min()))
    coloured = np.where(free, words[chosen].T, False)
    stacked = np.concatenate((np.zeros((1, free.size), np.bool_), free[None, :], coloured))
    first = np.sort(np.unique(stacked, axis=0, return_index=True)[1])
    return stacked[first]


def total(time_int8: Floats, time_float: Floats, boundary: Floats, edges: Edges, labels: Labels) -> Floats:
    """Return the time of each design, (d,): the times of its groups, and of the boundaries that it cuts.

    Args:
        time_int8: (n,), time of each group in INT8.
        time_float: (n,), time of each group in float.
        boundary: (m,), time that an edge adds where its ends differ.
        edges: (m, 2), indices of groups.
        labels: (d, n), True for INT8.

    >>> chain = np.array([[0, 1], [1, 2]])
    >>> total(np.ones(3), 3.0 * np.ones(3), 0.5 * np.ones(2), chain, np.array([[True, False, True]]))
    array([6.])
    """
    cut = labels[:, edges[:, 0]] != labels[:, edges[:, 1]]
    times: Floats = np.where(labels, time_int8, time_float).sum(axis=1) + cut @ boundary
    return times


def fit_costs(labels: Labels, times: Floats, edges: Edges) -> CostFit:
    """Fit the times of groups and boundaries to measured designs.

    Args:
        labels: (d, n), the designs, True for INT8.
        times: (d, n), the measured time of each group in each design, in any one unit.
        edges: (m, 2), indices of neighbouring groups.

    Returns:
        CostFit: Its times have the unit of `times`.

    >>> chain = np.array([[0, 1]])
    >>> measured = np.array([[False, False], [True, True], [True, False], [False, True]])
    >>> fit = fit_costs(measured, np.where(measured, 1.0, 3.0), chain)
    >>> fit.time_int8.round(2), fit.time_float.round(2), fit.boundary.round(2)     # conversions are free here
    (array([1., 1.]), array([3., 3.]), array([0.]))
    """
    n = times.shape[1]
    time_int8, time_float, boundary = np.zeros(n), np.zeros(n), np.zeros(len(edges))
    cut = (labels[:, edges[:, 0]] != labels[:, edges[:, 1]]).astype(np.float64)
    incident: list[list[int]] = [[] for _ in range(n)]
    for number, (i, j) in enumerate(edges):
        incident[i].append(number)
        incident[j].append(number)
    weights = np.zeros(times.shape)
    for group in range(n):
        near = incident[group]
        fit, weights[:, group] = _regress(labels[:, group], cut[:, near], times[:, group])
        time_int8[group], time_float[group] = fit[:2]
        boundary[near] += fit[2:]
    fitted = total(time_int8, time_float, boundary, edges, labels)
    measured = times.sum(axis=1)
    relative = (fitted - measured) / np.where(measured > 0.0, measured, 1.0)
    return CostFit(time_int8, time_float, boundary, float(np.sqrt(np.mean(relative**2))), weights)


def _regress(own: Labels, cut: Floats, times: Floats) -> tuple[Floats, Floats]:
    """Fit one group: its times in INT8 and float, then its shares of its boundaries; and the weights (d,) of `saving`.

    The weights are those of plain least squares on the boundaries that the fit found to cost something.
    """
    # Imported here: half a second and 36 MiB of a job, and most fit no costs.
    from scipy.optimize import nnls

    edges = cut.shape[1]
    design = np.column_stack((own, ~own, cut)).astype(np.float64)
    ridge = np.column_stack((np.zeros((edges, 2)), np.sqrt(_RIDGE) * np.eye(edges)))
    stacked = np.concatenate((design, ridge))
    fit, _ = nnls(stacked, np.concatenate((times, np.zeros(edges))))
    if not own.any() or own.all():
        fit[:2] = fit[:2].max()
        return fit, np.zeros(own.size)
    used = np.flatnonzero((fit > 0.0) | (np.arange(fit.size) < 2))
    solution = np.linalg.pinv(stacked[:, used])[:, : own.size]
    return fit, solution[1] - solution[0]


@dataclass(frozen=True)
class Noise:
    """Hold how far the times of designs are off by chance.

    A busy machine disturbs for seconds: the repeats of one design are then all wrong by the same, and agree. So the
    noise is taken from one engine, too, which was measured beside every design, as if it were a design of its own.

    Args:
        rounds: One entry for each design: its repeated times (r, n), r >= 2. The first entry is that engine's.
        wander: (b, n), that engine's time beside each of the other designs, over its mean, less 1; ignored if b < 2.
        passes: How often every design was built and measured; their mean is used.

    >>> steady, shaky = np.array([[1.0], [1.0]]), np.array([[1.0], [3.0]])
    >>> noise = Noise([steady, shaky], wander=np.zeros((0, 1)))
    >>> noise.error(np.array([[1.0], [1.0]])), noise.error(np.array([[1.0], [0.0]]))    # the shaky one, or not
    (1.0, 0.0)
    """

    rounds: Sequence[Floats]
    wander: Floats
    passes: int = 1

    def error(self, weights: Floats) -> float:
        """Return the standard error of the sum over designs and groups of weights (d, n) times the times."""
        return float(np.sqrt(self._variance(weights, lambda parts: parts.sum(axis=1, keepdims=True))[0]))

    def errors(self, weights: Floats) -> Floats:
        """Return the standard error of each group's own sum over designs, (n,)."""
        errors: Floats = np.sqrt(self._variance(weights, lambda parts: parts))
        return errors

    def _variance(self, weights: Floats, reduce: Callable[[Floats], Floats]) -> Floats:
        """Sum over designs the variances of `reduce` of the weighted times (r, n)."""
        variance = np.zeros(1)
        for number, (row, values) in enumerate(zip(weights, self.rounds, strict=True)):
            variance = variance + reduce(values * row).var(axis=0, ddof=1) / len(values)
            if number and len(self.wander) > 1:
                at_each_moment = self.wander * np.median(values, axis=0) * row
                variance = variance + reduce(at_each_moment).var(axis=0, ddof=1) / self.passes
        return variance


def wander(passes: Sequence[Floats]) -> Floats:
    """Return the `wander` of a Noise: one engine's times at each moment over their mean, less 1.

    Args:
        passes: One entry for each pass: the engine's times (b, n) at several moments.

    Returns:
        (moments of all passes, n); the times themselves if there are fewer than two moments. A group that happened
        steady is taken to wander as much as the middle one does: a few moments show little.

    >>> wander([np.array([[0.9, 2.0], [1.1, 2.0]])]).round(2).tolist()
    [[-0.1, 0.0], [0.1, 0.0]]
    """
    times = np.concatenate(passes)
    if len(times) < 2:
        return times
    mean = times.mean(axis=0)
    moved = times / np.where(mean > 0.0, mean, 1.0) - (mean > 0.0)
    own = moved.std(axis=0)
    usual = float(np.median(own[own > 0.0])) if own.any() else 0.0
    widened: Floats = moved * np.maximum(1.0, usual / np.where(own > 0.0, own, 1.0))
    return widened


def is_noise(savings: Floats, errors: Floats) -> bool:
    """Return True if the groups' savings are no larger than their standard errors explain.

    Args:
        savings: (n,), time that INT8 saves in each group.
        errors: (n,), standard error of each saving, in the same unit.

    Compares the sum over groups of the squared saving with its expectation under chance, the sum of the squared errors:
    the two are equal on average when the types cost the same.

    >>> errors = np.array([0.1, 0.1])
    >>> is_noise(np.array([0.1, -0.1]), errors), is_noise(np.array([2.0, 0.0]), errors)
    (True, False)
    """
    return bool(np.square(savings).sum() <= _SIGNAL * np.square(errors).sum())


def spread(repeats: Sequence[Floats]) -> float:
    """Return the interquartile range over the median of repeated times: its median over groups and designs.

    Args:
        repeats: One entry for each design: its repeated times (r, n). Groups of median 0 are left out.

    Returns:
        A fraction of the time; 0.0 if nothing was repeated.

    >>> round(spread([np.array([[0.9], [1.0], [1.0], [1.1], [1.2]])]), 3)
    0.1
    """
    relative: list[Floats] = []
    for values in repeats:
        low, middle, high = np.percentile(values, (25.0, 50.0, 75.0), axis=0)
        relative.append((high - low)[middle > 0.0] / middle[middle > 0.0])
    known = np.concatenate(relative) if relative else np.zeros(0)
    return float(np.median(known)) if known.size else 0.0
