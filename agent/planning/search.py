"""Search for the fastest plan that keeps the loss, and certify it.

`PlanSearch.run` is the way through, in five steps. It chooses repairs, measures which groups make the noise, and
measures what each group costs. From these it takes plans along the frontier of time and noise and tries them on a few
search frames. The promising ones are then certified on frames that the search has not used, fastest first. Each
measurement is kept in a journal: an interrupted search resumes there.

    search = PlanSearch(builder, rules, frames, embedded, PlanOptions(max_loss=0.02), stage)
    search.run(journal)            # in the caller's thread; builds engines
    plan = make_plan(search)       # agent/planning/result.py

The module holds, in the order of use: the options, the split of the frames, the choice of candidates, the result, and
the search itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent.common.state_files import Journal
from agent.models.model import Rules
from agent.planning.certificate import ERROR, MAX_CANDIDATES, Certifier, Terms, TrialResult, check_frames
from agent.planning.costs import GroupCosts, PlanBuilder, as_problem, find_costs, labels
from agent.planning.frames import RandomFrames
from agent.planning.what_if import RepairChoice, WhatIf, WhatIfResult, choose_repairs
from agent.vision.task import VisionTask
from calibrate.partition import FLOAT, Partition, frontier
from calibrate.sensitivity import Block, measure_blocks, share_out
from engines.interface import Array, Backend, Progress
from engines.quantise.apply_plan import observed_graph
from engines.quantise.fusion import Grouping, fusion_groups
from engines.quantise.placement import place
from engines.store.artefact import fingerprint

SEARCH_FRAMES = 24  # at most a quarter of the source, and no fewer than 8
_FEWEST = 8

_HARDLY = 0.25  # of the accepted loss: a plan that loses less has hardly a loss to win back
_MOST_PLANS = 10  # on the ladder, of half the noise each

_FRAMES_PER_RUN = 8  # of the search frames, for one block of groups
_RUNS = 48  # of the network, to measure which groups make the noise
_RESTORED = 8  # most sensitive groups that are also measured as the only float one
_SENSITIVITY_SHARE = 0.5  # of the budget; what is not measured until then is predicted, so that something is certified
_LEFT_FLOAT = "left float by the search"  # a reason, as plan.json has it
_CANDIDATES = "candidates"  # a key of the journal

Stage = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of a stage by its name


@dataclass(frozen=True)
class PlanOptions:
    """The options of one search.

    max_loss, max_confusion: as in `agent.planning.certificate.Terms`. budget_s: None for as long as it takes.
    costs: "measured", or "macs" to go by multiply-accumulates without measuring. seed: of the order of the frames.
    """

    max_loss: float = 0.02
    max_confusion: float = 0.1
    budget_s: float | None = None
    costs: str = "measured"
    seed: int = 0


@dataclass(frozen=True)
class Split:
    """How the frames are divided between search and certificate.

    search: how many frames at the start of the random order the search uses. certificate: how many are left; None for a
    live camera. terms: with as many candidates as the frames allow, since each takes its share of the error.
    """

    search: int
    certificate: int | None
    terms: Terms

    @property
    def description(self) -> str:
        """A line for people on what the certificate is going to need."""
        certificate = "" if self.certificate is None else f"{self.certificate} "
        return (
            f"{self.search} frames to search with, {certificate}others to certify on: a plan that loses nothing is "
            f"certified after {self.terms.frames_needed} with something on them, or a few less, for a loss of at most "
            f"{self.terms.max_loss:g} with {100.0 * (1.0 - ERROR):g} % confidence; one that loses something takes more"
        )


@dataclass(frozen=True)
class Candidate:
    """A plan worth building: which groups are INT8, and its answers on the search frames."""

    partition: Partition
    answer: WhatIfResult

    def as_dict(self) -> dict[str, Any]:
        """Return the candidate in JSON's types, as the journal keeps it."""
        plan = self.partition
        return {"int8": plan.int8.tolist(), "time": plan.time, "noise": plan.noise, "answer": asdict(self.answer)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Candidate:
        return cls(Partition(np.array(row["int8"], np.bool_), row["time"], row["noise"]), WhatIfResult(**row["answer"]))


def ladder(frontier: Sequence[Partition], tolerance: float) -> list[Partition]:
    """Choose plans of ever less noise, fastest first: at each step the quietest of those that are as fast as any.

    frontier: fastest first, quietest last. tolerance: relative difference in time below which plans are equally fast.
    """
    chosen: list[Partition] = []
    plans = [plan for plan in frontier if plan.int8.any()]
    while plans and len(chosen) < _MOST_PLANS:
        as_fast = (1.0 + tolerance) * plans[0].time
        chosen.append(min((plan for plan in plans if plan.time <= as_fast), key=lambda plan: plan.noise))
        plans = [plan for plan in plans if 2.0 * plan.noise <= chosen[-1].noise and plan.noise < chosen[-1].noise]
    return chosen


def choose_candidates(
    plans: Sequence[Partition],
    evaluate: Callable[[NDArray[np.bool_]], WhatIfResult],
    max_loss: float,
    most: int,
    fastest: Partition | None = None,
) -> tuple[list[Candidate], list[Candidate]]:
    """Try plans on the search frames, fastest first; return those to be certified, and all that were tried.

    A plan that loses more than max_loss there already is left out. If the frames show nothing, none is.

    Args:
        evaluate: Answers the search frames with these groups in INT8.
        most: How many are to be certified at most.
        fastest: The plan that the others are nearly as fast as. It is tried first, and certified only if it is so quiet
            that there is hardly a loss to win back.
    """
    tried: list[Candidate] = []
    promising: list[Candidate] = []
    first = [] if fastest is None or any(plan is fastest for plan in plans) else [fastest]
    for plan in (*first, *plans):
        if len(promising) == most:
            break
        candidate = Candidate(plan, evaluate(plan.int8))
        tried.append(candidate)
        if candidate.answer.loss <= (_HARDLY * max_loss if plan is fastest and first else max_loss):
            promising.append(candidate)
    return promising, tried


@dataclass
class SearchResult:
    """The results so far; those of steps that there was no time for are absent.

    predicted: per group (n,) the noise to signal of its layers, in the sum.
    restored: by group, by how much the divergence falls if this group is float and all others are INT8.
    tried: plans on the search frames; `candidates` are those worth a trial.
    trials: of the first candidates, in their order.
    interrupted: "budget" if the budget cut the search short.
    """

    grouping: Grouping
    chosen: RepairChoice | None = None
    predicted: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    blocks: Sequence[Block] = ()
    restored: dict[int, float] = field(default_factory=dict)
    costs: GroupCosts | None = None
    frontier: Sequence[Partition] = ()
    tried: Sequence[Candidate] = ()
    candidates: Sequence[Candidate] = ()
    trials: list[TrialResult] = field(default_factory=list)
    interrupted: str = ""

    @property
    def noise(self) -> NDArray[np.float64]:
        """What each group adds to the divergence while it is INT8, (groups,)."""
        return share_out(self.predicted, self.blocks)

    @property
    def accepted(self) -> int | None:
        """The index of the candidate that was certified."""
        return next((index for index, trial in enumerate(self.trials) if trial.accepted), None)


class _TimeIsUpError(Exception):
    """The budget is spent. It ends the search, and nobody outside of it sees it."""


@dataclass
class PlanSearch:
    """One search. `run` may be interrupted at any point: all measurements are in its journal.

    builder: for the runtime that will serve. embedded: ONNX Runtime, for what-ifs and the reference.
    """

    builder: PlanBuilder
    rules: Rules
    frames: RandomFrames
    embedded: Backend
    options: PlanOptions
    stage: Stage

    def __post_init__(self) -> None:
        self.model = self.builder.model
        self.result = SearchResult(fusion_groups(self.model.master, self.model.placement))
        self._journal: Journal
        self._started = time.monotonic()

    @property
    def is_decided(self) -> bool:
        """True if every layer has to be float, so that there is nothing to search."""
        return bool((self._fixed() == FLOAT).all())

    @cached_property
    def split(self) -> Split:
        """The division of the frames.

        Raises AgentError (`plan.frames`) if there are too few for any certificate, CameraError as the source does.
        """
        count, options = self.frames.count, self.options
        search = SEARCH_FRAMES if count is None else min(SEARCH_FRAMES, max(_FEWEST, count // 4))
        left = None if count is None else count - search
        terms = [Terms(options.max_loss, options.max_confusion, n) for n in range(MAX_CANDIDATES, 0, -1)]
        chosen = next((each for each in terms if left is None or each.frames_needed <= left), terms[-1])
        check_frames(self.frames, search, chosen)
        return Split(search, left, chosen)

    def run(self, journal: Journal) -> SearchResult:
        """Search and certify, as far as the budget allows."""
        self._journal = journal
        if self.is_decided:
            return self.result
        steps = (
            self._choose_repairs,
            self._measure_sensitivities,
            self._measure_costs,
            self._choose_candidates,
            self._certify,
        )
        try:
            for step in steps:
                self._check_time()
                step()
        except _TimeIsUpError:
            self.result.interrupted = "budget"
        return self.result

    def out_of_time(self, share: float = 1.0) -> bool:
        """Return whether this share of the budget is spent."""
        budget_s = self.options.budget_s
        return budget_s is not None and time.monotonic() - self._started >= share * budget_s

    def _may_repeat(self, seconds: float) -> bool:
        """Return whether half of the budget that is left is enough for these seconds: the rest is for the trials."""
        budget_s = self.options.budget_s
        return budget_s is None or seconds <= 0.5 * (budget_s - (time.monotonic() - self._started))

    def plan_of(self, int8: NDArray[np.bool_], reasons: Mapping[str, str] | str) -> dict[str, str]:
        """Return the layers that stay float if these groups are INT8, each with its reason.

        The reasons of the owner's rules and of missing kernels go before `reasons`.
        """
        return {**self.rules.apply(self.result.grouping.plan(int8.tolist(), reasons)), **self.builder.without_int8}

    def _choose_repairs(self) -> None:
        with self.stage("repairs") as progress:
            self.result.chosen = choose_repairs(
                self.model,
                self.builder.calibration,
                self._search_frames,
                self._what_if,
                self.embedded,
                self._journal.get_or_compute,
                self._with_deadline(progress),
            )
        self.builder.repairs = self.result.chosen.repairs
        observed = observed_graph(self.model.master, self.builder.plan({}))
        self.result.grouping = fusion_groups(observed, place(observed))

    def _measure_sensitivities(self) -> None:
        """Measure which groups make the noise: blocks of groups are INT8 alone, and the loud blocks are split."""
        result = self.result
        groups, chosen = result.grouping.groups, result.chosen
        assert chosen is not None
        loud = np.flatnonzero(self._fixed() != FLOAT)  # the others are float in every plan
        predicted = np.zeros(len(groups))
        predicted[loud] = [sum(chosen.nsr.get(layer, 0.0) for layer in groups[index].layers) for index in loud]
        result.predicted = predicted
        with self.stage("sensitivities") as progress:
            show = self._with_deadline(progress)
            runs = 0

            def measure(members: Sequence[int]) -> float | None:
                nonlocal runs
                if self.out_of_time(_SENSITIVITY_SHARE):
                    result.interrupted = "budget"
                    return None
                runs += 1
                show(min(1.0, runs / (_RUNS + _RESTORED)), "finding the groups that make the noise")
                int8 = np.zeros(len(groups), np.bool_)
                int8[loud[list(members)]] = True
                return self._evaluate(int8, _FRAMES_PER_RUN).divergence

            blocks = measure_blocks(predicted[loud], measure, _RUNS)
            result.blocks = [Block(tuple(loud[list(each.members)].tolist()), each.divergence) for each in blocks]
            all_int8 = measure(range(len(loud)))
            for restored in np.argsort(-result.noise[loud])[:_RESTORED].tolist():
                others = measure([each for each in range(len(loud)) if each != restored])
                if all_int8 is not None and others is not None:
                    result.restored[int(loud[restored])] = all_int8 - others

    def _measure_costs(self) -> None:
        with self.stage("costs") as progress:
            self.result.costs = find_costs(
                self.result.grouping,
                self.rules.floats,
                self.builder,
                self._search_frames[0],
                self._journal,
                self._with_deadline(progress),
                self.options.costs,
                self._may_repeat,
            )

    def _choose_candidates(self) -> None:
        result, costs = self.result, self.result.costs
        assert costs is not None
        result.frontier = frontier(as_problem(result.grouping, costs.costs, result.noise, self._fixed()))
        with self.stage("candidates") as progress:
            show = self._with_deadline(progress)

            def evaluate(int8: NDArray[np.bool_]) -> WhatIfResult:
                show(0.5, "trying plans on the search frames")
                return self._evaluate(int8)

            fastest = next((plan for plan in result.frontier if plan.int8.any()), None)
            plans, most = ladder(result.frontier, costs.tolerance), self.split.terms.candidates
            chosen, result.tried = choose_candidates(plans, evaluate, self.options.max_loss, most, fastest)
        # Once a candidate was measured, the error is split over these: whatever a resumed search chooses, no others.
        kept = cast("list[dict[str, Any]] | None", self._journal.get(_CANDIDATES))
        result.candidates = chosen if kept is None else [Candidate.from_dict(row) for row in kept]

    def _certify(self) -> None:
        candidates, costs = self.result.candidates, self.result.costs
        if not candidates or costs is None:
            return
        terms = Terms(self.options.max_loss, self.options.max_confusion, len(candidates))
        with (
            self.stage("certificate") as progress,
            closing(self.embedded.load(self.model.master.SerializeToString())) as reference,
            closing(self.builder.load_float(self._with_deadline(progress))) as float_engine,
        ):
            certifier = Certifier(
                self.model.spec, terms, self.frames, self.split.search, reference, float_engine, self._journal,
                progress, self.out_of_time,
            )  # fmt: skip
            self._journal.get_or_compute(_CANDIDATES, lambda: [candidate.as_dict() for candidate in candidates])
            for number, candidate in enumerate(candidates, start=1):
                floats = self.plan_of(candidate.partition.int8, _LEFT_FLOAT)
                with closing(self.builder.load(floats, self._with_deadline(progress))) as engine:
                    plan = fingerprint(self.builder.plan(floats).essence)
                    trial = certifier.try_candidate(f"candidate {number}", plan, engine)
                # INT8 can be faster on this machine where its times were measured; then a candidate has to be.
                if trial.accepted and not costs.why and not trial.is_faster:
                    times = f"{trial.latency_ms:.3g} ms, which is not faster than {trial.latency_float_ms:.3g} ms"
                    trial = replace(trial, accepted=False, reason=f"{times} in float; {trial.reason}")
                self.result.trials.append(trial)
                if self.result.accepted is not None:
                    return
                self._check_time()

    def _evaluate(self, int8: NDArray[np.bool_], frames: int | None = None) -> WhatIfResult:
        """Answer the first `frames` search frames, or all, with these groups in INT8."""
        plan = self.builder.plan(self.plan_of(int8, _LEFT_FLOAT))
        key = f"ask {frames} {fingerprint(plan.essence)}"
        return WhatIfResult(**self._journal.get_or_compute(key, lambda: asdict(self._what_if.evaluate(plan, frames))))

    @cached_property
    def _search_frames(self) -> list[Array]:
        with closing(self.embedded.load(self.model.master.SerializeToString())) as engine:
            task = VisionTask(self.model.spec, engine.inputs, engine.outputs)
        with closing(self.frames.draw()) as draws:
            return [task.preprocess(image)[0].copy() for _, image in islice(draws, self.split.search)]

    @cached_property
    def _what_if(self) -> WhatIf:
        return WhatIf(self.model, self.builder.calibration, self._search_frames, self.embedded)

    def _fixed(self) -> NDArray[np.int8]:
        """Per group FREE, or the precision it has by rule, kernel or nature."""
        return labels(self.result.grouping, {**self.rules.floats, **self.builder.without_int8}, self.rules.int8)

    def _check_time(self) -> None:
        if self.out_of_time():
            raise _TimeIsUpError

    def _with_deadline(self, progress: Progress) -> Progress:
        """Return a progress callback that ends its caller when the time is up."""

        def show(fraction: float, doing: str) -> None:
            self._check_time()
            progress(fraction, doing)

        return show
