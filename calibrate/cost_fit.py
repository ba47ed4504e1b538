"""Fit the times of each fusion group in INT8 and in float, and of their boundaries, to a few measured designs.

A design is a colouring of the groups: which are INT8. The time of a group, with what is put before and behind it to
convert between the types, is modelled as its time in INT8 or in float, plus a share for each of its edges that the
design cuts. Both ends of an edge see their share of its boundary apart from one another, so every group is a small
regression of its own, by non-negative least squares (Lawson & Hanson, "Solving Least Squares Problems", 1974).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

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
    """Times in the unit of the observations, none negative.

    time_int8, time_float: (n,); equal for a group that was only seen in one of the two. The cost of a boundary to a
        neighbour that is never INT8 is part of the group's time in INT8.
    boundary: (m,), in addition where the ends of an edge differ.
    residual: the root mean square, over designs, of (fitted - measured) / measured total.
    """

    time_int8: Floats
    time_float: Floats
    boundary: Floats
    residual: float


def designs(free: Labels, edges: Edges, seed: int = 0) -> Labels:
    """Return the designs to measure, (d, n), d <= 8, True for INT8: all float first, all INT8 second, then random ones.

    free: (n,), groups that may be INT8.
    edges: (m, 2).

    In the random designs every group is INT8 in half of them, and
    as far as 20 patterns go, neighbours and neighbours' neighbours follow different patterns: two different ones of
    equal weight differ both ways, so that an edge is cut in both directions, and no two edges of a group are always cut
    together.
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
    """Return the times (d,) of designs (d, n), True for INT8: of the groups, and of the edges (m, 2) that they cut."""
    cut = labels[:, edges[:, 0]] != labels[:, edges[:, 1]]
    times: Floats = np.where(labels, time_int8, time_float).sum(axis=1) + cut @ boundary
    return times


def fit_costs(labels: Labels, times: Floats, edges: Edges) -> CostFit:
    """Fit designs (d, n), True for INT8, with the groups' times (d, n) in them; edges (m, 2)."""
    n = times.shape[1]
    time_int8, time_float, boundary = np.zeros(n), np.zeros(n), np.zeros(len(edges))
    cut = (labels[:, edges[:, 0]] != labels[:, edges[:, 1]]).astype(np.float64)
    incident: list[list[int]] = [[] for _ in range(n)]
    for number, (i, j) in enumerate(edges):
        incident[i].append(number)
        incident[j].append(number)
    for group in range(n):
        near = incident[group]
        time_int8[group], time_float[group], shares = _regress(labels[:, group], cut[:, near], times[:, group])
        boundary[near] += shares
    fitted = total(time_int8, time_float, boundary, edges, labels)
    measured = times.sum(axis=1)
    relative = (fitted - measured) / np.where(measured > 0.0, measured, 1.0)
    return CostFit(time_int8, time_float, boundary, float(np.sqrt(np.mean(relative**2))))


def _regress(own: Labels, cut: Floats, times: Floats) -> tuple[float, float, Floats]:
    """Fit one group: its times in INT8 and in float, and its shares of its boundaries."""
    edges = cut.shape[1]
    design = np.column_stack((own, ~own, cut)).astype(np.float64)
    ridge = np.column_stack((np.zeros((edges, 2)), np.sqrt(_RIDGE) * np.eye(edges)))
    fit, _ = nnls(np.concatenate((design, ridge)), np.concatenate((times, np.zeros(edges))))
    if not own.any():
        fit[0] = fit[1]
    elif own.all():
        fit[1] = fit[0]
    return float(fit[0]), float(fit[1]), fit[2:]


def is_noise(labels: Labels, repeats: Sequence[Floats]) -> bool:
    """Return True if the differences between INT8 and float are no larger than the spread of the repeats explains.

    labels: designs (d, n).
    repeats: per design its repeated measurements (r, n), r >= 2.

    Compares the sum over groups of the squared difference of means with its expectation under chance, the sum of its
    squared standard errors: the two are equal on average when the types cost the same.
    """
    weights = [_balance(labels[:, group]) for group in range(labels.shape[1])]
    means = np.array([values.mean(axis=0) for values in repeats])
    errors = np.array([values.var(axis=0, ddof=1) / len(values) for values in repeats])
    seen = [(group, weight) for group, weight in enumerate(weights) if weight is not None]
    difference = sum((weight @ means[:, group]) ** 2 for group, weight in seen)
    chance = sum(weight**2 @ errors[:, group] for group, weight in seen)
    return bool(seen) and bool(difference <= _SIGNAL * chance)


def _balance(own: Labels) -> Floats | None:
    """Return the designs' weights in the mean of INT8 less that of float; None for a group seen in one type only."""
    count = int(own.sum())
    if count in (0, own.size):
        return None
    return np.where(own, 1.0 / count, -1.0 / (own.size - count))


def spread(repeats: Sequence[Floats]) -> float:
    """Return the interquartile range over the median of the repeats (r, n): its median over groups and designs."""
    relative: list[Floats] = []
    for values in repeats:
        low, middle, high = np.percentile(values, (25.0, 50.0, 75.0), axis=0)
        relative.append((high - low)[middle > 0.0] / middle[middle > 0.0])
    known = np.concatenate(relative) if relative else np.zeros(0)
    return float(np.median(known)) if known.size else 0.0
