"""Find the plans that a job tries, the fastest first: all INT8 with repairs, then ever more float where INT8 is loud.

    ladder = Ladder(model, start, scene, without_int8, embedded, LadderOptions(max_loss=0.1, budget_s=120.0), progress)
    for plan in ladder.plans():    # the next one once an engine of the last was refused
        ...
    ladder.refusal(error)          # none was accepted: what was measured, and what would help

1. The first plan. A plan that served before is tried with ranges of today's calibration; else each kind of repair is
   tried, and kept where it helps, and of the layers that stay loud all the same those that hardly work stay float.
2. If that loses too much on the frames that try plans, or its engine is refused, the costs of each group of layers
   are looked up or measured, and its noise is. The frontier of cost and noise gives the plans that follow. If the
   first plan lost too much, they are quieter: a faster plan that is louder would be built in vain.

Where precision is raised (`LadderOptions.raising`), the first plan serves and is known to lose too much. So the search
follows at once, what is float stays float, and only plans with at most half of the noise are tried. But where the first
plan divides inputs, and loses little with the ranges of today's calibration, its channels have left yesterday's.

Frames of the calibration propose, held-out frames try, and the verdict has others again: a repair is never judged on
the frames that it was made for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.models.model import Model, Rules
from agent.planning.costs import GroupCosts, as_problem, labels
from agent.planning.group_noise import FRAMES_PER_RUN, GroupNoise, describe_groups, measure_noise
from agent.planning.raising import EXHAUSTED, PrecisionRaise
from agent.planning.what_if import RepairChoice, WhatIf, choose_repairs
from calibrate.partition import FLOAT, FREE, Partition, Problem, frontier, rungs
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.interface import Array, Backend, Progress
from engines.quantise.apply_plan import observed_graph, with_ranges
from engines.quantise.costs import HasTime
from engines.quantise.fusion import Grouping, fusion_groups, int8_macs_share
from engines.quantise.placement import place

REFUSED = "recalibration.refused"
FOUND_BY = "job"  # in the evidence of a plan
_COSTS_SHARE = 0.5  # share of the budget that is left, to measure costs; the rest is for the noise
_MOST_ENGINES = 4  # plans of the search that are built and judged
_LOUDEST = 3  # groups that a refusal names
_RAISED_BY = 2.0  # by which a raise divides the noise: an engine that loses too much is no matter of fine steps
# A layer is loud whose noise is within 30 dB of its output. Many depthwise convolutions are, and hardly work. With the
# loudest in float, engines lose less on scenes that did not make them (benchmarks/RESULTS.md).
_LOUD = 1e-3
_LITTLE = 0.03  # share of all multiply-accumulates
_TELLING = 5  # frames with something on them, of which fewer refuse no plan: the verdict has more
_LEFT_FLOAT = "left float by the job: {:.2g} of the noise"
_HARDLY_WORKS = "left float by the job: its noise is {:.0f} dB below its output, and it does {:.2g} of the work"
_RAISED = "raised: made {:.3g} % of the noise while fidelity was {:.2f}"

Flags = NDArray[np.bool_]
FindCosts = Callable[[Grouping, Repairs, Progress, HasTime], GroupCosts]  # as KeptCosts.find


@dataclass(frozen=True)
class Scene:
    """The calibration and the frames that plans are made from and tried on.

    sample: network inputs (1, C, H, W) of the calibration's own frames, over all its time.
    tried: others, which were held out.
    """

    calibration: Calibration
    sample: Sequence[Array]
    tried: Sequence[Array]


@dataclass(frozen=True)
class LadderOptions:
    """max_loss: the largest accepted 1 - fidelity. budget_s: to measure, by the ladder's clock; the rest is predicted.

    raising: The request for a plan with higher precision than that of the plan in service; None: any plan may do.
    """

    max_loss: float
    budget_s: float
    raising: PrecisionRaise | None = None


@dataclass
class Tried:
    """One plan: what it loses on the frames that try plans, and the share of multiply-accumulates that it has in INT8.

    offered: whether an engine of it was to be built. outcome: of that, in words. is_too_loud: it lost too much.
    """

    name: str
    plan: PrecisionPlan
    loss: float
    int8_macs_share: float
    offered: bool = False
    outcome: str = ""
    is_too_loud: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return it in JSON's types, without the plan."""
        share, loss = round(self.int8_macs_share, 4), round(self.loss, 4)
        return {"plan": self.name, "int8_macs_share": share, "loss": loss, "outcome": self.outcome}


@dataclass(eq=False, repr=False)
class Ladder:
    """The plans of one job; nothing is measured before the first is asked for.

    Args:
        model: Under the configured plan, whose tensors were observed.
        given: The plan in service; the configured one where none is.
        without_int8: Nodes that are float for want of an INT8 kernel, each with the reason, as far as is known.
        embedded: ONNX Runtime, on which plans are tried.
        find_costs: Called once, and only if plans have to be searched.
        clock: Where the process may be stopped, one that stops with it.

    Attributes:
        tried: The plans so far, in their order.
        choice: The repairs that were tried, and why they were kept; None where a plan of before is tried.
    """

    model: Model
    given: PrecisionPlan
    scene: Scene
    without_int8: Mapping[str, str]
    embedded: Backend
    options: LadderOptions
    progress: Progress
    find_costs: FindCosts
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.tried: list[Tried] = []
        self.choice: RepairChoice | None = None
        self._began_s = self.clock.monotonic_s()
        self._groups: list[dict[str, Any]] = []
        self._seems_good = False  # the plan in service, on the frames that try plans
        self._costs: GroupCosts | None = None
        rules = self.model.rules
        kept = self.given.floats if self.options.raising is not None else {}
        self._rules = Rules({**kept, **rules.floats, **self.without_int8}, rules.int8)

    def plans(self) -> Iterator[PrecisionPlan]:
        """Yield plans to build; ask for the next one only once an engine of the last was refused.

        The last one is the quietest of all, if none keeps the loss on the frames that try plans.

        Raises EngineError and CalibrationError as the graph passes do, for a plan of another model among others.
        """
        first = self._first_plan()
        raising = self.options.raising
        if raising is not None:
            tried, self._seems_good = self._try("the plan in service", first)
            tried.offered, tried.outcome = True, f"fidelity {raising.fidelity:.2f} where it serves"
            if raising.rung == 1 and self._seems_good and first.repairs.divisors:  # with ranges of today
                yield self._offered(tried)
        else:
            tried, suits = self._try(self._name_of(first), first)
            if suits:
                yield self._offered(tried)
        if (self._labels(self._grouping(first.repairs)) != FLOAT).any():
            yield from self._searched(tried)

    def report(self) -> dict[str, Any]:
        """Return in JSON's types what was tried and measured: plans, repairs, and the noise of each group of layers."""
        repairs = {name: dict(row) for name, row in self.choice.tried.items()} if self.choice is not None else {}
        return {
            "tried": [each.as_dict() for each in self.tried],
            "repairs_tried": repairs,
            "costs": self._costs.as_dict() if self._costs is not None else {},
            "sensed": any(group["measured"] for group in self._groups),
            "groups": self._groups,
            "seconds": round(self.clock.monotonic_s() - self._began_s, 3),
        }

    def note(self, outcome: str, is_too_loud: bool = True) -> None:
        """Note for what the engine of the plan that was yielded last was refused, and whether it had lost too much."""
        last = [each for each in self.tried if each.offered][-1]
        last.outcome, last.is_too_loud = outcome, is_too_loud

    def refusal(self, last: AgentError | None) -> AgentError:
        """Return the error of a job of which no engine was accepted. last: the last refusal.

        Its code is `precision.exhausted` where precision was to be raised, for which no other job may begin. If the
        frames did not show why, by chance, it is `recalibration.refused`, as for other jobs: a later job has other
        frames.
        """
        expected = last.expected if last is not None else "a plan whose loss is within recalibration.max_loss"
        if last is not None and not self._groups:
            return last
        found = "; ".join(
            f"{each.name}: {each.outcome or f'loss {each.loss:.3f} on the frames that try plans'}"
            for each in self.tried
        )
        exhausted = self.options.raising is not None and (last is None or not self._seems_good)
        loudest = sorted(self._groups, key=lambda group: -group["sensitivity"])[:_LOUDEST]
        total = sum(group["sensitivity"] for group in self._groups) or 1.0
        named = ", ".join(f"'{each['name']}' ({100.0 * each['sensitivity'] / total:.0f} %)" for each in loudest)
        is_measured = any(group["measured"] for group in self._groups)
        made = "make" if is_measured else "by their work may make"
        layers = f"the layers that {made} the noise are {named}; retrain them" if named else "retrain the model"
        remedy = f"{layers}, or accept more with recalibration.max_loss"
        code, found = EXHAUSTED if exhausted else REFUSED, f"no plan of {len(self.tried)} was accepted. {found}"
        return AgentError(code, found, expected, remedy)

    # ---- the first plan

    @cached_property
    def start(self) -> PrecisionPlan:
        """The plan to begin with; divided tensors that were not observed have the ranges of this calibration."""
        unseen = self.given.repairs.divisors.keys() - self.model.plan.repairs.divisors.keys()
        return with_ranges(self.given, self.scene.calibration) if unseen else self.given

    @cached_property
    def _what_if(self) -> WhatIf:
        return WhatIf(self.model, self.scene.calibration, self.scene.tried, self.embedded)

    def _first_plan(self) -> PrecisionPlan:
        self.progress(0.0, "choosing repairs")
        if self.options.raising is not None or self.given.repairs or self.given.evidence:
            return self.start
        self.choice = choose_repairs(
            self._what_if,
            self.scene.sample,
            lambda _, compute: compute(),
            lambda fraction, doing: self.progress(0.5 * fraction, doing),
        )
        floats = {**self._loudest(self.choice), **self.model.plan.floats}
        return PrecisionPlan(floats, self.choice.repairs)

    def _name_of(self, first: PrecisionPlan) -> str:
        if first.floats.keys() - self.model.plan.floats.keys():
            return "all INT8 but the loudest"
        return "all that may be INT8" if first.repairs else "plain INT8"

    def _loudest(self, choice: RepairChoice) -> dict[str, str]:
        """Return layers that are loud in spite of the repairs and hardly work, the loudest first, with the reason."""
        grouping = self._grouping(choice.repairs)
        free = self._labels(grouping) == FREE
        noise = [max((choice.nsr.get(layer, 0.0) for layer in group.layers), default=0.0) for group in grouping.groups]
        macs = sum(group.macs for group in grouping.groups)
        left, floats = _LITTLE * macs, dict[str, str]()
        for index in sorted(np.flatnonzero(free), key=lambda index: -noise[index]):
            group = grouping.groups[index]
            if noise[index] > _LOUD and group.macs <= left:
                left -= group.macs
                reason = _HARDLY_WORKS.format(-10.0 * np.log10(noise[index]), group.macs / macs)
                floats.update(dict.fromkeys(group.layers, reason))
        return floats

    def _try(self, name: str, plan: PrecisionPlan) -> tuple[Tried, bool]:
        """Return the plan as tried, and whether an engine of it may do. A few frames refuse nothing."""
        answer = self._what_if.evaluate(self._with_missing(plan))
        share = int8_macs_share(self.model.master, place(self.model.master, self._with_missing(plan)))
        suits = answer.telling < _TELLING or answer.loss <= self.options.max_loss
        tried = Tried(name, plan, answer.loss, share, is_too_loud=not suits)
        self.tried.append(tried)
        return tried, suits

    def _with_missing(self, plan: PrecisionPlan) -> PrecisionPlan:
        return replace(plan, floats={**plan.floats, **self.without_int8})

    # ---- further plans

    def _grouping(self, repairs: Repairs) -> Grouping:
        observed = observed_graph(self.model.master, PrecisionPlan({}, repairs))
        return fusion_groups(observed, place(observed))

    def _labels(self, grouping: Grouping) -> NDArray[np.int8]:
        return labels(grouping, self._rules.floats, self._rules.int8)

    def _searched(self, first: Tried) -> Iterator[PrecisionPlan]:
        """Measure costs and noise of the groups; yield the plans that keep the loss, the fastest first."""
        repairs = first.plan.repairs
        grouping = self._grouping(repairs)
        self._costs = self._measure_costs(grouping, repairs)
        self.without_int8 = {**self.without_int8, **self._costs.without_int8}
        self._rules = Rules({**self._rules.floats, **self._costs.without_int8}, self._rules.int8)
        measured = self._measure(grouping, repairs)
        noise, self._groups = measured.shares, describe_groups(self.model.master, grouping, measured)
        problem = as_problem(grouping, self._costs.costs, noise, self._labels(grouping))
        below = np.inf
        if first.is_too_loud:
            below = float(noise[labels(grouping, {**self._rules.floats, **first.plan.floats}, {}) != FLOAT].sum())
        engines = 0
        for number, partition in enumerate(self._rungs(problem, self._costs.tolerance, below), start=1):
            self.progress(0.9, f"trying plan {number} of the search")
            plan = self._plan(grouping, partition.int8, noise, repairs)
            if plan.essence in [each.plan.essence for each in self.tried]:
                continue
            tried, suits = self._try(f"plan {number} of the search", plan)
            if suits:
                engines += 1
                yield self._offered(tried)
            if engines == _MOST_ENGINES:
                return
        quietest = min(self.tried, key=lambda tried: tried.loss)
        if not quietest.offered:  # on the frames of the verdict, or compared with the engine in service, it may do
            yield self._offered(quietest)

    def _rungs(self, problem: Problem, tolerance: float, below: float) -> list[Partition]:
        """Return plans of ever less noise, the fastest first; to raise precision, from half of the noise on.

        tolerance: the relative difference in cost below which the quieter plan is taken. below: their noise, but for a
        raise. There the noise of layers that have to be INT8 does not count, for no plan avoids it.
        """
        raising = self.options.raising
        if raising is None:
            return rungs([plan for plan in frontier(problem) if plan.noise < below], tolerance)
        avoidable = np.where(problem.fixed == FREE, problem.noise, 0.0)
        quieter = [
            plan
            for plan in frontier(replace(problem, noise=avoidable))
            if _RAISED_BY * plan.noise <= float(avoidable.sum())
        ]
        return rungs(quieter, tolerance, _RAISED_BY)[raising.rung - 1 :]

    def _measure_costs(self, grouping: Grouping, repairs: Repairs) -> GroupCosts:
        now = self.clock.monotonic_s()
        until = now + _COSTS_SHARE * (self._began_s + self.options.budget_s - now)
        return self.find_costs(
            grouping,
            repairs,
            lambda _, doing: self.progress(0.5, doing),
            lambda seconds: self.clock.monotonic_s() + seconds < until,
        )

    def _measure(self, grouping: Grouping, repairs: Repairs) -> GroupNoise:
        """Measure what each group adds to the divergence, as far as there is time."""
        nsr = self.choice.nsr if self.choice is not None else {}
        predicted = np.array([sum(nsr.get(layer, 0.0) for layer in group.layers) for group in grouping.groups])
        if not predicted.any():
            predicted = np.array([float(group.macs) for group in grouping.groups])

        def diverge(int8: Flags) -> float | None:
            if self.clock.monotonic_s() - self._began_s >= self.options.budget_s:
                return None
            plan = self._with_missing(PrecisionPlan(grouping.plan(int8.tolist(), ""), repairs))
            return self._what_if.evaluate(plan, FRAMES_PER_RUN).divergence

        def show(fraction: float, doing: str) -> None:
            self.progress(0.5 + 0.4 * fraction, doing)

        return measure_noise(self._labels(grouping), predicted, diverge, show)

    def _plan(self, grouping: Grouping, int8: Flags, noise: NDArray[np.float64], repairs: Repairs) -> PrecisionPlan:
        shares = noise / max(float(noise.sum()), 1e-30)
        reasons = {group.name: self._reason(share) for group, share in zip(grouping.groups, shares, strict=True)}
        return PrecisionPlan(self._rules.apply(grouping.plan(int8.tolist(), reasons)), repairs)

    def _reason(self, share: float) -> str:
        raising = self.options.raising
        return _LEFT_FLOAT.format(share) if raising is None else _RAISED.format(100.0 * share, raising.fidelity)

    def _offered(self, tried: Tried) -> PrecisionPlan:
        """Return the plan with what led to it as evidence, except one that the owner wrote."""
        tried.offered = True
        if tried.plan.evidence and tried.plan.evidence.get("by") != FOUND_BY:
            return tried.plan
        known = {"by": FOUND_BY, "model": self.model.sha256, "calibration": self.scene.calibration.id}
        groups = self._groups or self._unmeasured_groups(tried.plan.repairs)
        return replace(tried.plan, evidence={**known, **self.report(), "groups": groups})

    def _unmeasured_groups(self, repairs: Repairs) -> list[dict[str, Any]]:
        """Return the groups of a plan that needed no search, with the noise that repairs predict, if any were tried."""
        grouping, nsr = self._grouping(repairs), self.choice.nsr if self.choice is not None else {}
        rows = describe_groups(self.model.master, grouping, None)
        return [{**row, "sensitivity": sum(nsr.get(layer, 0.0) for layer in row["layers"])} for row in rows]
