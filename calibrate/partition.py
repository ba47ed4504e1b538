"""Choose which fusion groups are INT8 and which float: the plan of least time within a noise budget.

Time is additive over the groups and over the boundaries between INT8 and float neighbours, where values change their
format; noise is additive over the INT8 groups. Without the budget the plan of least time is a minimum s-t cut, since no
boundary has a negative cost (Greig, Porteous, Seheult, "Exact maximum a posteriori estimation for binary images",
JRSS B 1989). The budget makes it a knapsack, which HiGHS solves as an integer program (`scipy.optimize.milp`).

The solver computes in floating point, with tolerances. So each of its plans is checked in exact sums, and one that
exceeds its budget by the last bit is cut off.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FREE, FLOAT, INT8 = -1, 0, 1  # the values of Problem.fixed

_SCALE = 1e3  # factor of the objective: HiGHS stops within 1e-6 of the optimum
_MOST_S = 20.0  # for one plan; the best until then is taken
_MOST_CUTS = 32  # plans that are cut off because they exceed the budget by the solver's tolerance
_TOLERANCE = 1e-6  # tolerance of HiGHS for constraints
_EQUAL = 1e-12  # relative difference of times that rounding explains
_POINTS = 24  # plans of the frontier between its ends
_NEAREST = 1.05  # two budgets of the frontier differ by this factor at least
_MOST_RUNGS = 16  # plans of ever less noise
QUIETER = 1.5  # from rung to rung; by 2, a plan that keeps the loss was passed over (benchmarks/RESULTS.md)

Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """State the costs of n groups and m edges between groups; several edges may join the same two.

    Args:
        time_int8: (n,), time of each group in INT8, >= 0. All times have one unit.
        time_float: (n,), time of each group in float, >= 0.
        noise: (n,), >= 0; a group adds this while it is INT8.
        edges: (m, 2), indices of groups.
        boundary: (m,), >= 0, the time that an edge adds where its ends differ.
        fixed: (n,), FREE, or FLOAT or INT8 by rule.

    Raises ValueError naming the field with another shape or other values.

    >>> one_edge = np.array([[0, 1]])
    >>> free = np.full(2, FREE, np.int8)
    >>> problem = Problem(np.ones(2), 3.0 * np.ones(2), np.array([1.0, 9.0]), one_edge, np.array([0.5]), free)
    >>> mixed = np.array([True, False])
    >>> problem.time(mixed), problem.noise_of(mixed)          # 1 + 3, and 0.5 for the conversion between them
    (4.5, 1.0)
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
    """Hold a plan with its time and noise.

    Args:
        int8: (n,), True for groups that are INT8.
        time: In the unit of the problem's times.
        noise: In the unit of the problem's noise.

    >>> Partition(np.array([True, False]), time=4.5, noise=1.0).time
    4.5
    """

    int8: Labels
    time: float
    noise: float


def fastest(problem: Problem, budget: float) -> Partition:
    """Return the plan of least time whose noise is at most `budget`, the quietest of equally fast ones.

    Labels by rule are kept. If no plan fits, because the groups that are INT8 by rule exceed the budget alone, it is
    the fastest of least noise. The time is within a billionth of the least, unless the solver takes 20 seconds.

    Raises ValueError when `budget` is NaN.

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
    program = _Program(problem)
    return program.quietest(program.fastest(budget))


def frontier(problem: Problem) -> tuple[Partition, ...]:
    """Return plans of which none is beaten by another in both time and noise: fastest first, the quietest last.

    Besides the two ends these are the fastest plans for up to 24 budgets. Each lies in the widest gap in time that is
    left, at the geometric mean of the noises on both sides. Time strictly rises and noise strictly falls.

    >>> no_edge = np.zeros((0, 2), np.int64)
    >>> free = np.full(2, FREE, np.int8)
    >>> problem = Problem(np.ones(2), 3.0 * np.ones(2), np.array([1.0, 9.0]), no_edge, np.zeros(0), free)
    >>> [(plan.time, plan.noise) for plan in frontier(problem)]
    [(2.0, 10.0), (4.0, 1.0), (6.0, 0.0)]
    """
    program = _Program(problem)
    fast, quiet = program.quietest(program.fastest(math.inf)), program.fastest(0.0)
    found, gaps = [fast, quiet], [(fast, quiet, quiet.noise)]
    for _ in range(_POINTS):
        gaps = [gap for gap in gaps if gap[0].noise > _NEAREST * gap[2] and gap[0].time < gap[1].time]
        if not gaps:
            break
        widest = max(range(len(gaps)), key=lambda gap: gaps[gap][1].time - gaps[gap][0].time)
        fast, quiet, emptied = gaps.pop(widest)  # no plan lies between quiet's noise and `emptied`
        budget = math.sqrt(emptied) * math.sqrt(fast.noise) if emptied else 0.5 * fast.noise
        plan = program.fastest(budget)
        if plan.noise <= quiet.noise:
            gaps.append((fast, quiet, budget))
        else:
            found.append(plan)
            gaps += [(fast, plan, budget), (plan, quiet, emptied)]
    front: list[Partition] = []
    for plan in sorted(found, key=lambda plan: (plan.time, plan.noise)):
        if not front or plan.noise < front[-1].noise:
            front.append(plan)
    return tuple(front)


def rungs(frontier: Sequence[Partition], tolerance: float, quieter: float = QUIETER) -> list[Partition]:
    """Choose plans of ever less noise, fastest first: at each step the quietest of those that are as fast as any.

    Args:
        frontier: Plans, fastest first, quietest last.
        tolerance: Relative difference in time below which plans are equally fast.
        quieter: By which the noise is divided from one to the next, at least.

    Returns:
        At most 16 plans that have a group in INT8.

    >>> one = np.array([True])
    >>> plans = [Partition(one, time, noise) for time, noise in ((1.0, 8.0), (1.01, 7.0), (2.0, 5.0), (3.0, 1.0))]
    >>> [(plan.time, plan.noise) for plan in rungs(plans, tolerance=0.02)]
    [(1.01, 7.0), (3.0, 1.0)]
    """
    chosen: list[Partition] = []
    plans = [plan for plan in frontier if plan.int8.any()]
    while plans and len(chosen) < _MOST_RUNGS:
        as_fast = (1.0 + tolerance) * plans[0].time
        chosen.append(min((plan for plan in plans if plan.time <= as_fast), key=lambda plan: plan.noise))
        plans = [plan for plan in plans if quieter * plan.noise <= chosen[-1].noise and plan.noise < chosen[-1].noise]
    return chosen


class _Program:
    """The integer program: a binary for each group, 1 for INT8, and for each edge how far its ends differ."""

    def __init__(self, problem: Problem) -> None:
        # Imported here: with the solver 46 MiB of a job, and most search nothing.
        from scipy.sparse import csr_array, hstack, identity, vstack

        self._problem = problem
        n, m = problem.noise.size, len(problem.edges)
        gain = problem.time_int8 - problem.time_float
        largest = max(np.abs(gain).max(initial=0.0), problem.boundary.max(initial=0.0)) or 1.0
        self._times = np.concatenate((gain, problem.boundary)) / largest
        self._noises = np.concatenate((problem.noise, np.zeros(m)))
        self._forced = math.fsum(problem.noise[problem.fixed == INT8])
        ends = csr_array((np.tile([1.0, -1.0], m), (np.arange(m).repeat(2), problem.edges.ravel())), shape=(m, n))
        differ = -identity(m, format="csr")
        self._differences = vstack([hstack([ends, differ]), hstack([-ends, differ])], format="csr")

    def fastest(self, budget: float) -> Partition:
        """Return the plan of least time within the budget; within the noise by rule where that exceeds it."""
        problem = self._problem
        budget = max(budget, self._forced)
        left = budget - self._forced
        free = (problem.fixed == FREE) & (problem.noise <= left)
        rows: list[Floats] = []
        if math.isfinite(left) and left > 0.0:
            rows.append(np.where(free, problem.noise, 0.0) / left)
        limits = [1.0] * len(rows)
        for _ in range(_MOST_CUTS):
            plan = self._solve(self._times, free, rows, limits)
            if plan.noise <= budget:
                return plan
            chosen = plan.int8 & free
            rows.append((chosen | (free & (problem.noise >= problem.noise[chosen].max()))).astype(float))
            limits.append(chosen.sum() - 1.0)
        limits[0] -= 2.0 * _TOLERANCE
        return self._solve(self._times, free, rows, limits)

    def quietest(self, plan: Partition) -> Partition:
        """Return the plan of least noise that is as fast as this one."""
        problem = self._problem
        free = (problem.fixed == FREE) & (problem.noise <= plan.noise)
        ends = problem.edges[:, 0], problem.edges[:, 1]
        differs = plan.int8[ends[0]] != plan.int8[ends[1]]
        time = float(self._times @ np.concatenate((plan.int8, differs)))
        quieter = self._solve(self._noises / (plan.noise or 1.0), free, [self._times], [time])
        is_as_fast = quieter.time <= plan.time * (1.0 + _EQUAL)
        return quieter if is_as_fast and quieter.noise < plan.noise else plan

    def _solve(self, costs: Floats, free: Labels, rows: Sequence[Floats], limits: Sequence[float]) -> Partition:
        """Return the plan of least `costs` (n + m,) in which only `free` groups (n,) are INT8 beside those by rule.

        rows, limits: further constraints, row @ groups <= limit, or row @ (groups, edges) <= limit.
        """
        from scipy.optimize import Bounds, LinearConstraint, milp

        problem = self._problem
        n, m = problem.noise.size, len(problem.edges)
        by_rule = problem.fixed == INT8
        if not free.any():
            return self._plan(by_rule)
        constraints = [LinearConstraint(self._differences, -np.inf, 0.0)] if m else []
        for row, limit in zip(rows, limits, strict=True):
            constraints.append(LinearConstraint(np.pad(row, (0, n + m - row.size))[None, :], -np.inf, limit))
        least = np.concatenate((by_rule, np.zeros(m)))
        most = np.concatenate((by_rule | free, np.ones(m)))
        with _no_output():
            found = milp(
                _SCALE * costs,
                integrality=np.concatenate((np.ones(n), np.zeros(m))),
                bounds=Bounds(least, most),
                constraints=constraints,
                options={"mip_rel_gap": 0.0, "time_limit": _MOST_S},
            )
        chosen = found.x[:n] > 0.5 if found.x is not None else by_rule
        return self._plan(by_rule | (chosen & free))

    def _plan(self, int8: Labels) -> Partition:
        return Partition(int8, self._problem.time(int8), self._problem.noise_of(int8))


@contextmanager
def _no_output() -> Iterator[None]:
    """Discard what is written to file descriptor 1, where HiGHS reports some solutions whatever its options say.

    Source: https://github.com/jump-dev/HiGHS.jl/issues/312. A command's output may be JSON.
    """
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        ctypes.CDLL(None).fflush(None)  # it writes through C's buffer
        os.dup2(kept, 1)
        os.close(kept)
