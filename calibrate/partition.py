"""Choose which fusion groups are INT8 and which float: the plan of least time within a noise budget.

Time is additive over the groups and over the boundaries between INT8 and float neighbours, where values change their
format; noise is additive over the INT8 groups. For every multiplier m >= 0, the plan of least time + m * noise is a
minimum s-t cut, since no boundary has a negative cost (Greig, Porteous, Seheult, "Exact maximum a posteriori
estimation for binary images", JRSS B 1989; Kolmogorov & Zabih, "What energy functions can be minimized via graph
cuts?", PAMI 2004).

`fastest` and `frontier` follow these cuts along their convex hull. Between its vertices `_Search` flips groups, alone,
in pairs and in all combinations of the few that the cuts leave undecided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FREE, FLOAT, INT8 = -1, 0, 1  # the values of Problem.fixed

_CAPACITY = 2.0**29  # of int32, with room for the sum of both directions

Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """The costs of n groups and m edges between groups; several edges may join the same two.

    time_int8, time_float: (n,), times >= 0 in one unit.
    noise: (n,), >= 0; a group adds this while it is INT8.
    edges: (m, 2), indices of groups.
    boundary: (m,), the time that an edge adds where its ends differ.
    fixed: (n,), FREE, or FLOAT or INT8 by rule.

    Raises ValueError naming the field with another shape or other values.
    """

    time_int8: Floats
    time_float: Floats
    noise: Floats
    edges: NDArray[np.int64]
    boundary: Floats
    fixed: NDArray[np.int8]

    def __post_init__(self) -> None:
        n, m = len(self.noise), len(self.edges)
        shapes = {"time_int8": (n,), "time_float": (n,), "noise": (n,), "boundary": (m,), "fixed": (n,)}
        for name, shape in {**shapes, "edges": (m, 2)}.items():
            if np.shape(getattr(self, name)) != shape:
                raise ValueError(f"{name} must have shape {shape}, got {np.shape(getattr(self, name))}")
        for name in ("time_int8", "time_float", "noise", "boundary"):
            values = getattr(self, name)
            if not np.all((values >= 0.0) & (values < np.inf)):
                raise ValueError(f"{name} must be finite and not negative")
        if not np.all((self.edges >= 0) & (self.edges < n)):
            raise ValueError(f"edges must hold indices of {n} groups")
        if not np.isin(self.fixed, (FREE, FLOAT, INT8)).all():
            raise ValueError("fixed must hold -1, 0 and 1 only")

    def time(self, int8: Labels) -> float:
        """Return the time of the plan `int8` (n,)."""
        reformatted = int8[self.edges[:, 0]] != int8[self.edges[:, 1]]
        return float(np.where(int8, self.time_int8, self.time_float).sum() + self.boundary[reformatted].sum())

    def noise_of(self, int8: Labels) -> float:
        """Return the noise of the plan `int8` (n,), correctly rounded: equal sets compare equal with a budget."""
        return math.fsum(self.noise[int8])


@dataclass(frozen=True)
class Partition:
    """A plan: int8 (n,), with its time and noise."""

    int8: Labels
    time: float
    noise: float


class FlowNetwork:
    """The free groups as nodes of a flow network, its source side INT8; fixed neighbours count as preferences."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.coupling = np.zeros((problem.noise.size, problem.noise.size))
        np.add.at(self.coupling, (problem.edges[:, 0], problem.edges[:, 1]), problem.boundary)
        self.coupling += self.coupling.T
        np.fill_diagonal(self.coupling, 0.0)  # an edge from a group to itself never differs
        self.free = np.flatnonzero(problem.fixed == FREE)
        by_rule = self.coupling @ (1.0 * (problem.fixed == INT8) - (problem.fixed == FLOAT))
        self.gain = (problem.time_float - problem.time_int8 + by_rule)[self.free]
        self.noise = problem.noise[self.free]
        self.inner = self.coupling[np.ix_(self.free, self.free)]
        self.adjacent = self.inner.sum(axis=1)
        # Arcs in CSR order, each with its reverse, as `maximum_flow` returns them. k is the source, k + 1 the sink.
        k = self.free.size
        nodes, source = np.arange(k), np.full(k, k)
        tails, heads = np.nonzero(self.inner)
        self.arcs = self.inner[tails, heads]
        rows = np.concatenate((tails, source, nodes, nodes, source + 1))
        columns = np.concatenate((heads, nodes, source, source + 1, nodes))
        self.order = np.lexsort((columns, rows))
        self.columns = columns[self.order].astype(np.int32)
        self.starts = np.concatenate(([0], np.cumsum(np.bincount(rows, minlength=k + 2)))).astype(np.int32)

    def plan(self, int8: Labels) -> Partition:
        return Partition(int8, self.problem.time(int8), self.problem.noise_of(int8))

    def cut(self, time_weight: float, noise_weight: float, turned: int | None = None, label: bool = False) -> Partition:
        """Return the plan of least weighted sum; ties go to float. `turned`: a free group that is given `label`."""
        preference = time_weight * self.gain - noise_weight * self.noise
        if turned is not None:
            preference[turned] = np.inf if label else -np.inf
        return self._cut(preference, time_weight)

    def least_noise(self) -> Partition:
        """Return the fastest of all plans of least noise."""
        return self._cut(np.where(self.noise > 0.0, -np.inf, self.gain), 1.0)

    def _cut(self, preference: Floats, weight: float) -> Partition:
        """Return the plan for `preference` (k,), in weighted time; positive: INT8 is preferred."""
        adjacent = weight * self.adjacent
        clipped = np.clip(preference, -2.0 * adjacent, 2.0 * adjacent)  # beyond `adjacent` a label is decided anyhow
        for_int8, for_float, none = np.maximum(clipped, 0.0), np.maximum(-clipped, 0.0), np.zeros(clipped.size)
        capacity = np.concatenate((weight * self.arcs, for_int8, none, for_float, none))[self.order]
        reached = self._source_side(capacity, bound=float(min(for_int8.sum(), for_float.sum())))
        int8 = self.problem.fixed == INT8
        int8[self.free] = reached | (preference > adjacent)
        return self.plan(int8)

    def _source_side(self, capacity: Floats, bound: float) -> Labels:
        """Return the nodes (k,) that the source still reaches under a maximum flow; the flow is `bound` at most.

        Flows are int32. Rounding down costs the cut up to one unit, 2**-29 of `bound`, per arc; a second pass over what
        is left measures in fractions of that loss, so that 1e-6 and 1e6 meet in one network.
        """
        # Imported here: half a second and 20 MiB of a job, and most search nothing.
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        k = self.free.size
        left = capacity > 0.0
        for _ in range(2):
            if bound <= 0.0:
                break
            unit = bound / _CAPACITY
            units = np.floor(np.minimum(capacity, bound) / unit).astype(np.int32)
            flow = maximum_flow(csr_array((units, self.columns, self.starts), shape=(k + 2, k + 2)), k, k + 1).flow.data
            left = units > flow
            capacity = capacity - flow * unit
            bound = capacity.size * unit
        starts = np.concatenate(([0], np.cumsum(left)))[self.starts]
        residual = csr_array((np.ones(starts[-1]), self.columns[left], starts), shape=(k + 2, k + 2))
        reached = np.zeros(k + 2, np.bool_)
        reached[breadth_first_order(residual, k, return_predecessors=False)] = True
        return reached[:k]


# More of each finds better plans and takes longer.
_HULL_CUTS = 64  # at most, besides the two ends, the widest gap first: a large network has more vertices than help
_TURNED_CUTS = 256  # at most, the least decided groups first; with no more groups than that, all are tried
_UNDECIDED = 16  # groups of which all combinations are tried: 65536 plans
_POINTS = 16  # budgets that the frontier spreads over the hull; each gets no more than _UNDECIDED turned cuts
_MOST_RUNGS = 10  # plans of half the noise each
_ROUNDING = 1e-12  # of all noise: the rounding error that a sum of differences may have

Ints = NDArray[np.int64]


def fastest(problem: Problem, budget: float) -> Partition:
    """Return the plan of least time whose noise is at most `budget`; fixed labels are kept.

    If no plan fits, because the groups that are INT8 by rule exceed the budget alone, it is the plan of least noise.
    The plan is optimal for up to 256 free groups if the bounds leave at most 16 undecided. Raises ValueError when
    `budget` is NaN.

    >>> ones = np.ones(3)
    >>> chain = np.array([[0, 1], [1, 2]])
    >>> noise = np.array([1.0, 9.0, 2.0])
    >>> problem = Problem(ones, 3.0 * ones, noise, chain, 0.5 * np.ones(2), np.full(3, FREE, np.int8))
    >>> plan = fastest(problem, budget=4.0)
    >>> plan.int8.tolist(), plan.time, plan.noise      # the loud group in the middle stays float
    ([True, False, True], 6.0, 3.0)
    """
    if math.isnan(budget):
        raise ValueError("budget must be a number, got NaN")
    network = FlowNetwork(problem)
    hull = _hull(network, budget)
    if hull[0].noise <= budget:
        return hull[0]
    if hull[-1].noise > budget:
        return hull[-1]
    return _Search(network, budget).best(hull, _TURNED_CUTS)


def frontier(problem: Problem) -> tuple[Partition, ...]:
    """Return plans of which none is beaten by another in both time and noise: fastest first, the quietest last.

    These are the vertices of the hull (of at most 64 cuts) and the plans between them for 16 budgets along the hull,
    equally far apart in time. Time strictly rises and noise strictly falls.
    """
    network = FlowNetwork(problem)
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


def rungs(frontier: Sequence[Partition], tolerance: float) -> list[Partition]:
    """Choose plans of ever less noise, fastest first: at each step the quietest of those that are as fast as any.

    frontier: fastest first, quietest last. tolerance: relative difference in time below which plans are equally fast.
    """
    chosen: list[Partition] = []
    plans = [plan for plan in frontier if plan.int8.any()]
    while plans and len(chosen) < _MOST_RUNGS:
        as_fast = (1.0 + tolerance) * plans[0].time
        chosen.append(min((plan for plan in plans if plan.time <= as_fast), key=lambda plan: plan.noise))
        plans = [plan for plan in plans if 2.0 * plan.noise <= chosen[-1].noise and plan.noise < chosen[-1].noise]
    return chosen


def _hull(network: FlowNetwork, budget: float | None = None) -> list[Partition]:
    """Return the vertices from the fastest plan to that of least noise.

    With a budget, only the gap around it is searched.
    """
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
    """Return weights of time and noise under which both plans weigh the same. Their ratio alone might overflow."""
    return fast.noise - quiet.noise, quiet.time - fast.time


class _Search:
    """A search for plans within a budget that at least one plan keeps and the fastest plan exceeds."""

    def __init__(self, network: FlowNetwork, budget: float) -> None:
        self.network = network
        self.budget = budget
        self.rounding = _ROUNDING * float(network.problem.noise.sum())

    def best(self, hull: list[Partition], turned_cuts: int) -> Partition:
        """Search from the vertices on both sides of the budget, with at most `turned_cuts` further cuts."""
        within = next(index for index, plan in enumerate(hull) if plan.noise <= self.budget)
        flipped = [self.improved(plan) for plan in hull[max(within - 2, 0) : within + 2]]
        start = best = min(flipped, key=lambda plan: plan.time)
        time_weight, noise_weight = _weights(hull[within - 1], hull[within])
        sign, time, noise = self._flips(start)
        bounds = np.full(sign.size, np.inf)
        for group in np.argsort(time_weight * time + noise_weight * noise)[:turned_cuts]:  # the least decided first
            turned = self.network.cut(time_weight, noise_weight, int(group), bool(sign[group] < 0))
            bounds[group] = time_weight * turned.time + noise_weight * (turned.noise - self.budget)
            if bounds[group] < time_weight * best.time:
                best = min(best, self.improved(turned), key=lambda plan: plan.time)
        undecided = np.flatnonzero(bounds < time_weight * best.time)
        undecided = undecided[np.argsort(bounds[undecided])][:_UNDECIDED]
        combined = self.improved(self._best_combination(start, undecided))
        return min(best, combined, key=lambda plan: plan.time)

    def improved(self, plan: Partition) -> Partition:
        """Bring a plan within the budget at the least time per noise, then flip while one or two flips save time."""
        while plan.noise > self.budget:
            _, time, noise = self._flips(plan)
            quieter = np.flatnonzero(noise < 0.0)
            plan = self._flipped(plan, quieter[[np.argmin(time[quieter] / -noise[quieter])]])
        while (better := self._best_pair(plan)) is not plan:
            plan = better
        return plan

    def _flips(self, plan: Partition) -> tuple[Floats, Floats, Floats]:
        """Return per free group: 1 if it is INT8, else -1; the time that its flip adds; the noise that it adds."""
        problem, free = self.network.problem, self.network.free
        sign = np.where(plan.int8, 1.0, -1.0)
        time = sign * (problem.time_float - problem.time_int8 + self.network.coupling @ sign)
        return sign[free], time[free], (-sign * problem.noise)[free]

    def _best_pair(self, plan: Partition) -> Partition:
        """Flip the two groups, or the one (the diagonal), that save most; return `plan` itself if none does."""
        sign, time, noise = self._flips(plan)
        times = np.add.outer(time, time) - 2.0 * self.network.inner * np.outer(sign, sign)
        noises = np.add.outer(noise, noise)
        np.fill_diagonal(times, time)
        np.fill_diagonal(noises, noise)
        return self._best_move(plan, times.ravel(), noises.ravel(), lambda move: np.unique(divmod(move, sign.size)))

    def _best_combination(self, plan: Partition, groups: Ints) -> Partition:
        """Flip the subset of `groups` that saves most; return `plan` itself if none does."""
        flips = ((np.arange(1 << groups.size)[:, None] >> np.arange(groups.size)) & 1).astype(np.float64)
        sign, time, noise = self._flips(plan)
        inner = self.network.inner[np.ix_(groups, groups)] * np.outer(sign[groups], sign[groups])
        times = flips @ time[groups] - ((flips @ inner) * flips).sum(axis=1)
        return self._best_move(plan, times, flips @ noise[groups], lambda move: groups[flips[move] > 0.0])

    def _best_move(self, plan: Partition, times: Floats, noises: Floats, groups: Callable[[int], Ints]) -> Partition:
        """Make the move that saves most within the budget; return `plan` itself if none does.

        times, noises: (moves,), what each move adds.
        groups: the groups that a move flips.
        """
        for rounding in (self.rounding, -self.rounding):  # a plan that fills the budget to the last bit is one too
            fits = noises <= self.budget - plan.noise + rounding
            moved = self._flipped(plan, groups(int(np.argmin(np.where(fits, times, np.inf)))))
            if moved.noise <= self.budget:
                return min(plan, moved, key=lambda plan: plan.time)
        return plan

    def _flipped(self, plan: Partition, groups: Ints) -> Partition:
        """Return the plan with `groups`, indices of free groups, flipped."""
        int8 = plan.int8.copy()
        int8[self.network.free[groups]] ^= True
        return self.network.plan(int8)
