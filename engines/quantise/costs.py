"""What each fusion group costs in INT8 and in float on this machine with this runtime, boundaries included.

Measured from the runtime's profiler on at most eight designed engines, or estimated from multiply-accumulates where
that shows nothing but noise. Two engines are loaded at a time: the design, and the all-float one that is measured
before and after it, so that a machine that warms up or slows down meanwhile is told from an engine that is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from calibrate.cost_fit import designs, fit_costs, is_noise, spread, total
from calibrate.plan import PrecisionPlan
from engines.interface import Array, ProfiledEngine, Progress, silent
from engines.quantise.fusion import Grouping

Build = Callable[[PrecisionPlan], ProfiledEngine]
Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]

_ROUNDS = 3
_MOST_RESIDUAL = 0.5  # relative: a fit that misses the totals by more explains nothing
_INT8_PER_FLOAT = 0.5  # NVIDIA's data sheets from Ampere on: tensor cores multiply INT8 at twice the rate of FP16
_MACS_PER_CROSSING = 9.0  # as a 3x3 depthwise convolution, which also does little but read and write its tensor


@dataclass(frozen=True)
class Costs:
    """Times by the groups (n,) and edges (m,) of a Grouping, all >= 0.

    int8_ms, float_ms: of a group; equal where it is `fixed`. boundary_ms: in addition where the ends of an edge differ.
    fixed_ms: what no plan changes. noise: interquartile range over median of a group's repeated measurements, in the
    median over groups and designs. residual: how far the fitted totals of the designs are from the measured ones, as a
    relative root mean square. builds: engines that were built. source: "measured", or "macs" for estimates, which
    compare plans with one another and are no times: a million multiply-accumulates in float count as 1.
    """

    int8_ms: Floats
    float_ms: Floats
    boundary_ms: Floats
    fixed_ms: float
    noise: float
    residual: float
    builds: int
    source: str

    def total_ms(self, grouping: Grouping, int8: Labels) -> float:
        """What an engine takes whose groups are labelled (n,), True for INT8."""
        edges = _pairs(grouping)
        parts = total(self.int8_ms, self.float_ms, self.boundary_ms, edges, int8[None, :])
        return self.fixed_ms + float(parts[0])


def macs_costs(grouping: Grouping) -> Costs:
    """Without a measurement, under two assumptions: INT8 multiplies at twice the rate of float, and a boundary takes
    what a 3x3 depthwise convolution would over the elements that cross."""
    float_ms = np.array([group.macs for group in grouping.groups], np.float64) / 1e6
    int8_ms = np.where(_free(grouping), _INT8_PER_FLOAT * float_ms, float_ms)
    boundary_ms = np.array([elements for *_, elements in grouping.edges], np.float64) * _MACS_PER_CROSSING / 1e6
    return Costs(int8_ms, float_ms, boundary_ms, 0.0, 0.0, 0.0, 0, "macs")


def measure_costs(
    grouping: Grouping,
    build: Build,
    batch: Array,
    progress: Progress = silent,
    runs: int = 10,
    free: Labels | None = None,
) -> Costs:
    """Build the designs one after the other, profile each on a batch, and fit.

    build: a loaded engine under a plan; it is closed here. runs: inferences per profile. free: the groups (n,) that
    may be INT8, by default all that are not `fixed`. Returns `macs_costs` with what was measured of noise and residual
    when the measurement shows no difference between INT8 and float, or the fit does not explain it. Raises what
    `build`, the engines and `progress` raise.
    """
    labels = designs(_free(grouping) if free is None else free, _pairs(grouping))
    repeats = _measure(grouping, labels, build, batch, progress, runs)
    n = len(grouping.groups)
    times = np.array([np.median(values, axis=0) for values in repeats])
    groups = [values[:, :n] for values in repeats]
    fit = fit_costs(labels, times[:, :n], _pairs(grouping))
    noise = spread(groups)
    if is_noise(labels, groups) or fit.residual > _MOST_RESIDUAL:
        progress(1.0, "the measured costs are noise: estimated from multiply-accumulates")
        return replace(macs_costs(grouping), noise=noise, residual=fit.residual, builds=len(labels))
    progress(1.0, "costs measured")
    fixed_ms = float(np.median(times[:, n]))
    return Costs(fit.time_int8, fit.time_float, fit.boundary, fixed_ms, noise, fit.residual, len(labels), "measured")


def _measure(
    grouping: Grouping, labels: Labels, build: Build, batch: Array, progress: Progress, runs: int
) -> list[Floats]:
    """Per design its repeated times (r, n + 1): the groups', then that of everything else."""
    builds = len(labels)
    progress(0.0, f"building 1 of {builds} engines to measure")
    with closing(_Profiled(grouping, labels[0], build)) as anchor:
        anchored = [anchor.times_ms(batch, runs)]
        repeats = []
        for number, label in enumerate(labels[1:], start=1):
            progress(number / builds, f"building {number + 1} of {builds} engines to measure")
            with closing(_Profiled(grouping, label, build)) as design:
                found = []
                for _ in range(_ROUNDS):
                    times = design.times_ms(batch, runs)
                    anchored.append(anchor.times_ms(batch, runs))
                    found.append(times / _speed(anchored[-2:]))
            repeats.append(found)
        anchored.append(anchor.times_ms(batch, runs))
    usual = _speed(anchored)
    return [np.array([times * usual / _speed([times]) for times in anchored])] + [
        np.array(found) * usual for found in repeats
    ]


def _speed(anchored: list[Floats]) -> float:
    """How long the all-float engine takes, in the median of what was measured of it."""
    return float(np.median([times.sum() for times in anchored]))


class _Profiled:
    """A loaded design, whose layers' times are told by groups."""

    def __init__(self, grouping: Grouping, int8: Labels, build: Build) -> None:
        self._size = len(grouping.groups) + 1
        self._engine = build(PrecisionPlan(grouping.plan(int8.tolist(), "its cost is being measured")))
        try:
            nodes = self._engine.layer_nodes()
            self._shares = {layer: layer_shares(grouping, int8, names) for layer, names in nodes.items()}
        except BaseException:
            self._engine.close()
            raise

    def times_ms(self, batch: Array, runs: int) -> Floats:
        """(n + 1,): the groups' times, then that of everything else."""
        times = np.zeros(self._size)
        for layer, time_ms in self._engine.layer_times_ms(batch, runs).items():
            shares = self._shares.get(layer) or {self._size - 1: 1.0}
            for group, share in shares.items():
                times[group] += share * time_ms
        return times

    def close(self) -> None:
        self._engine.close()


def layer_shares(grouping: Grouping, int8: Labels, nodes: tuple[str, ...]) -> dict[int, float]:
    """Whose time a layer's is, under labels (n,): group -> share of 1; nobody's when no plan changes it.

    A layer that computes nodes of groups is theirs, by their multiply-accumulates, whatever else is fused into it. One
    that only moves or converts values is its readers', of Q/DQ those that are INT8 here, in equal parts.
    """
    inside: dict[int, float] = {}
    beside: dict[int, float] = {}
    for node in nodes:
        for index in grouping.owners.get(node, ()):
            found = inside if node in grouping.groups[index].nodes else beside
            found[index] = 1.0
        beside.update({index: 1.0 for index in grouping.readers.get(node, ()) if int8[index]})
    if len(inside) > 1:
        inside = {index: max(1.0, float(grouping.groups[index].macs)) for index in inside}
    shares: Mapping[int, float] = inside or beside
    whole = sum(shares.values())
    return {index: share / whole for index, share in shares.items()}


def _free(grouping: Grouping) -> Labels:
    return np.array([not group.fixed for group in grouping.groups], np.bool_)


def _pairs(grouping: Grouping) -> NDArray[np.int64]:
    return np.array([(i, j) for i, j, _ in grouping.edges], np.int64).reshape(-1, 2)
