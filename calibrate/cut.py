"""One cut of the precision problem: the plan of least time + m * noise, over fusion groups that are INT8 or float.

Time is additive over the groups and over the boundaries between INT8 and float neighbours, where values change their
format; noise is additive over the INT8 groups. For every multiplier m >= 0, the plan of least time + m * noise is a
minimum s-t cut, since no boundary has a negative cost (Greig, Porteous, Seheult, "Exact maximum a posteriori
estimation for binary images", JRSS B 1989; Kolmogorov & Zabih, "What energy functions can be minimized via graph
cuts?", PAMI 2004).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

FREE, FLOAT, INT8 = -1, 0, 1  # the values of Problem.fixed

_CAPACITY = 2.0**29  # of int32, with room for the sum of both directions

Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]


@dataclass(frozen=True)
class Problem:
    """n groups and m edges between groups, of which several may join the same two.

    time_int8, time_float (n,), boundary (m,): times >= 0 in one unit, `boundary` where the ends of an edge differ.
    noise (n,): >= 0, what a group adds while it is INT8.
    edges (m, 2): indices of groups.
    fixed (n,): FREE, or FLOAT or INT8 by rule.

    Raises ValueError naming the field whose shape or values are not that.
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
        """Of the plan `int8` (n,), in the unit of the times."""
        reformatted = int8[self.edges[:, 0]] != int8[self.edges[:, 1]]
        return float(np.where(int8, self.time_int8, self.time_float).sum() + self.boundary[reformatted].sum())

    def noise_of(self, int8: Labels) -> float:
        """Of the plan `int8` (n,): the correctly rounded sum, so that equal sets compare equal with a budget."""
        return math.fsum(self.noise[int8])


@dataclass(frozen=True)
class Partition:
    """A plan: int8 (n,), with its time and noise."""

    int8: Labels
    time: float
    noise: float


class Network:
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
        self._lay_out()

    def _lay_out(self) -> None:
        """Arcs in CSR order, each with its reverse: so `maximum_flow` returns them. k is the source, k + 1 the sink."""
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
        """The plan of least weighted sum; ties go to float. `turned`: a free group that takes `label`."""
        preference = time_weight * self.gain - noise_weight * self.noise
        if turned is not None:
            preference[turned] = np.inf if label else -np.inf
        return self._cut(preference, time_weight)

    def least_noise(self) -> Partition:
        """Of all plans of least noise the fastest."""
        return self._cut(np.where(self.noise > 0.0, -np.inf, self.gain), 1.0)

    def _cut(self, preference: Floats, weight: float) -> Partition:
        """`preference` (k,) for INT8, in weighted time."""
        adjacent = weight * self.adjacent
        clipped = np.clip(preference, -2.0 * adjacent, 2.0 * adjacent)  # beyond `adjacent` a label is decided anyhow
        wanted, refused, none = np.maximum(clipped, 0.0), np.maximum(-clipped, 0.0), np.zeros(clipped.size)
        capacity = np.concatenate((weight * self.arcs, wanted, none, refused, none))[self.order]
        reached = self._source_side(capacity, bound=float(min(wanted.sum(), refused.sum())))
        int8 = self.problem.fixed == INT8
        int8[self.free] = reached | (preference > adjacent)
        return self.plan(int8)

    def _source_side(self, capacity: Floats, bound: float) -> Labels:
        """Nodes (k,) that are reached from the source once no more flows, which is `bound` at most.

        Flows are int32. Rounding down costs the cut up to one unit, 2**-29 of `bound`, per arc; a second pass over what
        is left measures in fractions of that loss, so that 1e-6 and 1e6 meet in one network.
        """
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
