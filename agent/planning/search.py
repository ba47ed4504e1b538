"""The search for a precision plan: one number in, the loss that is accepted; out comes the fastest plan that keeps it.

    frames -> repairs -> what each group adds -> what each group costs -> frontier -> candidates -> certificate

All but the last stage look at the search frames only. The certificate is measured on others, drawn at random.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import asdict
from functools import cached_property
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from agent.model import Model
from agent.planning.candidates import choose_candidates, ladder
from agent.planning.certificate import Certifier, check_frames
from agent.planning.costs import Builder, as_problem, find_costs, labels
from agent.planning.found import Found, PlanOptions
from agent.planning.held_out import RandomFrames
from agent.planning.journal import Journal
from agent.planning.repairs import choose_repairs
from agent.planning.trial import MAX_CANDIDATES, Terms
from agent.planning.what_if import Answer, WhatIf
from agent.precision import Rules
from agent.vision import VisionTask
from calibrate.partition import frontier
from calibrate.sensitivity import measure_blocks
from engines.backend import Backend, Progress
from engines.calibration import Calibration
from engines.fusion import fusion_groups
from engines.placement import place
from engines.planned import observed_graph
from engines.store import fingerprint

Stage = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of a stage by its name

SEARCH_FRAMES = 24  # at most a quarter of the source, and no fewer than 8
_FRAMES_PER_RUN = 12  # of them, for one block of groups
_RUNS = 64  # of the network, to find out which groups make the noise
_RESTORED = 8  # of the most sensitive groups are also looked at the other way round


class Planner:
    """One search. `run` may be interrupted at any point: what was measured is in the journal."""

    def __init__(
        self,
        model: Model,
        rules: Rules,
        calibration: Calibration,
        frames: RandomFrames,
        backend: Backend,
        embedded: Backend,
        options: PlanOptions,
        journal: Journal,
        stage: Stage,
    ) -> None:
        """embedded: ONNX Runtime, which answers what-ifs and is the reference. backend: the runtime that will serve."""
        self.model = model
        self.rules = rules
        self.options = options
        self.found = Found()
        self._calibration = calibration
        self._frames = frames
        self._backend = backend
        self._embedded = embedded
        self._journal = journal
        self._stage = stage
        self._started = time.monotonic()

    def run(self) -> Found:
        """Search, and certify. Raises AgentError (`plan.frames`) before anything else where frames are too few."""
        terms = self._terms()
        grouping = fusion_groups(self.model.master, self.model.placement)
        if not self.out_of_time() and any(label != 0 for label in labels(grouping, self.rules.floats, self.rules.int8)):
            for step in (self._repair, self._sense, self._cost, self._choose):
                step()
                if self.out_of_time():
                    self.found.interrupted = "budget"
                    break
            if self.found.candidates and not self.found.interrupted:
                self._certify(terms)
        elif self.out_of_time():
            self.found.interrupted = "budget"
        self.found.grouping = self.found.grouping or grouping
        return self.found

    def out_of_time(self) -> bool:
        """Whether the budget is spent."""
        budget_s = self.options.budget_s
        return budget_s is not None and time.monotonic() - self._started >= budget_s

    def search_count(self) -> int:
        """How many frames the search looks at; the others are left to the certificate."""
        count = self._frames.count
        return SEARCH_FRAMES if count is None else min(SEARCH_FRAMES, max(8, count // 4))

    def plan_of(self, int8: NDArray[np.bool_], why: str = "by the search") -> dict[str, str]:
        """The layers that stay float where these groups are INT8, with the rules' reasons or this one."""
        assert self.found.grouping is not None
        return {**self.found.grouping.plan(int8.tolist(), why), **self.rules.floats, **self.builder.without_int8}

    @property
    def builds(self) -> int:
        """Engines built by this run."""
        return self.builder.builds if self.found.chosen is not None else 0

    @property
    def without_int8(self) -> Mapping[str, str]:
        """Layers that have turned out to have no INT8 kernel."""
        return self.builder.without_int8 if self.found.chosen is not None else {}

    @cached_property
    def builder(self) -> Builder:
        assert self.found.chosen is not None
        return Builder(self.model, self._calibration, self._backend, self.found.chosen.repairs)

    @cached_property
    def _search_frames(self) -> list[NDArray[np.float32]]:
        with closing(self._embedded.load(self.model.master.SerializeToString())) as engine:
            task = VisionTask(self.model.spec, engine.inputs, engine.outputs)
        with closing(self._frames.draw()) as draws:
            return [task.preprocess(image)[0].copy() for _, image in islice(draws, self.search_count())]

    @cached_property
    def _what_if(self) -> WhatIf:
        return WhatIf(self.model, self._calibration, self._search_frames, self._embedded)

    def _terms(self) -> Terms:
        """With as many candidates as the frames allow: each takes its share of the error."""
        terms = [Terms(self.options.max_loss, self.options.max_confusion, n) for n in range(MAX_CANDIDATES, 0, -1)]
        count = self._frames.count
        enough = (each for each in terms if count is None or each.needed <= count - self.search_count())
        found = next(enough, terms[-1])
        check_frames(self._frames, self.search_count(), found)
        return found

    def _repair(self) -> None:
        with self._stage("repairs") as progress:
            self.found.chosen = choose_repairs(
                self.model,
                self._calibration,
                self._search_frames,
                self._what_if,
                self._embedded,
                self._journal,
                progress,
            )
        observed = observed_graph(self.model.master, self.builder.plan({}))
        self.found.grouping = fusion_groups(observed, place(observed))

    def _sense(self) -> None:
        """Which groups make the noise."""
        grouping, chosen = self.found.grouping, self.found.chosen
        assert grouping is not None
        assert chosen is not None
        fixed = labels(grouping, self.rules.floats, self.rules.int8)
        layers = [group.layers if label != 0 else () for group, label in zip(grouping.groups, fixed, strict=True)]
        self.found.predicted = np.array([sum(chosen.nsr.get(layer, 0.0) for layer in each) for each in layers])
        with self._stage("sensitivities") as progress:
            asked = 0

            def measure(members: Sequence[int]) -> float | None:
                nonlocal asked
                if self.out_of_time():
                    return None
                asked += 1
                progress(min(1.0, asked / (_RUNS + _RESTORED)), "finding the groups that make the noise")
                int8 = np.zeros(len(grouping.groups), np.bool_)
                int8[list(members)] = True
                return self._ask(int8 & (fixed != 0), _FRAMES_PER_RUN).divergence

            self.found.blocks = measure_blocks(self.found.predicted, measure, _RUNS)
            everything = measure(range(len(grouping.groups)))
            for index in np.argsort(-self.found.noise)[:_RESTORED].tolist():
                others = measure([i for i in range(len(grouping.groups)) if i != index])
                if everything is not None and others is not None:
                    self.found.restored = {**self.found.restored, index: everything - others}

    def _ask(self, int8: NDArray[np.bool_], frames: int | None = None) -> Answer:
        """What the network answers when these groups are INT8."""
        floats = self.plan_of(int8)
        key = f"ask {frames} {''.join('1' if label else '0' for label in int8)}"
        answer = self._journal.remember(key, lambda: asdict(self._what_if.ask(self.builder.plan(floats), frames)))
        return Answer(**answer)

    def _cost(self) -> None:
        assert self.found.grouping is not None
        with self._stage("costs") as progress:
            batch = self._search_frames[0]
            self.found.costs = find_costs(
                self.found.grouping, self.rules.floats, self.builder, batch, self._journal, progress, self.options.costs
            )

    def _choose(self) -> None:
        grouping, costs = self.found.grouping, self.found.costs
        assert grouping is not None
        assert costs is not None
        fixed = labels(grouping, {**self.rules.floats, **self.builder.without_int8}, self.rules.int8)
        self.found.frontier = frontier(as_problem(grouping, costs.costs, self.found.noise, fixed))
        plans = ladder(self.found.frontier, costs.tolerance)
        terms = self._terms()
        with self._stage("candidates") as progress:

            def ask(int8: NDArray[np.bool_]) -> Answer:
                progress(0.5, "trying plans on the search frames")
                return self._ask(int8)

            found = choose_candidates(plans, ask, self.options.max_loss, terms.candidates, self.out_of_time)
            self.found.candidates, self.found.tried = found

    def _certify(self, terms: Terms) -> None:
        terms = Terms(terms.max_loss, terms.max_confusion, len(self.found.candidates))
        with (
            self._stage("certificate") as progress,
            closing(self._embedded.load(self.model.master.SerializeToString())) as reference,
            closing(self.builder.load_float()) as float_engine,
        ):
            certifier = Certifier(
                self.model.spec, terms, self._frames, self.search_count(), reference, float_engine, self._journal,
                progress, self.out_of_time,
            )  # fmt: skip
            for number, candidate in enumerate(self.found.candidates):
                floats = self.plan_of(candidate.partition.int8)
                name = f"candidate {number + 1}"
                with closing(self.builder.load(floats)) as engine:
                    told = f"{name} {fingerprint(self.builder.plan(floats).essence)}"
                    self.found.trials.append(certifier.trial(told, engine))
                if self.found.trials[-1].accepted or self.out_of_time():
                    break
        if self.found.accepted is None and self.out_of_time():
            self.found.interrupted = "budget"
