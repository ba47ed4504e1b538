"""Measure what each fusion group costs in INT8 and in float on this machine with this runtime, boundaries included.

The times come from the runtime's profiler on at most eight designed engines. Two are loaded at a time: the design, and
the all-float engine that is measured before and after it. So a machine that warms up or slows down meanwhile is not
taken for a slow engine, and the all-float engine's own times show what chance does.

A time is believed as far as chance leaves it:

1. A group whose saving is larger than its error keeps it.
2. The others together take what multiply-accumulates predict for them, as far as the error of their sum allows. Each
   is drawn to its share of that, the more the noise exceeds the differences between groups. So no group is float
   because a disturbance made it look slow.
3. Where these others matter and their sum is not known either, all designs are built and measured again.
4. If that leaves no difference between INT8 and float, or the groups contradict the network, multiply-accumulates count
   for all groups.

Where the time ends within the first pass, the designs measured by then are enough if they cut every boundary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from calibrate.cost_fit import Noise, designs, fit_costs, is_noise, spread, total, wander
from calibrate.plan import PrecisionPlan
from engines.interface import Array, ProfiledEngine, Progress, silent
from engines.quantise.fusion import Grouping

Build = Callable[[PrecisionPlan], ProfiledEngine]
Floats = NDArray[np.float64]
Labels = NDArray[np.bool_]
HasTime = Callable[[float], bool]  # whether there is time for so many more seconds

_ROUNDS = 3  # profiles of each design, each between two of the all-float engine
_MOST_PASSES = 3  # over all designs. The error falls by the root of it; on a board one takes minutes
# Standard errors: a larger difference is no chance. The errors are known from some seven moments: at 3, one group in 50
# is taken for different that is not. Larger: more groups go by multiply-accumulates.
_CERTAIN = 3.0
_MATTERS = 0.02  # share of the all-float time: a sum of groups known to within this is known well enough
_MOST_RESIDUAL = 0.5  # relative: a fit that misses the totals by more explains nothing
# NVIDIA's data sheets from Ampere on: tensor cores multiply INT8 at twice the rate of FP16.
_INT8_PER_FLOAT = 0.5
# An assumption: a boundary costs what a 3x3 depthwise convolution does, which also does little but read and write its
# tensor. Larger: plans change the type less often.
_MACS_PER_CROSSING = 9.0


class OutOfTimeError(Exception):
    """The time to measure has ended. A `build` may raise it; `measure_costs` goes by what it has until then."""


@dataclass(frozen=True)
class Costs:
    """Hold the times of the groups (n,) and edges (m,) of a Grouping, all >= 0.

    Args:
        int8_ms: (n,), time of each group in INT8; equal to `float_ms` if the group is `fixed`.
        float_ms: (n,), time of each group in float.
        boundary_ms: (m,), time that an edge adds where its ends differ.
        fixed_ms: The time that no plan changes.
        noise: Interquartile range over median of a group's repeated measurements: the median over groups and designs.
        residual: Root mean square of the relative errors of the designs' fitted totals.
        builds: Number of engines that were built.
        source: "measured", or "macs" for estimates. These compare plans with one another and are no times: a million
            multiply-accumulates in float count as 1.
        by_macs: (n,), True for a group whose saving is within the noise, and is drawn to a share by
            multiply-accumulates.
        passes: How often every design was measured.
        doubt: The question that the measurement could not decide, however often it was repeated; else empty.
    """

    int8_ms: Floats
    float_ms: Floats
    boundary_ms: Floats
    fixed_ms: float
    noise: float
    residual: float
    builds: int
    source: str
    by_macs: Labels
    passes: int = 0
    doubt: str = ""

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
    return Costs(int8_ms, float_ms, boundary_ms, 0.0, 0.0, 0.0, 0, "macs", _free(grouping))


def measure_costs(
    grouping: Grouping,
    build: Build,
    batch: Array,
    progress: Progress = silent,
    runs: int = 10,
    free: Labels | None = None,
    has_time: HasTime = lambda _seconds: True,
) -> Costs:
    """Build the designs one after the other, profile each on a batch, and fit; again while that leaves costs unclear.

    Args:
        build: Returns a loaded engine under a plan; it is closed here. It may raise OutOfTimeError.
        runs: Inferences per profile.
        free: The groups (n,) that may be INT8; by default all that are not `fixed`.
        has_time: The first pass ends when it returns False; a further one goes on only while it can end in time.

    Returns `macs_costs`, with the measured noise and residual, where the times are not believed; `doubt` says why.
    Raises what else `build`, the engines and `progress` raise.
    """
    labels = designs(_free(grouping) if free is None else free, _pairs(grouping))
    passes: list[_Pass] = []
    took_s, ended = 0.0, ""

    def check_time(left: float) -> None:
        """Raise OutOfTimeError if there is no time for this share of a further pass, or for any more of the first."""
        if not has_time(left * took_s):
            raise OutOfTimeError

    while True:
        started = time.monotonic()
        measured_pass = _measure(grouping, labels, build, batch, progress, runs, len(passes), check_time)
        done = len(measured_pass.rounds) if measured_pass is not None else 0
        if done < len(labels):
            ended = ", as the budget left no time for more"
        if measured_pass is None or (ended and (passes or not _cuts_all(labels, done, _pairs(grouping)))):
            break
        took_s = time.monotonic() - started
        passes.append(measured_pass)
        labels = labels[:done]
        reading = _Reading(grouping, labels, passes)
        if ended or not reading.doubt or len(passes) == _MOST_PASSES:
            break
    costs = reading.costs(ended) if passes else replace(macs_costs(grouping), doubt="there was no time to measure")
    measured = costs.source == "measured"
    progress(1.0, "costs measured" if measured else f"estimated from multiply-accumulates: {costs.doubt}")
    return costs


def _cuts_all(labels: Labels, done: int, edges: NDArray[np.int64]) -> bool:
    """Return whether the first designs of labels (d, n) cut each edge (m, 2) that any cuts, so that its cost shows."""
    cut = labels[:, edges[:, 0]] != labels[:, edges[:, 1]]
    return done > 1 and bool((cut[:done].any(axis=0) == cut.any(axis=0)).all())


@dataclass(frozen=True)
class _Pass:
    """Times of the designs, relative to the all-float engine's at that moment, which takes `usual_ms`.

    rounds: per design its repeated times (r, n + 1): the groups', then that of everything else. floats: (d - 1, n + 1),
    the all-float engine's beside every other design, measured as often and in the same manner.
    """

    rounds: Sequence[Floats]
    floats: Floats
    usual_ms: float


def _measure(
    grouping: Grouping,
    labels: Labels,
    build: Build,
    batch: Array,
    progress: Progress,
    runs: int,
    before: int,
    check_time: Callable[[float], None],
) -> _Pass | None:
    """Measure the designs once each, as many as there is time for; return None without time for the first.

    before: the number of passes before this one. check_time: called with the share that is left of the pass.
    """
    builds = len(labels)

    def show(number: int) -> None:
        again = f", pass {before + 1}: the noise is too high" if before else ""
        fraction = (builds - 1) / builds if before else number / builds
        progress(fraction, f"building {number + 1} of {builds} engines to measure{again}")

    try:
        check_time(1.0)
        show(0)
        anchor = _Profiled(grouping, labels[0], build)
    except OutOfTimeError:
        return None
    with closing(anchor):
        anchored = [anchor.times_ms(batch, runs)]
        repeats = []
        with suppress(OutOfTimeError):
            for number, label in enumerate(labels[1:], start=1):
                check_time(1.0 - number / builds)
                show(number)
                with closing(_Profiled(grouping, label, build)) as design:
                    rounds, around = [], anchored[-1:]
                    for repeat in range(_ROUNDS):
                        check_time(1.0 - (number + repeat / _ROUNDS) / builds)
                        times = design.times_ms(batch, runs)
                        around.append(anchor.times_ms(batch, runs))
                        rounds.append(times / _speed(around[-2:]))
                repeats.append(np.array(rounds))
                anchored += around[1:]
        anchored.append(anchor.times_ms(batch, runs))
    if not repeats:
        return _Pass([np.array([times / times.sum() for times in anchored])], np.zeros((0, 0)), _speed(anchored))
    neighbours = zip(anchored, anchored[2:], strict=False)
    floats = np.array([times / _speed(pair) for times, pair in zip(anchored[1:-1], neighbours, strict=True)])
    by_design = np.median(floats.reshape(len(repeats), _ROUNDS, -1), axis=1)
    return _Pass([floats, *repeats], by_design, _speed(anchored))


def _speed(anchored: Sequence[Floats]) -> float:
    """Return the median time of the all-float engine."""
    return float(np.median([times.sum() for times in anchored]))


class _Reading:
    """The costs that passes over the designs show, and how far they are to be believed.

    doubt: why another pass could show more; empty if none is needed.
    """

    def __init__(self, grouping: Grouping, labels: Labels, passes: Sequence[_Pass]) -> None:
        self._grouping = grouping
        self._labels = labels
        self._passes = passes
        self._rounds = [np.concatenate(rounds) for rounds in zip(*(each.rounds for each in passes), strict=True)]
        self._times = np.array([np.median(values, axis=0) for values in self._rounds])
        self._noise = Noise(self._rounds, wander([each.floats for each in passes]), len(passes))
        self._fit = fit_costs(labels, self._times[:, :-1], _pairs(grouping))
        self._weights = np.column_stack((self._fit.weights, np.zeros(len(labels))))  # "everything else" saves nothing
        self._choosable = labels.any(axis=0) & ~labels.all(axis=0)
        self._errors = self._noise.errors(self._weights)[:-1]
        self._lost = is_noise(self._fit.saving[self._choosable], self._errors[self._choosable])
        self._rest = self._choosable & (np.abs(self._fit.saving) <= _CERTAIN * self._errors)
        self._sum = float(self._fit.saving[self._rest].sum())
        self._sum_error = _CERTAIN * self._noise.error(self._weights * np.append(self._rest, False))
        ends = np.zeros(self._times.shape)
        ends[:2] = [[1.0], [-1.0]] if len(labels) > 1 else [[0.0]]
        self._network = float((ends * self._times).sum())  # saving of all INT8, whatever the groups are said to save
        self._network_error = _CERTAIN * self._noise.error(ends)
        self._contradiction = self._contradicts()
        self.doubt = self._contradiction or self._unclear()

    def _contradicts(self) -> str:
        """Return how the groups contradict the network's own times, in all float and all INT8; empty if they do not."""
        if self._fit.residual > _MOST_RESIDUAL:
            return f"the groups' times miss the network's by {100.0 * self._fit.residual:.0f} %"
        network, groups = self._network, float(self._fit.saving.sum())
        if network * groups >= 0.0 or min(abs(network), abs(groups)) <= max(self._network_error, _MATTERS):
            return ""
        shares = [f"{100.0 * abs(each):.0f} % {'less' if each > 0.0 else 'more'}" for each in (groups, network)]
        return f"the groups in INT8 should take {shares[0]} of the float engine's time, and the network {shares[1]}"

    def _unclear(self) -> str:
        """Return what the noise hides, if it matters.

        It does not where the network is slower in INT8 beyond doubt, and no groups are known to be faster.
        """
        if self._sum_error <= max(_MATTERS, abs(self._sum)):
            return ""
        known_to_save = float(np.maximum(self._fit.saving[~self._rest], 0.0).sum())
        if self._network < -self._network_error and known_to_save < _MATTERS:
            return ""
        if self._lost:
            return f"INT8 and float cannot be distinguished within a spread of {100.0 * self._spread:.0f} %"
        return f"{int(self._rest.sum())} groups differ by less than the noise"

    @property
    def _spread(self) -> float:
        return spread([values[:, :-1] for values in self._rounds])

    def costs(self, ended: str) -> Costs:
        """Return the costs to go by; `ended` says why there was no further pass, if that was no choice."""
        passes, fit = len(self._passes), self._fit
        measured = f"measured {'once' if passes == 1 else f'{passes} times'}{ended}"
        facts: dict[str, Any] = {
            "noise": self._spread,
            "residual": fit.residual,
            "builds": len(self._labels) * passes,
            "passes": passes,
            "doubt": f"{self.doubt}, {measured}" if self.doubt else "",
        }
        if self._contradiction or (self.doubt and self._lost):
            return replace(macs_costs(self._grouping), **facts)
        usual_ms = float(np.median([each.usual_ms for each in self._passes]))
        saving = np.where(self._rest, self._likely(), fit.saving)
        return Costs(
            usual_ms * np.maximum(fit.time_float - saving, 0.0),
            usual_ms * fit.time_float,
            usual_ms * fit.boundary,
            usual_ms * float(np.median(self._times[:, -1])),
            source="measured",
            by_macs=self._rest,
            **facts,
        )

    def _likely(self) -> Floats:
        """Return what INT8 likely saves in the groups that the noise hides, (n,): the empirical Bayes estimate.

        A group is expected to save its share by multiply-accumulates. Its measured saving moves that by as much as the
        groups are known to differ from their shares, beyond what the noise explains.
        """
        shares = self._shares()
        measurable = self._choosable & (self._fit.time_float > 0.0)
        scale = np.where(measurable, self._fit.time_float, 1.0)
        noise = np.square(self._errors / scale)
        differences = np.square((self._fit.saving - shares) / scale) - noise
        spread_of_groups = max(0.0, float(differences[measurable].mean())) if measurable.any() else 0.0
        weights = spread_of_groups / (spread_of_groups + np.where(noise > 0.0, noise, 1.0))
        return np.where(self._rest, shares + weights * (self._fit.saving - shares), 0.0)

    def _shares(self) -> Floats:
        """Return what INT8 saves in each group by multiply-accumulates, (n,).

        The known groups' saving for each multiply-accumulate predicts the sum of the hidden ones, or the network's if
        none is known; the measured sum and its error bound it.
        """
        macs = np.array([max(1.0, group.macs) for group in self._grouping.groups])
        known = self._choosable & ~self._rest
        rate = float(self._fit.saving[known].sum() / macs[known].sum()) if known.any() else 0.0
        hidden = float(macs[self._rest].sum())
        predicted = rate * hidden if known.any() else self._network
        bounded = float(np.clip(predicted, self._sum - self._sum_error, self._sum + self._sum_error))
        shares: Floats = np.where(self._rest, bounded / max(1.0, hidden), rate) * macs
        return shares


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
