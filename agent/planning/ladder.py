"""Find the plans that are tried, the fastest first: all INT8 with repairs, then ever more float where INT8 is loud.

    ladder = Ladder(model, start, scene, without_int8, embedded, LadderOptions(max_loss=0.1, budget_s=120.0), progress)
    for plan in ladder.plans():    # of a job: the next one once an engine of the last was refused
        ...
    ladder.refusal(error)          # none was accepted: what was measured, and what would help
    ladder.candidates()            # of `tared plan`: all of them, before an engine of any is built

1. The first plan. A plan that served before is tried with ranges of today's calibration; else each kind of repair is
   tried, and kept where it helps, and of the layers that stay loud all the same those that hardly work stay float.
2. If that loses too much on the frames that try plans, or its engine is refused, the costs of each group of layers
   are looked up or measured, and its noise is. The frontier of cost and noise gives the plans that follow. If an
   engine lost too much, they are quieter: a faster plan that is louder would be built in vain.

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
from agent.planning.evidence import JOB, Findings, Tried
from agent.planning.group_noise import FRAMES_PER_RUN, GroupNoise, measure_noise
from agent.planning.raising import EXHAUSTED, PrecisionRaise
from agent.planning.what_if import Remember, RepairChoice, WhatIf, choose_repairs, remember_nothing
from calibrate.partition import FLOAT, FREE, Partition, frontier, rungs
from calibrate.plan import PrecisionPlan, Repairs
from engines.calibration import Calibration
from engines.interface import Array, Backend, Progress
from engines.quantise.apply_plan import observed_graph, with_ranges
from engines.quantise.costs import HasTime
from engines.quantise.fusion import Grouping, fusion_groups, int8_macs_share
from engines.quantise.placement import place

REFUSED = "recalibration.refused"
_COSTS_SHARE = 0.5  # share of the budget that is left, to measure costs; the rest is for the noise
_MOST_ENGINES = 4  # plans of the search that are built and judged
_LOUDEST = 3  # groups that a refusal names
_RAISED_BY = 2.0  # by which a raise divides the noise: an engine that loses too much is no matter of fine steps
# A layer is loud whose noise is within 30 dB of its output. Many depthwise convolutions are, and hardly work. With the
# loudest in float, engines lose less on scenes that did not make them (benchmarks/RESULTS.md).
_LOUD = 1e-3
_LITTLE = 0.03  # share of all multiply-accumulates
_TELLING = 5  # frames with something on them, of which fewer refuse no plan: the verdict has more
_HARDLY_WORKS = "left float: its noise is {:.0f} dB below its output, and it does {:.2g} of the work"
_EXPECTED = "a plan whose loss is within recalibration.max_loss"
_RAISED = "raised: made {:.3g} % of the noise while fidelity was {:.2f}"

Flags = NDArray[np.bool_]
FindCosts = Callable[[Grouping, Repairs, Progress, HasTime], GroupCosts]  # as KeptCosts.find


@dataclass(frozen=True)
class Scene:
    """The calibration and the frames that plans are made from and tried on.

    sample: network inputs (1, C, H, W) that propose: of a job the calibration's own frames, over all its time.
    tried: others, which were held out, by scene. A plan has to keep its loss in the worst of them.
    """

    calibration: Calibration
    sample: Sequence[Array]
    tried: Sequence[Sequence[Array]]


@dataclass(frozen=True)
class LadderOptions:
    """max_loss: the largest accepted 1 - fidelity. budget_s: to measure, by the ladder's clock; the rest is predicted.

    raising: The request for a plan with higher precision than that of the plan in service; None: any plan may do.
    """

    max_loss: float
    budget_s: float
    raising: PrecisionRaise | None = None


@dataclass(eq=False, repr=False)
class Ladder:
    """The plans of one job; nothing is measured before the first is asked for.

    Args:
        model: Under the configured plan, whose tensors were observed.
        given: The plan in service; the configured one where none is.
        without_int8: Nodes that are float for want of an INT8 kernel, each with the reason, as far as is known.
        embedded: ONNX Runtime, on which plans are tried.
        find_costs: Called once, and only if plans have to be searched.
        remember: For what the frames that try say of a plan.
        clock: Where the process may be stopped, one that stops with it.

    Attributes:
        findings: What was tried and measured so far.
        ran_out: True if the budget ended before all noise was measured.
    """

    model: Model
    given: PrecisionPlan
    scene: Scene
    without_int8: Mapping[str, str]
    embedded: Backend
    options: LadderOptions
    progress: Progress
    find_costs: FindCosts
    remember: Remember = remember_nothing
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.ran_out = False
        self._began_s = self.clock.monotonic_s()
        self._seems_good = False  # the plan in service, on the frames that try plans
        rules = self.model.rules
        kept = self.given.floats if self.options.raising is not None else {}
        self._rules = Rules({**kept, **rules.floats, **self.without_int8}, rules.int8)
        self.findings = Findings(self.model, *self._grouped(Repairs()))

    @property
    def is_decided(self) -> bool:
        """True if every layer has to be float, so that there is nothing to search."""
        return bool((self.findings.fixed == FLOAT).all())

    def plans(self) -> Iterator[PrecisionPlan]:
        """Yield plans to build; ask for the next one only once an engine of the last was refused.

        The last one is the quietest of all, if none keeps the loss on the frames that try plans.

        Raises EngineError and CalibrationError as the graph passes do, for a plan of another model among others.
        """
        first, found = self._first_plan(), self.findings
        found.grouping, found.fixed = self._grouped(first.repairs)
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
        if not self.is_decided:
            yield from self._searched(tried)

    def candidates(self) -> list[Tried]:
        """Search to the end, and return the plans that are worth an engine, the fastest first.

        A plan of the search goes before the first plan only where times were measured, and it is faster by more than
        their tolerance. The frames that try plans alone decide which plans these are: a certificate has others.
        """
        found = self.findings
        for _ in self.plans():
            self.progress(0.9, "trying plans")
        offered = [tried for tried in found.tried if tried.offered]
        if found.costs.why or not found.tried[0].offered:
            return offered
        as_fast = found.partition(found.tried[0].plan).time / (1.0 + found.costs.tolerance)
        return sorted(offered, key=lambda tried: found.partition(tried.plan).time >= as_fast)

    def report(self, plan: PrecisionPlan) -> dict[str, Any]:
        """Return the evidence of a job's plan: what was tried and measured until now."""
        identity = {"by": JOB, "calibration": self.scene.calibration.id, "max_loss": self.options.max_loss}
        seconds = round(self.clock.monotonic_s() - self._began_s, 3)
        return {**self.findings.evidence(plan), **identity, "seconds": seconds}

    def note(self, outcome: str, is_too_loud: bool = True) -> None:
        """Note for what the engine of the plan that was yielded last was refused, and whether it had lost too much."""
        last = [each for each in self.findings.tried if each.offered][-1]
        last.outcome, last.is_too_loud = outcome, is_too_loud

    def refusal(self, last: AgentError | None) -> AgentError:
        """Return the error of a job of which no engine was accepted. last: the last refusal.

        Its code is `precision.exhausted` where precision was to be raised, for which no other job may begin. If the
        frames did not show why, by chance, it is `recalibration.refused`, as for other jobs: a later job has other
        frames.
        """
        found, expected = self.findings, last.expected if last is not None else _EXPECTED
        if last is not None and found.measured is None:
            return last
        tried = "; ".join(
            f"{each.name}: {each.outcome or f'loss {each.loss:.3f} on the frames that try plans'}"
            for each in found.tried
        )
        exhausted = self.options.raising is not None and (last is None or not self._seems_good)
        noise, names = found.noise, [group.name for group in found.grouping.groups]
        loudest = np.argsort(-noise, kind="stable")[:_LOUDEST].tolist() if found.measured is not None else []
        named = ", ".join(f"'{names[each]}' ({100.0 * noise[each] / (noise.sum() or 1.0):.0f} %)" for each in loudest)
        made = "make" if found.is_sensed else "by their work may make"
        layers = f"the layers that {made} the noise are {named}; retrain them" if named else "retrain the model"
        remedy = f"{layers}, or accept more with recalibration.max_loss"
        code = EXHAUSTED if exhausted else REFUSED
        return AgentError(code, f"no plan of {len(found.tried)} was accepted. {tried}", expected, remedy)

    # ---- the first plan

    @cached_property
    def start(self) -> PrecisionPlan:
        """The plan to begin with; divided tensors that were not observed have the ranges of this calibration."""
        unseen = self.given.repairs.divisors.keys() - self.model.plan.repairs.divisors.keys()
        return with_ranges(self.given, self.scene.calibration) if unseen else self.given

    @cached_property
    def _what_if(self) -> WhatIf:
        return WhatIf(self.model, self.scene.calibration, self.scene.tried, self.embedded, self.remember)

    def _first_plan(self) -> PrecisionPlan:
        self.progress(0.0, "choosing repairs")
        if self.options.raising is not None or self.given.repairs or self.given.evidence:
            return self.start
        choice = choose_repairs(
            self._what_if, self.scene.sample, lambda fraction, doing: self.progress(0.5 * fraction, doing)
        )
        self.findings.choice = choice
        return PrecisionPlan({**self._loudest(choice), **self.model.plan.floats}, choice.repairs)

    def _name_of(self, first: PrecisionPlan) -> str:
        if first.floats.keys() - self.model.plan.floats.keys():
            return "all INT8 but the loudest"
        return "all that may be INT8" if first.repairs else "plain INT8"

    def _loudest(self, choice: RepairChoice) -> dict[str, str]:
        """Return layers that are loud in spite of the repairs and hardly work, the loudest first, with the reason."""
        grouping, fixed = self._grouped(choice.repairs)
        noise = [max((choice.nsr.get(layer, 0.0) for layer in group.layers), default=0.0) for group in grouping.groups]
        macs = sum(group.macs for group in grouping.groups)
        left, floats = _LITTLE * macs, dict[str, str]()
        for index in sorted(np.flatnonzero(fixed == FREE), key=lambda index: -noise[index]):
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
        self.findings.tried.append(tried)
        return tried, suits

    def _with_missing(self, plan: PrecisionPlan) -> PrecisionPlan:
        return replace(plan, floats={**plan.floats, **self.without_int8})

    # ---- further plans

    def _grouped(self, repairs: Repairs) -> tuple[Grouping, NDArray[np.int8]]:
        """Return the groups of the graph under these repairs, and what is fixed of them."""
        observed = observed_graph(self.model.master, PrecisionPlan({}, repairs))
        grouping = fusion_groups(observed, place(observed))
        return grouping, labels(grouping, self._rules.floats, self._rules.int8)

    def _searched(self, first: Tried) -> Iterator[PrecisionPlan]:
        """Measure costs and noise of the groups; yield the plans that keep the loss, the fastest first."""
        repairs, found = first.plan.repairs, self.findings
        found.found_costs = costs = self._find_costs(repairs)
        self.without_int8 = {**self.without_int8, **costs.without_int8}
        self._rules = Rules({**self._rules.floats, **costs.without_int8}, self._rules.int8)
        found.fixed = labels(found.grouping, self._rules.floats, self._rules.int8)
        found.measured = self._measure(repairs)
        engines = 0
        for number, partition in enumerate(self._rungs(costs), start=1):
            self.progress(0.9, f"trying plan {number} of the search")
            plan = self._plan(partition.int8, repairs)
            if self._is_in_vain(partition.noise) or plan.essence in [each.plan.essence for each in found.tried]:
                continue
            tried, suits = self._try(f"plan {number} of the search", plan)
            if suits:
                engines += 1
                yield self._offered(tried)
            if engines == _MOST_ENGINES:
                return
        quietest = min(found.tried, key=lambda tried: tried.loss)
        if not quietest.offered:  # on the frames of the verdict, or compared with the engine in service, it may do
            yield self._offered(quietest)

    def _is_in_vain(self, noise: float) -> bool:
        """Return whether a plan with this much noise has as much as one that lost too much, but for a raise."""
        loud = (self.findings.partition(tried.plan).noise for tried in self.findings.tried if tried.is_too_loud)
        return self.options.raising is None and noise >= min(loud, default=np.inf)

    def _rungs(self, costs: GroupCosts) -> list[Partition]:
        """Return plans of ever less noise, the fastest first; to raise precision, from half of the noise on.

        There the noise of layers that have to be INT8 does not count, for no plan avoids it.
        """
        found, raising = self.findings, self.options.raising
        problem = as_problem(found.grouping, costs.costs, found.noise, found.fixed)
        if raising is None:
            return rungs(frontier(problem), costs.tolerance)
        avoidable = np.where(problem.fixed == FREE, problem.noise, 0.0)
        quieter = [
            plan
            for plan in frontier(replace(problem, noise=avoidable))
            if _RAISED_BY * plan.noise <= float(avoidable.sum())
        ]
        return rungs(quieter, costs.tolerance, _RAISED_BY)[raising.rung - 1 :]

    def _find_costs(self, repairs: Repairs) -> GroupCosts:
        now = self.clock.monotonic_s()
        until = now + _COSTS_SHARE * (self._began_s + self.options.budget_s - now)
        return self.find_costs(
            self.findings.grouping,
            repairs,
            lambda _, doing: self.progress(0.5, doing),
            lambda seconds: self.clock.monotonic_s() + seconds < until,
        )

    def _measure(self, repairs: Repairs) -> GroupNoise:
        """Measure what each group adds to the divergence, as far as there is time."""
        grouping, predicted = self.findings.grouping, self.findings.nsr
        if not predicted.any():
            predicted = np.array([float(group.macs) for group in grouping.groups])

        def diverge(int8: Flags) -> float | None:
            if self.clock.monotonic_s() - self._began_s >= self.options.budget_s:
                self.ran_out = True
                return None
            plan = self._with_missing(PrecisionPlan(grouping.plan(int8.tolist(), ""), repairs))
            return self._what_if.evaluate(plan, FRAMES_PER_RUN).divergence

        def show(fraction: float, doing: str) -> None:
            self.progress(0.5 + 0.4 * fraction, doing)

        return measure_noise(self.findings.fixed, predicted, diverge, show)

    def _plan(self, int8: Flags, repairs: Repairs) -> PrecisionPlan:
        groups = self.findings.grouping.groups
        reasons = {group.name: self._reason(index) for index, group in enumerate(groups)}
        return PrecisionPlan(self._rules.apply(self.findings.grouping.plan(int8.tolist(), reasons)), repairs)

    def _reason(self, index: int) -> str:
        if self.options.raising is None:
            return self.findings.gain(index)
        share = float(self.findings.noise[index]) / max(float(self.findings.noise.sum()), 1e-30)
        return _RAISED.format(100.0 * share, self.options.raising.fidelity)

    def _offered(self, tried: Tried) -> PrecisionPlan:
        """Return the plan with what led to it as evidence, except one that the owner wrote."""
        tried.offered = True
        if tried.plan.evidence and tried.plan.evidence.get("by") != JOB:
            return tried.plan
        return replace(tried.plan, evidence=self.report(tried.plan))
