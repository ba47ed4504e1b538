"""Search for the fastest plan that keeps the loss, and certify it.

`PlanSearch.run` is the way through, in five steps. It chooses repairs, measures which groups make the noise, and
measures what each group costs. From these it takes plans along the frontier of time and noise and tries them on a few
search frames. The promising ones are then certified on frames that the search has not used, fastest first. Each
measurement is kept in a journal: an interrupted search resumes there. Where frames of several sources are given, a
plan has to keep its loss in the worst of them, on the search frames and under the certificate.

    search = PlanSearch(builder, sources, embedded, PlanOptions(max_loss=0.02), stage)
    search.run(journal)            # in the caller's thread; builds engines
    plan = make_plan(search)       # agent/planning/result.py

The module holds, in the order of use: the options, the split of the frames, the choice of candidates, the result, and
the search itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, zip_longest
from statistics import fmean
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.state_files import Journal
from agent.models.model import read_rules
from agent.planning.certificate import ERROR, MAX_CANDIDATES, Certifier, Terms, TrialResult, check_frames, worst_of
from agent.planning.costs import GroupCosts, PlanBuilder, as_problem, find_costs, labels
from agent.planning.frames import RandomFrames
from agent.planning.group_noise import FRAMES_PER_RUN, GroupNoise, measure_noise
from agent.planning.what_if import RepairChoice, WhatIf, WhatIfResult, choose_repairs
from agent.vision.task import VisionTask
from calibrate.partition import FLOAT, Partition, frontier, rungs
from engines.interface import Array, Backend, Engine, Progress
from engines.quantise.apply_plan import observed_graph
from engines.quantise.costs import HasTime
from engines.quantise.fusion import Grouping, fusion_groups
from engines.quantise.placement import place
from engines.store.artefact import fingerprint

SEARCH_FRAMES = 24  # from all sources together; from each at most a quarter, and at least 8
_FEWEST = 8
_STRETCHES = 4  # parts into which a single source is cut by time; every other one proposes repairs

_HARDLY = 0.25  # share of the accepted loss: a plan that loses less has hardly a loss to win back

_RESTORED = 8  # most sensitive groups that are also measured as the only float one
_SENSITIVITY_SHARE = 0.5  # share of the budget; the rest is predicted, so that something is certified
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
class Share:
    """The division of one source's frames between search and certificate.

    search: how many frames at the start of the random order the search uses. certificate: how many are left; None for a
    live camera.
    """

    source: str
    search: int
    certificate: int | None


@dataclass(frozen=True)
class Split:
    """The division of every source's frames. terms: with as many candidates as all sources' frames allow.

    Each candidate takes its share of the error, and each source its share of that.
    """

    shares: Sequence[Share]
    terms: Terms

    @property
    def live(self) -> bool:
        """True if the one source is a live camera."""
        return any(share.certificate is None for share in self.shares)

    @property
    def search(self) -> int:
        """The number of search frames of all sources."""
        return sum(share.search for share in self.shares)

    @property
    def description(self) -> str:
        """A line for people on what the certificate is going to need."""
        several = len(self.shares) > 1
        certified = f"certified after {self.terms.frames_needed} with something on them"
        return (
            f"{'; '.join(_frames_of(share, several) for share in self.shares)}: a plan that loses nothing is "
            f"{certified}{' in each source' if several else ''}, or a few less, for a loss of at most "
            f"{self.terms.max_loss:g} with {100.0 * (1.0 - ERROR):g} % confidence; one that loses something takes more"
        )


def _frames_of(share: Share, named: bool) -> str:
    certificate = "" if share.certificate is None else f"{share.certificate} "
    frames = f"{share.search} frames to search with, {certificate}others to certify on"
    return f"{frames} in {share.source}" if named else frames


def split_for_repairs(drawn: Sequence[Sequence[tuple[int, Array]]]) -> tuple[list[Array], list[Array]]:
    """Return the frames that repairs are proposed from, and others that they are tried on.

    The two are of different scenes, or of different stretches of time if there is one source only: a repair that suits
    just the scene which proposed it is not kept. drawn: per source its frames with their index, the order in time.
    """
    scenes = [[frame for _, frame in frames] for frames in drawn]
    if len(drawn) == 1:
        by_time = [frame for _, frame in sorted(drawn[0], key=lambda one: one[0])]
        ends = [round(len(by_time) * part / _STRETCHES) for part in range(_STRETCHES + 1)]
        scenes = [by_time[start:end] for start, end in pairwise(ends)]
    return _in_turn(scenes[::2]), _in_turn(scenes[1::2])


def _in_turn(scenes: Sequence[Sequence[Array]]) -> list[Array]:
    """Return one frame of each scene, then the next of each: the first few show all of them."""
    return [frame for frames in zip_longest(*scenes) for frame in frames if frame is not None]


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

    measured: what the groups add to the divergence; predicted is the noise to signal of their layers, in the sum.
    restored: by group, by how much the divergence falls if this group is float and all others are INT8.
    tried: plans on the search frames; `candidates` are those worth a trial.
    by_source: the trials of the first candidates, by source; none after a source that refused one.
    interrupted: "budget" if the budget cut the search short.
    """

    grouping: Grouping
    chosen: RepairChoice | None = None
    measured: GroupNoise | None = None
    restored: dict[int, float] = field(default_factory=dict)
    costs: GroupCosts | None = None
    frontier: Sequence[Partition] = ()
    tried: Sequence[Candidate] = ()
    candidates: Sequence[Candidate] = ()
    by_source: list[Mapping[str, TrialResult]] = field(default_factory=list)
    interrupted: str = ""

    @property
    def noise(self) -> NDArray[np.float64]:
        """The part that each group adds to the divergence while it is INT8, (groups,)."""
        return self.measured.shares if self.measured is not None else np.zeros(len(self.grouping.groups))

    @property
    def trials(self) -> list[TrialResult]:
        """The outcome of each tried candidate, which is that in its worst source."""
        return [worst_of(trials) for trials in self.by_source]

    @property
    def accepted(self) -> int | None:
        """The index of the candidate that was certified."""
        return next((index for index, trial in enumerate(self.trials) if trial.accepted), None)


class _TimeIsUpError(Exception):
    """The budget is spent. It ends the search, and nobody outside of it sees it."""


@dataclass(eq=False, repr=False)
class PlanSearch:
    """One search. `run` may be interrupted at any point: all measurements are in its journal.

    sources: of recordings as many as there are scenes, or one live camera.
    builder: for the runtime that will serve. embedded: ONNX Runtime, for what-ifs and the reference.
    """

    builder: PlanBuilder
    sources: Sequence[RandomFrames]
    embedded: Backend
    options: PlanOptions
    stage: Stage
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.model = self.builder.model
        # As the model is opened without a plan, its placement is that of the master graph.
        self.rules = read_rules(self.model.spec.precision, self.model.master, self.model.placement)
        self.result = SearchResult(fusion_groups(self.model.master, self.model.placement))
        self._journal: Journal
        self._started = self.clock.monotonic_s()

    @property
    def is_decided(self) -> bool:
        """True if every layer has to be float, so that there is nothing to search."""
        return bool((self._fixed() == FLOAT).all())

    @cached_property
    def split(self) -> Split:
        """The division of the frames.

        Raises AgentError (`plan.frames`) if a source has too few for any certificate, CameraError as the source does.
        """
        options, sources = self.options, self.sources
        most = max(_FEWEST, math.ceil(SEARCH_FRAMES / len(sources)))
        shares = []
        for frames in sources:
            count = frames.count
            search = most if count is None else min(most, max(_FEWEST, count // 4))
            shares.append(Share(frames.source.shown, search, None if count is None else count - search))
        left = min((share.certificate for share in shares if share.certificate is not None), default=None)
        terms = [Terms(options.max_loss, options.max_confusion, n, len(sources)) for n in range(MAX_CANDIDATES, 0, -1)]
        chosen = next((each for each in terms if left is None or each.frames_needed <= left), terms[-1])
        for frames, share in zip(sources, shares, strict=True):
            check_frames(frames, share.search, chosen)
        return Split(shares, chosen)

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
        return budget_s is not None and self.clock.monotonic_s() - self._started >= share * budget_s

    def _time_for_costs(self) -> HasTime:
        """Return a clock for measuring costs: half of the budget that is left. The rest is for the trials."""
        budget_s, now = self.options.budget_s, self.clock.monotonic_s()
        until = math.inf if budget_s is None else 0.5 * (now + self._started + budget_s)
        return lambda seconds: self.clock.monotonic_s() + seconds < until

    def plan_of(self, int8: NDArray[np.bool_], reasons: Mapping[str, str] | str) -> dict[str, str]:
        """Return the layers that stay float if these groups are INT8, each with its reason.

        The reasons of the owner's rules and of missing kernels go before `reasons`.
        """
        return {**self.rules.apply(self.result.grouping.plan(int8.tolist(), reasons)), **self.builder.without_int8}

    def _choose_repairs(self) -> None:
        proposing, trying = split_for_repairs(self._drawn)
        with self.stage("repairs") as progress:
            what_if = WhatIf(self.model, self.builder.calibration, trying, self.embedded)
            remember, show = self._journal.get_or_compute, self._with_deadline(progress)
            self.result.chosen = choose_repairs(what_if, proposing, remember, show)
        self.builder.repairs = self.result.chosen.repairs
        observed = observed_graph(self.model.master, self.builder.plan({}))
        self.result.grouping = fusion_groups(observed, place(observed))

    def _measure_sensitivities(self) -> None:
        """Measure which groups make the noise: blocks of groups are INT8 alone, and the loud blocks are split."""
        result, fixed = self.result, self._fixed()
        assert result.chosen is not None
        nsr = result.chosen.nsr
        predicted = np.array([sum(nsr.get(layer, 0.0) for layer in group.layers) for group in result.grouping.groups])

        def diverge(int8: NDArray[np.bool_]) -> float | None:
            if self.out_of_time(_SENSITIVITY_SHARE):
                result.interrupted = "budget"
                return None
            return self._evaluate(int8, FRAMES_PER_RUN).divergence

        with self.stage("sensitivities") as progress:
            result.measured = measure_noise(fixed, predicted, diverge, lambda done, doing: progress(0.8 * done, doing))
            int8 = fixed != FLOAT  # the others are float in every plan
            all_int8 = diverge(int8)
            loudest = sorted(np.flatnonzero(int8).tolist(), key=lambda group: -result.noise[group])[:_RESTORED]
            for number, group in enumerate(loudest, start=1):
                others = diverge(int8 & (np.arange(len(int8)) != group))
                if all_int8 is not None and others is not None:
                    result.restored[group] = all_int8 - others
                progress(0.8 + 0.2 * number / len(loudest), "leaving the loudest groups float")

    def _measure_costs(self) -> None:
        with self.stage("costs") as progress:
            self.result.costs = find_costs(
                self.result.grouping,
                self.rules.floats,
                self.builder,
                self._drawn[0][0][1],
                self._journal.get_or_compute,
                self._with_deadline(progress),
                self.options.costs,
                self._time_for_costs(),
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
            plans, most = rungs(result.frontier, costs.tolerance), self.split.terms.candidates
            chosen, result.tried = choose_candidates(plans, evaluate, self.options.max_loss, most, fastest)
        # Once a candidate was measured, the error is split over these: whatever a resumed search chooses, no others.
        kept = cast("list[dict[str, Any]] | None", self._journal.get(_CANDIDATES))
        result.candidates = chosen if kept is None else [Candidate.from_dict(row) for row in kept]

    def _certify(self) -> None:
        candidates, costs = self.result.candidates, self.result.costs
        if not candidates or costs is None:
            return
        terms = replace(self.split.terms, candidates=len(candidates))
        with (
            self.stage("certificate") as progress,
            closing(self.embedded.load(self.model.master.SerializeToString())) as reference,
            closing(self.builder.load_float(self._with_deadline(progress))) as float_engine,
        ):
            certifiers = [
                Certifier(
                    self.model.spec, terms, frames, share.search, reference, float_engine, self._journal,
                    progress, self.out_of_time, self.clock,
                )
                for frames, share in zip(self.sources, self.split.shares, strict=True)
            ]  # fmt: skip
            self._journal.get_or_compute(_CANDIDATES, lambda: [candidate.as_dict() for candidate in candidates])
            for number, candidate in enumerate(candidates, start=1):
                floats = self.plan_of(candidate.partition.int8, _LEFT_FLOAT)
                plan = fingerprint(self.builder.plan(floats).essence)
                with closing(self.builder.load(floats, self._with_deadline(progress))) as engine:
                    self.result.by_source.append(self._try_candidate(certifiers, f"candidate {number}", plan, engine))
                if self.result.accepted is not None:
                    return
                self._check_time()

    def _try_candidate(
        self, certifiers: Sequence[Certifier], name: str, plan: str, engine: Engine
    ) -> dict[str, TrialResult]:
        """Try a candidate in one source after the other, until one refuses it; return the trials by source."""
        assert self.result.costs is not None
        trials: dict[str, TrialResult] = {}
        for number, (certifier, share) in enumerate(zip(certifiers, self.split.shares, strict=True)):
            shown = f"{name} in {share.source}" if len(certifiers) > 1 else name
            trial = certifier.try_candidate(shown, f"{plan} {number}" if number else plan, engine)
            trials[share.source] = trial
            if not trial.accepted:
                return trials
        # INT8 can be faster on this machine where its times were measured; then a candidate has to be.
        outcome = worst_of(trials)
        if not self.result.costs.why and not outcome.is_faster:
            times = f"{outcome.latency_ms:.3g} ms, which is not faster than {outcome.latency_float_ms:.3g} ms"
            return {
                source: replace(trial, accepted=False, reason=f"{times} in float; {trial.reason}")
                for source, trial in trials.items()
            }
        return trials

    def _evaluate(self, int8: NDArray[np.bool_], frames: int | None = None) -> WhatIfResult:
        """Answer the first `frames` search frames, or all, with these groups in INT8.

        The loss is that in the worst source, the divergence the mean over sources in which something is seen.
        """
        plan = self.builder.plan(self.plan_of(int8, _LEFT_FLOAT))
        of_each = None if frames is None else math.ceil(frames / len(self.sources))

        def evaluated() -> dict[str, Any]:
            answers = [what_if.evaluate(plan, of_each) for what_if in self._what_ifs]
            divergences = [one.divergence for one in answers if one.telling] or [one.divergence for one in answers]
            telling = sum(one.telling for one in answers)
            return asdict(WhatIfResult(fmean(divergences), max(one.loss for one in answers), telling))

        key = f"ask {frames} {fingerprint(plan.essence)}"
        return WhatIfResult(**self._journal.get_or_compute(key, evaluated))

    @cached_property
    def _drawn(self) -> list[list[tuple[int, Array]]]:
        """Per source its search frames in random order, each with its index."""
        with closing(self.embedded.load(self.model.master.SerializeToString())) as engine:
            task = VisionTask(self.model.spec, engine.inputs, engine.outputs)
        drawn = []
        for frames, share in zip(self.sources, self.split.shares, strict=True):
            with closing(frames.draw()) as draws:
                drawn.append(
                    [(index, task.preprocess(image)[0].copy()) for index, image in islice(draws, share.search)]
                )
        return drawn

    @cached_property
    def _what_ifs(self) -> list[WhatIf]:
        """One per source."""
        calibration = self.builder.calibration
        scenes = [[frame for _, frame in frames] for frames in self._drawn]
        return [WhatIf(self.model, calibration, frames, self.embedded) for frames in scenes]

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
