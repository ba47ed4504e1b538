"""The search for a precision plan: one number in, the loss that is accepted; out comes the fastest plan that keeps it.

    frames -> repairs -> what each group adds -> what each group costs -> frontier -> candidates -> certificate

All but the last stage look at the search frames only. The certificate is measured on others, drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict, replace
from functools import cached_property
from itertools import islice
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from agent.journal import Journal
from agent.planning.candidates import Candidate, choose_candidates, ladder
from agent.planning.certificate import Certifier
from agent.planning.costs import Builder, as_problem, find_costs, labels
from agent.planning.found import Found, PlanOptions
from agent.planning.held_out import RandomFrames
from agent.planning.repairs import choose_repairs
from agent.planning.split import Split, split_frames
from agent.planning.trial import Terms, Trial
from agent.planning.what_if import Answer, WhatIf
from agent.precision import Rules
from agent.vision import VisionTask
from calibrate.cut import FLOAT
from calibrate.partition import frontier
from calibrate.sensitivity import Block, measure_blocks
from engines.artefact import fingerprint
from engines.backend import Array, Backend, Progress
from engines.fusion import fusion_groups
from engines.placement import place
from engines.planned import observed_graph

Stage = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of a stage by its name

_FRAMES_PER_RUN = 8  # of the search frames, for one block of groups
_RUNS = 48  # of the network, to find out which groups make the noise
_RESTORED = 8  # of the most sensitive groups are also looked at the other way round
_SEARCHED = "left float by the search"
_CANDIDATES = "candidates"  # in the journal
_SENSED = 0.5  # of the budget: what is not measured until then is predicted, so that something can be certified


class _TimeIsUpError(Exception):
    """The budget is spent. It ends the search, and nobody outside of it sees it."""


class Planner:
    """One search. `run` may be interrupted at any point: what was measured is in its journal."""

    def __init__(
        self,
        builder: Builder,
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
        self.found = Found(fusion_groups(self.model.master, self.model.placement))
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

    def run(self, journal: Journal) -> Found:
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

    def _ask(self, int8: NDArray[np.bool_], frames: int | None = None) -> Answer:
        """What the network answers when these groups are INT8."""
        plan = self.builder.plan(self.plan_of(int8, _SEARCHED))
        key = f"ask {frames} {fingerprint(plan.essence)}"
        return Answer(**self._journal.remember(key, lambda: asdict(self._what_if.ask(plan, frames))))

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

            def ask(int8: NDArray[np.bool_]) -> Answer:
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

    def _worth_it(self, trial: Trial) -> Trial:
        """The trial; refused where INT8 was found to be faster here, and this candidate is not."""
        assert self.found.costs is not None
        if not trial.accepted or self.found.costs.why or trial.is_faster:
            return trial
        slow = f"{trial.latency_ms:.3g} ms, which is not faster than {trial.latency_float_ms:.3g} ms in float"
        return replace(trial, accepted=False, reason=f"{slow}; {trial.reason}")
