"""Measure what each fusion group costs in INT8 and in float on this machine with this runtime, boundaries included.

The times come from the runtime's profiler on at most eight designed engines. If these show nothing but noise, they are
estimated from multiply-accumulates. Two engines are loaded at a time: the design, and the all-float engine that is
measured before and after it. So a machine that warms up or slows down meanwhile is not taken for a slow engine.
"""

from __future__ import annotations

from collections.abc import Callable
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

_ROUNDS = 3  # profiles of each design, each between two of the all-float engine
_MOST_RESIDUAL = 0.5  # relative: a fit that misses the totals by more explains nothing
# NVIDIA's data sheets from Ampere on: tensor cores multiply INT8 at twice the rate of FP16.
_INT8_PER_FLOAT = 0.5
# An assumption: a boundary costs what a 3x3 depthwise convolution does, which also does little but read and write its
# tensor. Larger: plans change the type less often.
_MACS_PER_CROSSING = 9.0


@dataclass(frozen=True)
class Costs:
    """Times by the groups (n,) and edges (m,) of a Grouping, all >= 0.

    int8_ms, float_ms: of a group; equal if it is `fixed`.
    boundary_ms: in addition where the ends of an edge differ.
    fixed_ms: the time that no plan changes.
    noise: interquartile range over median of a group's repeated measurements; the median over groups and designs.
    residual: root mean square of the relative errors of the designs' fitted totals.
    builds: number of engines that were built.
    source: "measured", or "macs" for estimates. These compare plans with one another and are no times: a million
        multiply-accumulates in float count as 1.
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
        """Return the time of an engine whose groups are labelled (n,), True for INT8."""
        edges = _pairs(grouping)
        parts = total(self.int8_ms, self.float_ms, self.boundary_ms, edges, int8[None, :])
        return self.fixed_ms + float(parts[0])


def macs_costs(grouping: Grouping) -> Costs:
    """Estimate the costs without a measurement, under the assumptions of _INT8_PER_FLOAT and _MACS_PER_CROSSING."""
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

    Args:
        build: Returns a loaded engine under a plan; it is closed here.
        runs: Inferences per profile.
        free: The groups (n,) that may be INT8; by default all that are not `fixed`.

    Returns `macs_costs`, with the measured noise and residual, if the measurement shows no difference between INT8 and
    float, or the fit does not explain it. Raises what `build`, the engines and `progress` raise.
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
    """Return per design its repeated times (r, n + 1): the groups', then that of everything else."""
    builds = len(labels)
    progress(0.0, f"building 1 of {builds} engines to measure")
    with closing(_Profiled(grouping, labels[0], build)) as anchor:
        anchored = [anchor.times_ms(batch, runs)]
        repeats = []
        for number, label in enumerate(labels[1:], start=1):
            progress(number / builds, f"building {number + 1} of {builds} engines to measure")
            with closing(_Profiled(grouping, label, build)) as design:
                rounds = []
                for _ in range(_ROUNDS):
                    times = design.times_ms(batch, runs)
                    anchored.append(anchor.times_ms(batch, runs))
                    rounds.append(times / _speed(anchored[-2:]))
            repeats.append(rounds)
        anchored.append(anchor.times_ms(batch, runs))
    usual = _speed(anchored)
    return [np.array([times * usual / _speed([times]) for times in anchored])] + [
        np.array(rounds) * usual for rounds in repeats
    ]


def _speed(anchored: list[Floats]) -> float:
    """Return the median time of the all-float engine."""
    return float(np.median([times.sum() for times in anchored]))


class _Profiled:
    """A loaded design, whose layers' times are summed by groups."""

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
        """Return (n + 1,): the groups' times, then that of everything else."""
        times = np.zeros(self._size)
        for layer, time_ms in self._engine.layer_times_ms(batch, runs).items():
            shares = self._shares.get(layer) or {self._size - 1: 1.0}
            for group, share in shares.items():
                times[group] += share * time_ms
        return times

    def close(self) -> None:
        self._engine.close()


def layer_shares(grouping: Grouping, int8: Labels, nodes: tuple[str, ...]) -> dict[int, float]:
    """Share a layer's time among the groups, under labels (n,): group -> share; empty if no plan changes it.

    1. A layer that computes nodes of groups belongs to these, by their multiply-accumulates, whatever is fused into it.
    2. A layer that only moves or converts values belongs to its readers in equal parts; Q/DQ to those in INT8 here.
    """
    inside: dict[int, float] = {}
    readers: dict[int, float] = {}
    for node in nodes:
        for index in grouping.owners.get(node, ()):
            shares = inside if node in grouping.groups[index].nodes else readers
            shares[index] = 1.0
        readers.update({index: 1.0 for index in grouping.readers.get(node, ()) if int8[index]})
    if len(inside) > 1:
        inside = {index: max(1.0, float(grouping.groups[index].macs)) for index in inside}
    shares = inside or readers
    whole = sum(shares.values())
    return {index: share / whole for index, share in shares.items()}


def _free(grouping: Grouping) -> Labels:
    return np.array([not group.fixed for group in grouping.groups], np.bool_)


def _pairs(grouping: Grouping) -> NDArray[np.int64]:
    return np.array([(i, j) for i, j, _ in grouping.edges], np.int64).reshape(-1, 2)
