"""Which fusion groups run in INT8: the least time within a noise budget.

The plans of single cuts, see `calibrate.cut`, are the vertices of the lower convex hull over noise and time. Between
two vertices the best plan is found in three steps: flips of one and two groups, starting at the vertices around; then
one cut per group with its label turned, whose least time + m * noise bounds the time of every plan with that label;
and, of the groups that these bounds leave undecided, all combinations (variable fixing: Fisher, "The Lagrangian
relaxation method for solving integer programming problems", Management Science 1981).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from calibrate.cut import Floats, Network, Partition, Problem

_HULL_CUTS = 64  # at most, besides the two ends, the widest gap first: a large network has more vertices than help
_TURNED_CUTS = 256  # at most, the least settled groups first; with no more groups than that, all are tried
_UNDECIDED = 16  # groups of which all combinations are tried: 65536 plans
_POINTS = 16  # budgets that the frontier spreads over the hull, each with no more turned cuts than that
_ROUNDING = 1e-12  # of all noise: what a sum of differences may be off

Ints = NDArray[np.int64]


def fastest(problem: Problem, budget: float) -> Partition:
    """The plan of least time whose noise is at most `budget`, fixed labels kept.

    Where no plan fits, since the groups that are INT8 by rule exceed the budget alone, it is the plan of least noise.
    Optimal for up to 256 free groups if the bounds leave at most 16 undecided. Raises ValueError when `budget` is NaN.
    """
    if math.isnan(budget):
        raise ValueError("budget must be a number, got NaN")
    network = Network(problem)
    hull = _hull(network, budget)
    if hull[0].noise <= budget:
        return hull[0]
    if hull[-1].noise > budget:
        return hull[-1]
    return _Search(network, budget).best(hull, _TURNED_CUTS)


def frontier(problem: Problem) -> tuple[Partition, ...]:
    """The plans that no other plan found beats in both time and noise: fastest first, the last of least noise.

    Holds the vertices of the hull (of at most 64 cuts) and what was found between them, for 16 budgets along the hull
    that lie equally far apart in time. Time strictly rises and noise strictly falls.
    """
    network = Network(problem)
    hull = _hull(network)
    times, noises = [plan.time for plan in hull], [plan.noise for plan in hull]
    budgets = np.interp(np.linspace(times[0], times[-1], _POINTS), times, noises)[1:-1]
    inside = budgets[(budgets >= noises[-1]) & (budgets < noises[0])]
    between = [_Search(network, float(budget)).best(hull, _UNDECIDED) for budget in inside]
    front: list[Partition] = []
    for plan in sorted([*hull, *between], key=lambda plan: (plan.time, plan.noise)):
        if not front or plan.noise < front[-1].noise:
            front.append(plan)
    return tuple(front)


def _hull(network: Network, budget: float | None = None) -> list[Partition]:
    """Vertices from the fastest plan to that of least noise; with a budget, only what leads to the two around it."""
    hull = [network.cut(1.0, 0.0), network.least_noise()]
    gaps = [(hull[0], hull[1])]
    for _ in range(_HULL_CUTS):
        if budget is not None:
            gaps = [(fast, quiet) for fast, quiet in gaps if quiet.noise <= budget < fast.noise]
        if not gaps:
            break
        fast, quiet = gaps.pop(max(range(len(gaps)), key=lambda gap: gaps[gap][1].time - gaps[gap][0].time))
        between = network.cut(*_weights(fast, quiet))
        if quiet.noise < between.noise < fast.noise:
            hull.append(between)
            gaps += [(fast, between), (between, quiet)]
    return sorted(hull, key=lambda plan: -plan.noise)


def _weights(fast: Partition, quiet: Partition) -> tuple[float, float]:
    """Of time and noise, so that both plans weigh the same. A multiplier would be their ratio, and may overflow."""
    return fast.noise - quiet.noise, quiet.time - fast.time


class _Search:
    """Of plans within a budget that at least one plan keeps and the fastest plan exceeds."""

    def __init__(self, network: Network, budget: float) -> None:
        self.network = network
        self.budget = budget
        self.rounding = _ROUNDING * float(network.problem.noise.sum())

    def best(self, hull: list[Partition], turned_cuts: int) -> Partition:
        """From the vertices on both sides of the budget, with at most `turned_cuts` further cuts."""
        within = next(index for index, plan in enumerate(hull) if plan.noise <= self.budget)
        flipped = [self.improved(plan) for plan in hull[max(within - 2, 0) : within + 2]]
        start = best = min(flipped, key=lambda plan: plan.time)
        time_weight, noise_weight = _weights(hull[within - 1], hull[within])
        sign, time, noise = self._flips(start)
        least_settled = np.argsort(time_weight * time + noise_weight * noise)[:turned_cuts]
        bounds = np.full(sign.size, np.inf)
        for group in least_settled:
            turned = self.network.cut(time_weight, noise_weight, int(group), bool(sign[group] < 0))
            bounds[group] = time_weight * turned.time + noise_weight * (turned.noise - self.budget)
            if bounds[group] < time_weight * best.time:
                best = min(best, self.improved(turned), key=lambda plan: plan.time)
        undecided = np.flatnonzero(bounds < time_weight * best.time)
        undecided = undecided[np.argsort(bounds[undecided])][:_UNDECIDED]
        combined = self.improved(self._best_combination(start, undecided))
        return min(best, combined, key=lambda plan: plan.time)

    def improved(self, plan: Partition) -> Partition:
        """Brought within the budget at the least time per noise, then flipped as long as one or two flips save time."""
        while plan.noise > self.budget:
            _, time, noise = self._flips(plan)
            quieter = np.flatnonzero(noise < 0.0)
            plan = self._flipped(plan, quieter[[np.argmin(time[quieter] / -noise[quieter])]])
        while (better := self._best_pair(plan)) is not plan:
            plan = better
        return plan

    def _flips(self, plan: Partition) -> tuple[Floats, Floats, Floats]:
        """Per free group: 1 if it is INT8, else -1; what its flip adds to the time; and to the noise."""
        problem, free = self.network.problem, self.network.free
        sign = np.where(plan.int8, 1.0, -1.0)
        time = sign * (problem.time_float - problem.time_int8 + self.network.coupling @ sign)
        return sign[free], time[free], (-sign * problem.noise)[free]

    def _best_pair(self, plan: Partition) -> Partition:
        """After the flip of the two groups, or the one (the diagonal), that saves most; `plan` itself if none does."""
        sign, time, noise = self._flips(plan)
        times = np.add.outer(time, time) - 2.0 * self.network.inner * np.outer(sign, sign)
        noises = np.add.outer(noise, noise)
        np.fill_diagonal(times, time)
        np.fill_diagonal(noises, noise)
        return self._best_move(plan, times.ravel(), noises.ravel(), lambda move: np.unique(divmod(move, sign.size)))

    def _best_combination(self, plan: Partition, groups: Ints) -> Partition:
        """After the flip of that subset of `groups` which saves most; `plan` itself if none does."""
        flips = ((np.arange(1 << groups.size)[:, None] >> np.arange(groups.size)) & 1).astype(np.float64)
        sign, time, noise = self._flips(plan)
        inner = self.network.inner[np.ix_(groups, groups)] * np.outer(sign[groups], sign[groups])
        times = flips @ time[groups] - ((flips @ inner) * flips).sum(axis=1)
        return self._best_move(plan, times, flips @ noise[groups], lambda move: groups[flips[move] > 0.0])

    def _best_move(self, plan: Partition, times: Floats, noises: Floats, groups: Callable[[int], Ints]) -> Partition:
        """After the move that saves most within the budget. times, noises (moves,): what each adds; groups: whom."""
        for rounding in (self.rounding, -self.rounding):  # a plan that fills the budget to the last bit is one too
            fits = noises <= self.budget - plan.noise + rounding
            moved = self._flipped(plan, groups(int(np.argmin(np.where(fits, times, np.inf)))))
            if moved.noise <= self.budget:
                return min(plan, moved, key=lambda plan: plan.time)
        return plan

    def _flipped(self, plan: Partition, groups: Ints) -> Partition:
        """`groups` are indices of free groups."""
        int8 = plan.int8.copy()
        int8[self.network.free[groups]] ^= True
        return self.network.plan(int8)
