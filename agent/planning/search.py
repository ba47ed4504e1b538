"""From measured groups to a few candidates: plans along the frontier of time and noise, tried on the search frames."""

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
from agent.planning.what_if import Chosen, WhatIf, WhatIfResult, choose_repairs
from agent.vision.task import VisionTask
from calibrate.partition import FLOAT, Partition, frontier
from calibrate.sensitivity import Block, measure_blocks, share_out
from engines.interface import Array, Backend, Progress
from engines.quantise.apply_plan import observed_graph
from engines.quantise.fusion import Grouping, fusion_groups
from engines.quantise.placement import place
from engines.store.artefact import fingerprint

_HARDLY = 0.25  # of the accepted loss
_STEPS = 10  # of half the noise each


@dataclass(frozen=True)
class Candidate:
    """A plan worth building: which groups are INT8, and what it did on the search frames."""

    partition: Partition
    answer: WhatIfResult

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        plan = self.partition
        return {"int8": plan.int8.tolist(), "time": plan.time, "noise": plan.noise, "answer": asdict(self.answer)}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Candidate:
        """What `as_dict` gave."""
        return cls(Partition(np.array(row["int8"], np.bool_), row["time"], row["noise"]), WhatIfResult(**row["answer"]))


def ladder(frontier: Sequence[Partition], tolerance: float) -> list[Partition]:
    """Plans of ever less noise, fastest first: at each step the quietest of those that are as fast as any.

    frontier: fastest first, quietest last. tolerance: relative difference in time below which plans are as fast.
    """
    rungs: list[Partition] = []
    plans = [plan for plan in frontier if plan.int8.any()]
    while plans and len(rungs) < _STEPS:
        as_fast = (1.0 + tolerance) * plans[0].time
        rungs.append(min((plan for plan in plans if plan.time <= as_fast), key=lambda plan: plan.noise))
        plans = [plan for plan in plans if 2.0 * plan.noise <= rungs[-1].noise and plan.noise < rungs[-1].noise]
    return rungs


def choose_candidates(
    plans: Sequence[Partition],
    ask: Callable[[NDArray[np.bool_]], WhatIfResult],
    max_loss: float,
    most: int,
    fastest: Partition | None = None,
) -> tuple[list[Candidate], list[Candidate]]:
    """Try plans on the search frames, fastest first; those to be certified, at most `most`, and all that were tried.

    A plan that loses more than max_loss there already is left out. Where the frames show nothing, none is. fastest: the
    plan whose time others come near; it goes before them where it is so quiet that there is hardly a loss to win back.
    """
    tried: list[Candidate] = []
    promising: list[Candidate] = []
    first = [] if fastest is None or any(plan is fastest for plan in plans) else [fastest]
    for plan in (*first, *plans):
        if len(promising) == most:
            break
        candidate = Candidate(plan, ask(plan.int8))
        tried.append(candidate)
        if candidate.answer.loss <= (_HARDLY * max_loss if plan is fastest and first else max_loss):
            promising.append(candidate)
    return promising, tried


@dataclass(frozen=True)
class PlanOptions:
    """max_loss, max_confusion: see `agent.planning.certificate.Terms`. budget_s: None for as long as it takes.

    costs: "measured", or "macs" to go by multiply-accumulates without measuring. seed: of the order of the frames.
    """

    max_loss: float = 0.02
    max_confusion: float = 0.1
    budget_s: float | None = None
    costs: str = "measured"
    seed: int = 0


@dataclass
class SearchResult:
    """What a search has found so far; what it had no time for is not there.

    predicted: per group the noise to signal of its layers, in the sum. restored: by group, what it takes off the
    divergence to have this one float and all others INT8. tried: plans on the search frames; those of them worth a
    trial are `candidates`. trials: of the first candidates, in their order. interrupted: "budget" where that cut the
    search short.
    """

    grouping: Grouping
    chosen: Chosen | None = None
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


SEARCH_FRAMES = 24  # at most a quarter of the source, and no fewer than 8
_FEWEST = 8


@dataclass(frozen=True)
class Split:
    """search: the frames at the beginning of the random order. certificate: those left; None for a live camera.

    terms: with as many candidates as the frames allow, since each takes its share of the error.
    """

    search: int
    certificate: int | None
    terms: Terms

    @property
    def told(self) -> str:
        """What the certificate is going to need, in a line for people."""
        certificate = "" if self.certificate is None else f"{self.certificate} "
        return (
            f"{self.search} frames to search with, {certificate}others to certify on: a plan that loses nothing is "
            f"certified after {self.terms.needed} with something on them, or a few less, for a loss of at most "
            f"{self.terms.max_loss:g} with {100.0 * (1.0 - ERROR):g} % confidence; one that loses something takes more"
        )


def split_frames(frames: RandomFrames, options: PlanOptions) -> Split:
    """Raises AgentError (`plan.frames`) where there are too few for any certificate, CameraError as the source does."""
    count = frames.count
    search = SEARCH_FRAMES if count is None else min(SEARCH_FRAMES, max(_FEWEST, count // 4))
    left = None if count is None else count - search
    terms = [Terms(options.max_loss, options.max_confusion, n) for n in range(MAX_CANDIDATES, 0, -1)]
    chosen = next((each for each in terms if left is None or each.needed <= left), terms[-1])
    check_frames(frames, search, chosen)
    return Split(search, left, chosen)


Stage = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of a stage by its name

_FRAMES_PER_RUN = 8  # of the search frames, for one block of groups
_RUNS = 48  # of the network, to find out which groups make the noise
_RESTORED = 8  # of the most sensitive groups are also looked at the other way round
_SEARCHED = "left float by the search"
_CANDIDATES = "candidates"  # in the journal
_SENSED = 0.5  # of the budget: what is not measured until then is predicted, so that something can be certified


class _TimeIsUpError(Exception):
    """The budget is spent. It ends the search, and nobody outside of it sees it."""


class PlanSearch:
    """One search. `run` may be interrupted at any point: what was measured is in its journal."""

    def __init__(
        self,
        builder: PlanBuilder,
        rules: Rules,
        frames: RandomFrames,
        embedded: Backend,
        options: PlanOptions,
        stage: Stage,
    ) -> None:
        """builder: for the runtime that will serve. embedded: ONNX Runtime, which answers what-ifs, the reference."""
        self.model = builder.model
        self.builder = builder
        self.rules = rules
        self.options = options
        self.found = SearchResult(fusion_groups(self.model.master, self.model.placement))
        self._frames = frames
        self._embedded = embedded
        self._journal: Journal
        self._stage = stage
        self._started = time.monotonic()

    @property
    def is_decided(self) -> bool:
        """Whether every layer has to be float."""
        return bool((self._fixed() == FLOAT).all())

    @cached_property
    def split(self) -> Split:
        """Whom the frames belong to. Raises as `split_frames`."""
        return split_frames(self._frames, self.options)

    def run(self, journal: Journal) -> SearchResult:
        """Search, and certify. What the budget leaves no time for is not in what is found."""
        self._journal = journal
        if self.is_decided:
            return self.found
        try:
            for step in (self._repair, self._sense, self._cost, self._choose, self._certify):
                self._check_time()
                step()
        except _TimeIsUpError:
            self.found.interrupted = "budget"
        return self.found

    def out_of_time(self, share: float = 1.0) -> bool:
        """Whether this share of the budget is spent."""
        budget_s = self.options.budget_s
        return budget_s is not None and time.monotonic() - self._started >= share * budget_s

    def plan_of(self, int8: NDArray[np.bool_], reasons: Mapping[str, str] | str) -> dict[str, str]:
        """The layers that stay float where these groups are INT8, with the rules' and kernels' reasons or these."""
        return {**self.rules.applied(self.found.grouping.plan(int8.tolist(), reasons)), **self.builder.without_int8}

    def _check_time(self) -> None:
        if self.out_of_time():
            raise _TimeIsUpError

    def _limited(self, progress: Progress) -> Progress:
        """Ends what shows it when the time is up."""

        def show(fraction: float, doing: str) -> None:
            self._check_time()
            progress(fraction, doing)

        return show

    def _fixed(self) -> NDArray[np.int8]:
        """Per group FREE, or what it is by rule, kernel or nature."""
        return labels(self.found.grouping, {**self.rules.floats, **self.builder.without_int8}, self.rules.int8)

    @cached_property
    def _search_frames(self) -> list[Array]:
        with closing(self._embedded.load(self.model.master.SerializeToString())) as engine:
            task = VisionTask(self.model.spec, engine.inputs, engine.outputs)
        with closing(self._frames.draw()) as draws:
            return [task.preprocess(image)[0].copy() for _, image in islice(draws, self.split.search)]

    @cached_property
    def _what_if(self) -> WhatIf:
        return WhatIf(self.model, self.builder.calibration, self._search_frames, self._embedded)

    def _repair(self) -> None:
        with self._stage("repairs") as progress:
            self.found.chosen = choose_repairs(
                self.model,
                self.builder.calibration,
                self._search_frames,
                self._what_if,
                self._embedded,
                self._journal,
                self._limited(progress),
            )
        self.builder.repairs = self.found.chosen.repairs
        observed = observed_graph(self.model.master, self.builder.plan({}))
        self.found.grouping = fusion_groups(observed, place(observed))

    def _sense(self) -> None:
        """Which groups make the noise."""
        groups, chosen = self.found.grouping.groups, self.found.chosen
        assert chosen is not None
        loud = np.flatnonzero(self._fixed() != FLOAT)  # the others are float in every plan
        predicted = np.zeros(len(groups))
        predicted[loud] = [sum(chosen.nsr.get(layer, 0.0) for layer in groups[index].layers) for index in loud]
        self.found.predicted = predicted
        with self._stage("sensitivities") as progress:
            show = self._limited(progress)
            asked = 0

            def measure(members: Sequence[int]) -> float | None:
                nonlocal asked
                if self.out_of_time(_SENSED):
                    self.found.interrupted = "budget"
                    return None
                asked += 1
                show(min(1.0, asked / (_RUNS + _RESTORED)), "finding the groups that make the noise")
                int8 = np.zeros(len(groups), np.bool_)
                int8[loud[list(members)]] = True
                return self._ask(int8, _FRAMES_PER_RUN).divergence

            blocks = measure_blocks(predicted[loud], measure, _RUNS)
            self.found.blocks = [Block(tuple(loud[list(each.members)].tolist()), each.divergence) for each in blocks]
            everything = measure(range(len(loud)))
            for turned in np.argsort(-self.found.noise[loud])[:_RESTORED].tolist():
                others = measure([each for each in range(len(loud)) if each != turned])
                if everything is not None and others is not None:
                    self.found.restored[int(loud[turned])] = everything - others

    def _ask(self, int8: NDArray[np.bool_], frames: int | None = None) -> WhatIfResult:
        """What the network answers when these groups are INT8."""
        plan = self.builder.plan(self.plan_of(int8, _SEARCHED))
        key = f"ask {frames} {fingerprint(plan.essence)}"
        return WhatIfResult(**self._journal.remember(key, lambda: asdict(self._what_if.ask(plan, frames))))

    def _cost(self) -> None:
        with self._stage("costs") as progress:
            self.found.costs = find_costs(
                self.found.grouping,
                self.rules.floats,
                self.builder,
                self._search_frames[0],
                self._journal,
                self._limited(progress),
                self.options.costs,
            )

    def _choose(self) -> None:
        costs = self.found.costs
        assert costs is not None
        problem = as_problem(self.found.grouping, costs.costs, self.found.noise, self._fixed())
        self.found.frontier = frontier(problem)
        plans = ladder(self.found.frontier, costs.tolerance)
        with self._stage("candidates") as progress:
            show = self._limited(progress)

            def ask(int8: NDArray[np.bool_]) -> WhatIfResult:
                show(0.5, "trying plans on the search frames")
                return self._ask(int8)

            fastest = next((plan for plan in self.found.frontier if plan.int8.any()), None)
            found = choose_candidates(plans, ask, self.options.max_loss, self.split.terms.candidates, fastest)
            chosen, self.found.tried = found
        # Once one was measured, the error is split over these: whatever else a resumed search chooses, no others.
        kept = cast("list[dict[str, Any]] | None", self._journal.get(_CANDIDATES))
        self.found.candidates = chosen if kept is None else [Candidate.from_dict(row) for row in kept]

    def _certify(self) -> None:
        if not self.found.candidates:
            return
        terms = Terms(self.options.max_loss, self.options.max_confusion, len(self.found.candidates))
        with (
            self._stage("certificate") as progress,
            closing(self._embedded.load(self.model.master.SerializeToString())) as reference,
            closing(self.builder.load_float(self._limited(progress))) as float_engine,
        ):
            certifier = Certifier(
                self.model.spec, terms, self._frames, self.split.search, reference, float_engine, self._journal,
                progress, self.out_of_time,
            )  # fmt: skip
            self._journal.remember(_CANDIDATES, lambda: [candidate.as_dict() for candidate in self.found.candidates])
            for number, candidate in enumerate(self.found.candidates, start=1):
                floats = self.plan_of(candidate.partition.int8, _SEARCHED)
                with closing(self.builder.load(floats, self._limited(progress))) as engine:
                    plan = fingerprint(self.builder.plan(floats).essence)
                    trial = certifier.trial(f"candidate {number}", plan, engine)
                    self.found.trials.append(self._worth_it(trial))
                if self.found.accepted is not None:
                    return
                self._check_time()

    def _worth_it(self, trial: TrialResult) -> TrialResult:
        """The trial; refused where INT8 was found to be faster here, and this candidate is not."""
        assert self.found.costs is not None
        if not trial.accepted or self.found.costs.why or trial.is_faster:
            return trial
        slow = f"{trial.latency_ms:.3g} ms, which is not faster than {trial.latency_float_ms:.3g} ms in float"
        return replace(trial, accepted=False, reason=f"{slow}; {trial.reason}")
