"""Find the fastest plan that keeps the loss on frames from files, and certify it: the work of `tared plan`.

The ladder of a job finds the plans: some frames propose repairs, others try plans. All plans that are worth an engine
are known before one is built. They are certified on frames that the search has not used, the fastest first. Each
measurement is kept in a journal: an interrupted search resumes there. Where frames of several sources are given, a plan
has to keep its loss in the worst of them, on the search frames and under the certificate.

    search = PlanSearch(builder, sources, embedded, PlanOptions(max_loss=0.02), stage)
    search.run(journal)            # in the caller's thread; builds engines
    plan = search.plan()

The module holds, in the order of use: the options, the split of the frames, the search, and the plan that it leads to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise, zip_longest
from typing import Any

import numpy as np

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.state_files import Journal
from agent.planning.certificate import ERROR, Certifier, Terms, check_frames
from agent.planning.costs import GroupCosts, PlanBuilder, find_costs
from agent.planning.evidence import COMMAND, Tried, retraining
from agent.planning.frames import RandomFrames
from agent.planning.ladder import Ladder, LadderOptions, Scene
from agent.vision.task import VisionTask
from calibrate.plan import PrecisionPlan, Repairs
from engines.interface import Array, Backend, Progress
from engines.quantise.costs import HasTime
from engines.quantise.fusion import Grouping, int8_macs_share
from engines.quantise.placement import place
from engines.store.artefact import fingerprint

SEARCH_FRAMES = 32  # from all sources together; from each at most a quarter, and at least 8
_FEWEST = 8
_STRETCHES = 4  # parts into which a source is cut by time; every other one proposes repairs, the others try plans
_SEARCH_SHARE = 0.7  # share of the budget; beyond it is predicted, so that something is certified
_NOT_CERTIFIED = "no plan with INT8 in it was certified"

Stage = Callable[[str], AbstractContextManager[Progress]]  # shows the progress of a stage by its name


@dataclass(frozen=True)
class PlanOptions:
    """The options of one search.

    max_loss, max_confusion: as in `agent.planning.certificate.Terms`. budget_s: infinite for as long as it takes.
    costs: "measured", or "macs" to go by multiply-accumulates without measuring. seed: of the order of the frames.
    """

    max_loss: float = 0.02
    max_confusion: float = 0.1
    budget_s: float = math.inf
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

    @property
    def description(self) -> str:
        certificate = "" if self.certificate is None else f"{self.certificate} "
        return f"{self.search} frames to search with, {certificate}others to certify on in {self.source}"


def split_by_time(drawn: Sequence[tuple[int, Array]]) -> tuple[list[Array], list[Array]]:
    """Return frames that propose repairs, and others that try plans, of other stretches of time.

    A repair that suits just the moment which proposed it is not kept. drawn: frames with their index, the order in
    time.
    """
    by_time = [frame for _, frame in sorted(drawn, key=lambda one: one[0])]
    ends = [round(len(by_time) * part / _STRETCHES) for part in range(_STRETCHES + 1)]
    stretches = [by_time[start:end] for start, end in pairwise(ends)]
    return _in_turn(stretches[::2]), _in_turn(stretches[1::2])


def _in_turn(stretches: Sequence[Sequence[Array]]) -> list[Array]:
    """Return one frame of each stretch, then the next of each: the first few show all of them."""
    return [frame for frames in zip_longest(*stretches) for frame in frames if frame is not None]


class _TimeIsUpError(Exception):
    """The budget is spent. It ends the search, and nobody outside of it sees it."""


@dataclass(eq=False, repr=False)
class PlanSearch:
    """One search. `run` may be interrupted at any point: all measurements are in its journal.

    Args:
        builder: For the runtime that will serve.
        sources: Recordings, as many as there are scenes, or one live camera.
        embedded: ONNX Runtime, on which plans are tried, and for the reference.

    Attributes:
        ladder: Of the plans; None where every layer has to be float.
        accepted: The plan that was certified.
        interrupted: "budget" if the budget cut the search short.
    """

    builder: PlanBuilder
    sources: Sequence[RandomFrames]
    embedded: Backend
    options: PlanOptions
    stage: Stage
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.model = self.builder.model
        self.terms = Terms(self.options.max_loss, self.options.max_confusion, len(self.sources))
        self.accepted: Tried | None = None
        self.interrupted = ""
        self._journal: Journal
        self._progress: Progress = lambda _, __: None
        self._started = self.clock.monotonic_s()
        self._is_complete = False  # all plans that are worth an engine are known
        scene = Scene(self.builder.calibration, (), ())
        limits = LadderOptions(self.options.max_loss, _SEARCH_SHARE * self.options.budget_s)
        self.ladder = Ladder(
            self.model, self.model.plan, scene, self.builder.without_int8, self.embedded, limits, self._show,
            self._find_costs, lambda key, measure: self._journal.get_or_compute(key, measure), self.clock,
        )  # fmt: skip

    @property
    def is_decided(self) -> bool:
        """True if every layer has to be float, so that there is nothing to search."""
        return self.ladder.is_decided

    @cached_property
    def shares(self) -> list[Share]:
        """The division of every source's frames.

        Raises AgentError (`plan.frames`) if a source has too few for any certificate, CameraError as the source does.
        """
        most, shares = max(_FEWEST, math.ceil(SEARCH_FRAMES / len(self.sources))), list[Share]()
        for frames in self.sources:
            count = frames.count
            search = most if count is None else min(most, max(_FEWEST, count // 4))
            shares.append(Share(frames.source.shown, search, None if count is None else count - search))
            check_frames(frames, search, self.terms)
        return shares

    @property
    def description(self) -> str:
        """A line for people on what the certificate is going to need."""
        each = " in each source" if len(self.shares) > 1 else ""
        return (
            f"{'; '.join(share.description for share in self.shares)}: a plan that loses nothing is certified after "
            f"{self.terms.fewest_frames} with something on them{each}, or a few less, for a loss of at most "
            f"{self.terms.max_loss:g} with {100.0 * (1.0 - ERROR):g} % confidence; one that loses something takes more"
        )

    def run(self, journal: Journal) -> None:
        """Search and certify, as far as the budget allows."""
        self._journal = journal
        if self.is_decided:
            return
        try:
            self._check_time()
            self.ladder.scene = self._scene()
            with self.stage("search") as self._progress:
                candidates = self.ladder.candidates()
            self._is_complete = True
            with self.stage("certificate") as self._progress:
                self._certify(candidates)
        except _TimeIsUpError:
            self.interrupted = "budget"
        if self.ladder.ran_out:
            self.interrupted = "budget"

    def out_of_time(self) -> bool:
        """Return whether the budget is spent."""
        return self.clock.monotonic_s() - self._started >= self.options.budget_s

    def _scene(self) -> Scene:
        """Draw the search frames of each source."""
        with closing(self.embedded.load(self.model.master.SerializeToString())) as engine:
            task = VisionTask(self.model.spec, engine.inputs, engine.outputs)
        halves = []
        for frames, share in zip(self.sources, self.shares, strict=True):
            with closing(frames.draw()) as draws:
                drawn = [(index, task.preprocess(image)[0].copy()) for index, image in islice(draws, share.search)]
            halves.append(split_by_time(drawn))
        return Scene(self.builder.calibration, _in_turn([half for half, _ in halves]), [half for _, half in halves])

    def _find_costs(self, grouping: Grouping, repairs: Repairs, progress: Progress, has_time: HasTime) -> GroupCosts:
        self.builder.repairs = repairs
        frame, remember = self.ladder.scene.sample[0], self._journal.get_or_compute
        floats, source = self.model.rules.floats, self.options.costs
        return find_costs(grouping, floats, self.builder, frame, remember, progress, source, has_time)

    def _certify(self, candidates: Sequence[Tried]) -> None:
        if not candidates:
            return
        sources = [(frames, share.search) for frames, share in zip(self.sources, self.shares, strict=True)]
        with (
            closing(self.embedded.load(self.model.master.SerializeToString())) as reference,
            closing(self.builder.load_float(self._show)) as float_engine,
        ):
            certifier = Certifier(
                self.model.spec, self.terms, sources, reference, float_engine, self._journal,
                self._progress, self.out_of_time, self.clock,
            )  # fmt: skip
            too_loud = math.inf
            for tried in candidates:
                plan, noise = fingerprint(self.builder.plan(tried.plan.floats).essence), self._noise_of(tried)
                number = certifier.number_of(plan)  # also of one that is left out: all were chosen beforehand
                if number is None or noise >= too_loud:
                    continue
                with closing(self.builder.load(tried.plan.floats, self._show)) as engine:
                    self._judge(tried, certifier.try_candidate(plan, engine))
                if tried.is_accepted:
                    self.accepted = tried
                    return
                too_loud = min(too_loud, noise) if tried.is_too_loud else too_loud
                self._check_time()

    def _noise_of(self, tried: Tried) -> float:
        return self.ladder.findings.partition(tried.plan).noise

    def _judge(self, tried: Tried, trials: Mapping[str, Any]) -> None:
        """Note the trials of a candidate.

        INT8 can be faster on this machine where its times were measured; then a candidate has to be.
        """
        tried.trials = trials
        outcome = tried.trial
        assert outcome is not None
        tried.is_too_loud = not outcome.accepted
        if outcome.accepted and not self.ladder.findings.costs.why and not outcome.is_faster:
            times = f"{outcome.latency_ms:.3g} ms, which is not faster than {outcome.latency_float_ms:.3g} ms"
            tried.trials = {
                source: replace(trial, accepted=False, reason=f"{times} in float; {trial.reason}")
                for source, trial in trials.items()
            }

    @property
    def _is_live(self) -> bool:
        """True if the one source is a live camera."""
        return any(frames.source.live for frames in self.sources)

    def _check_time(self) -> None:
        if self.out_of_time():
            raise _TimeIsUpError

    def _show(self, fraction: float, doing: str) -> None:
        """Show progress; end the caller when the time is up."""
        self._check_time()
        self._progress(fraction, doing)

    # ---- the plan

    def plan(self) -> PrecisionPlan:
        """Return the certified plan, or the one in which all is float but what the owner forces into INT8.

        The caller adds to its evidence what it knows of the run.
        """
        found, accepted, builder = self.ladder.findings, self.accepted, self.builder
        if accepted is not None:
            floats, repairs = dict(accepted.plan.floats), accepted.plan.repairs
        else:
            none = np.zeros(len(found.grouping.groups), np.bool_)
            floats = self.model.rules.apply(found.grouping.plan(none.tolist(), _NOT_CERTIFIED))
            repairs = builder.repairs
        floats |= builder.without_int8
        bare = PrecisionPlan(floats, PrecisionPlan(floats, repairs).effective)
        if not found.int8(bare).any():
            bare = PrecisionPlan(floats)
        model, options = self.model, self.options
        tried = [each for each in found.tried if each.trial is not None]
        last = tried[-1].trial if tried else None
        trial = accepted.trial if accepted is not None else None
        in_float = 0.0 if builder.backend.precisions[-1] == "fp32" else None  # FP16 was not compared
        facts = {
            "by": COMMAND,
            "spec_id": model.spec_id,
            "calibration": builder.calibration.id,
            "built_for": dict(builder.backend.describe()),
            "float_precision": builder.backend.precisions[-1],
            "plan": fingerprint(bare.essence),
            "int8_macs_share": int8_macs_share(model.master, place(model.master, bare)),
            "max_loss": options.max_loss,
            "max_confusion": options.max_confusion,
            "seed": options.seed,
            "retraining": retraining(found, accepted, bare, in_float),
            "verdict": self.verdict(),
            "certificate": {
                "error_probability": ERROR,
                "frames_needed": self.terms.fewest_frames,
            },
            "latency_ms": trial.latency_ms if trial else (last.latency_float_ms if last else None),
            "latency_float_ms": last.latency_float_ms if last else None,
            "faster": trial is not None and trial.is_faster,
            "frame_counts": {
                "to_search": sum(share.search for share in self.shares) if found.tried else 0,
                "to_certify": sum(each.frames for each in tried[-1].trials.values()) if tried else 0,
            },
            "live": trial is not None and self._is_live,
            "builds": builder.builds,
            "interrupted": self.interrupted,
        }
        return replace(bare, evidence={**found.evidence(bare, accepted), **facts})

    def verdict(self) -> str:
        """Return the result in one sentence or two, for people."""
        trial = self.accepted.trial if self.accepted is not None else None
        if trial is None:
            own = " but what the model itself has in INT8" if self.model.placement.own else ""
            is_forced = bool(self.model.rules.int8)
            forced = ", and what precision.force_int8 names, whose loss is not known" if is_forced else ""
            return f"All float{own}{forced}: {self._why_not()}."
        times = f"{trial.latency_ms:.3g} ms against {trial.latency_float_ms:.3g} ms in float"
        speed = f"{times}." if trial.is_faster else f"INT8 is not faster on this machine, {times}: serve float here."
        scenes = [share.source for share in self.shares]
        each = " in each" if len(scenes) > 1 else ""
        outcome = f"a loss of at most {trial.upper:.3g}{each}, where {self.options.max_loss:g} is accepted. {speed}"
        if self._is_live:  # frames in the order of time are no sample of another stretch
            return f"Kept for the observed stretch of a live camera, and for no other: {outcome}"
        certified = f"Certified for the scenes of {', '.join(scenes)}" if len(scenes) > 1 else "Certified"
        return f"{certified}: {outcome}"

    def _why_not(self) -> str:
        found = self.ladder.findings
        if self.is_decided:
            reasons = dict.fromkeys(group.fixed or "precision.keep_float" for group in found.grouping.groups)
            return f"no layer may be INT8 ({'; '.join(reasons)})" if reasons else "there is no layer that could be INT8"
        offered = [tried for tried in found.tried if tried.offered]
        tried = [each.trial for each in offered if each.trial is not None]
        if self.interrupted and (not self._is_complete or len(tried) < len(offered)):
            return "the time was up before a plan with INT8 in it was certified"
        last = f". The last: {tried[-1].reason}" if tried else ""
        return f"none of {len(tried)} plans was certified{last}"
