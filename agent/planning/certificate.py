"""Certify candidates: measure each on frames that the search has not used, until its loss is bounded well enough.

`Terms` says what a candidate has to keep, and splits the error over the candidates. `Tally` collects the measurements
of one candidate and decides when they suffice. `Certifier` measures, and keeps each measurement in a journal, so that
an interrupted trial goes on.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any, cast

import numpy as np
from pydantic import JsonValue

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.state_files import Journal
from agent.planning.frames import RandomFrames
from agent.validation.confusion import ConfusedPair, Disagreement, least_iou
from agent.vision.answer import Answer, ClassOverlap, ServedClass
from agent.vision.fidelity import PooledIou, fidelity
from agent.vision.output_checks import output_faults
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from calibrate.statistics.loss_bound import LossBound, frames_needed
from engines.interface import Array, Engine, Progress, silent

MAX_CANDIDATES = 5
ERROR = 0.05  # for all candidates of a search together: half of it for the first, half of the rest for the second, ...
# Draws per candidate, in multiples of the fewest. Of 14 simulated candidates with half the allowed loss, all were
# accepted by 16; of 14 with 0.7 of it, 6 by 20.
_LIMIT = 20
_TIMED = 50  # frames: two equal engines, medians of 50 in turn, differ by 1.5 % (one standard deviation, 2 CPU cores)
_FASTER = 0.97  # times float's latency, at most: twice that deviation
_WARM_UP = 5  # inferences; the first two took up to five times as long on ONNX Runtime
_ORDER = "candidates"  # key of the journal


@dataclass(frozen=True)
class Terms:
    """The requirements on each candidate, which were chosen beforehand, in each of `sources` sources.

    max_loss: the highest 1 - fidelity, from 1e-4 on. max_confusion: the highest share of a class's objects that are
    served as one other class. Both are fractions in (0, 1).
    """

    max_loss: float
    max_confusion: float
    sources: int = 1

    def error(self, number: int) -> float:
        """The error of one candidate's bounds in one source, by its number from 1; all together hold with 1 - ERROR."""
        return float(ERROR / 2**number / self.sources)

    def frames_needed(self, number: int) -> int:
        """The fewest frames of a source, with something on them, that can certify candidate `number`."""
        return frames_needed(self.max_loss, self.error(number))

    @property
    def fewest_frames(self) -> int:
        """Those that can certify the first candidate."""
        return self.frames_needed(1)


@dataclass(frozen=True)
class TrialResult:
    """A candidate compared with the reference and the float engine, on one source's frames or the worst of several.

    loss: mean over `frames` frames. upper, lower: its anytime-valid bounds.
    empty_frames: further frames on which neither engine nor reference detects anything; they are no evidence.
    latency_ms, latency_float_ms: medians over the same frames, in turn in one process, after a warm-up.
    confused: pairs of classes above max_loss, though the mean may be small.
    ious: of each class by name, of all frames together; empty without classes of pixels.
    """

    loss: float
    upper: float
    lower: float
    frames: int
    empty_frames: int
    latency_ms: float
    latency_float_ms: float
    confused: tuple[ConfusedPair, ...]
    accepted: bool
    reason: str
    ious: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_faster(self) -> bool:
        """True if the candidate is faster than float by more than chance."""
        return self.latency_ms <= _FASTER * self.latency_float_ms


def worst_of(trials: Mapping[str, TrialResult]) -> TrialResult:
    """Return the worst of a candidate's trials, by source: one that refuses it, else that with the highest bound.

    The latencies are the mean of all, and the reason names the source.
    """
    if len(trials) == 1:
        return next(iter(trials.values()))
    source, worst = max(trials.items(), key=lambda each: (not each[1].accepted, each[1].upper))
    return replace(
        worst,
        latency_ms=fmean(trial.latency_ms for trial in trials.values()),
        latency_float_ms=fmean(trial.latency_float_ms for trial in trials.values()),
        reason=f"{source}: {worst.reason}",
    )


@dataclass(frozen=True)
class Measurement:
    """One frame, as the journal keeps it. latencies_ms: of candidate and float engine, if they were timed."""

    loss: float
    empty: bool
    answers: Sequence[ServedClass]
    latencies_ms: tuple[float, float] | None
    overlaps: Sequence[ClassOverlap] = ()


class Tally:
    """Collect a candidate's measurements, and decide on it."""

    def __init__(self, terms: Terms, number: int = 1) -> None:
        self.bound = LossBound(terms.error(number))
        self._terms = terms
        self._error = terms.error(number)
        self._frames_needed = terms.frames_needed(number)
        self._disagreement = Disagreement()
        self._pooled = PooledIou()
        self._empty_frames = 0
        self._latencies_ms: list[tuple[float, float]] = []
        self._least_iou = least_iou(terms.max_loss)

    def add(self, measurement: Measurement) -> None:
        if measurement.latencies_ms is not None:
            self._latencies_ms.append(measurement.latencies_ms)
        if measurement.empty:
            self._empty_frames += 1
            return
        self.bound.update(measurement.loss)
        self._disagreement.add(measurement.answers)
        self._pooled.add(measurement.overlaps)

    @property
    def is_decided(self) -> bool:
        """True if more frames would change nothing, or too little to matter."""
        if self._loses_more or self._is_futile or self._is_hopeless:
            return True
        appears = self._disagreement.appears_above(self._terms.max_confusion) or self._pooled.below(self._least_iou)
        return self._keeps_loss and not appears

    @property
    def _keeps_loss(self) -> bool:
        return self.bound.upper <= self._terms.max_loss

    @property
    def _loses_more(self) -> bool:
        return self.bound.lower >= self._terms.max_loss

    @property
    def _is_futile(self) -> bool:
        """The mean itself is too high, on frames enough for it to be near the truth; a refusal need not be certain."""
        return self.bound.n >= max(100, self._frames_needed) and self.bound.mean >= self._terms.max_loss

    @property
    def _is_hopeless(self) -> bool:
        """Too many draws; or the first are all empty, where one in _LIMIT must show something to suffice in time."""
        draws = self.bound.n + self._empty_frames
        return draws >= (_LIMIT if self.bound.n else 1) * self._frames_needed

    def result(self, spec: ModelSpec, ended: str) -> TrialResult:
        """Return the result; `ended` says why there were no more frames if the measurements decide nothing.

        A trial that ended early for a small loss has no pair that appears above max_confusion, and no class that
        appears lost. So what refuses a candidate comes from a number of draws that was fixed beforehand, as its bound
        requires.
        """
        tolerance = min(self._terms.max_loss, self._terms.max_confusion)
        pairs = self._disagreement.confused(spec.label, tolerance, self._error)
        worst = pairs[0] if pairs and pairs[0].low > self._terms.max_confusion else None
        lost = self._pooled.lost(self._least_iou, self._error)
        latency_ms, latency_float_ms = (median(column) for column in zip(*self._latencies_ms, strict=True))
        return TrialResult(
            loss=self.bound.mean,
            upper=self.bound.upper,
            lower=self.bound.lower,
            frames=self.bound.n,
            empty_frames=self._empty_frames,
            latency_ms=latency_ms,
            latency_float_ms=latency_float_ms,
            confused=pairs,
            accepted=self._keeps_loss and not self._loses_more and not self._is_futile and worst is None and not lost,
            reason=self._reason(
                worst, [f"'{spec.label(each)}' has an IoU of {self._pooled.iou(each):.3g}" for each in lost], ended
            ),
            ious=self._pooled.by_class(spec.label),
        )

    def _reason(self, worst: ConfusedPair | None, lost: Sequence[str], ended: str) -> str:
        if self._is_hopeless:
            ended = "more would take too long"
        elif self._is_futile:
            ended = "more would hardly lower it"
        allowed = f"at most {self._terms.max_loss:g} is asked"
        basis = f"on {self.bound.n} frames, {self._empty_frames} others empty"
        if self._loses_more:
            return f"loss at least {self.bound.lower:.3g} {basis}; {allowed}"
        if self._keeps_loss and worst is not None:
            return (
                f"'{worst.reference}' served as '{worst.candidate}' on {worst.count} of {worst.of} frames, at least "
                f"{worst.low:.3g} of all; at most {self._terms.max_confusion:g} is asked"
            )
        if self._keeps_loss and lost:
            return f"{', '.join(lost)} with float {basis}; {self._least_iou:g} is asked"
        if self._keeps_loss and not self._is_futile:
            return f"loss at most {self.bound.upper:.3g} {basis}; {allowed}"
        if not self.bound.n:
            return f"nothing found on any of {self._empty_frames} frames, which shows nothing about the plan; {ended}"
        return f"loss {self.bound.mean:.3g}, perhaps {self.bound.upper:.3g}, {basis}, and {ended}; {allowed}"


def check_frames(frames: RandomFrames, start: int, terms: Terms) -> None:
    """Check, before any engine is built, that the frames from place `start` on can certify a candidate.

    They suffice if there is something on each of them. A live camera always has enough. Raises AgentError
    (`plan.frames`), and CameraError if frames cannot be read.
    """
    if frames.count is None:
        return
    left = max(0, frames.count - start)
    if left >= terms.fewest_frames:
        return
    limits = [thousandths / 1000 for thousandths in range(1, 1000)]
    first = bisect.bisect_left(limits, -left, key=lambda limit: -frames_needed(limit, terms.error(1)))
    other = f", or accept --max-loss {limits[first]}, for which {left} frames suffice" if first < len(limits) else ""
    raise AgentError(
        "plan.frames",
        f"{left} frames to measure on in {frames.source.shown}, beside {frames.count - left} to search with",
        f"at least {terms.fewest_frames} for --max-loss {terms.max_loss:g} with 95 % confidence",
        f"give more frames{other}",
    )


@dataclass
class Certifier:
    """Measure the candidates of one search, each on the same frames of every source in the same random order.

    All measurements are kept in the journal. An interrupted trial replays them without an engine, and goes on. The
    journal has the order of the candidates, too: the error of each follows from its place in it.

    Args:
        sources: Each with the first place in its random order; earlier frames were used to choose the candidates.
        reference: Its answers are the truth; an Observer will do.
        float_engine: The engine to be faster than.
        deadline: Whether the time is up; then a trial ends after the frame that it has measured.

    Raises as `check_frames`.
    """

    spec: ModelSpec
    terms: Terms
    sources: Sequence[tuple[RandomFrames, int]]
    reference: Engine
    float_engine: Engine
    journal: Journal
    progress: Progress = silent
    deadline: Callable[[], bool] = lambda: False
    clock: Clock = SYSTEM_CLOCK
    _truths: dict[tuple[int, int], Answer] = field(default_factory=dict, init=False)  # by source and index of the frame

    def __post_init__(self) -> None:
        for frames, start in self.sources:
            check_frames(frames, start, self.terms)
        self._task = VisionTask(self.spec, self.reference.inputs, self.reference.outputs)

    def number_of(self, plan: str) -> int | None:
        """Return the place of a plan among the candidates, from 1; None for one more than the error is split over."""
        order = cast("list[JsonValue]", self.journal.get(_ORDER) or [])
        if plan not in order:
            if len(order) == MAX_CANDIDATES:
                return None
            order = [*order, plan]
            self.journal.put(_ORDER, order)
        return order.index(plan) + 1

    def try_candidate(self, plan: str, engine: Engine) -> dict[str, TrialResult]:
        """Measure a candidate in one source after the other, until one refuses it; return the trials by source.

        A trial ends when the loss is known well enough, the frames or the time end, or nothing more helps. It accepts a
        candidate for its loss and its confusions only: the caller judges whether it is faster.

        plan: identifies the candidate's plan in the journal of every run; one that `number_of` knows.

        Raises EngineError, CameraError and AgentError (`plan.journal`).
        """
        number = self.number_of(plan)
        if number is None:
            raise ValueError(f"the error is split over {MAX_CANDIDATES} candidates, and '{plan}' is one more")
        trials: dict[str, TrialResult] = {}
        for place, (frames, _) in enumerate(self.sources):
            name = f"candidate {number}" + (f" in {frames.source.shown}" if len(self.sources) > 1 else "")
            tally, needed = Tally(self.terms, number), self.terms.frames_needed(number)
            with closing(self._measurements(plan, place, engine)) as measurements:
                for measurement in measurements:
                    tally.add(measurement)
                    doing = f"{name}: loss at most {tally.bound.upper:.3g} on {tally.bound.n} frames"
                    self.progress(min(1.0, tally.bound.n / needed), doing)
                    if tally.is_decided:
                        break
            ended = "the time was up" if self.deadline() else "there were no more frames"
            trials[frames.source.shown] = trial = tally.result(self.spec, ended)
            if not trial.accepted:
                break
        return trials

    def _measurements(self, plan: str, place: int, engine: Engine) -> Generator[Measurement, None, None]:
        """Yield the measurements in the journal, then at least one new one, until the time is up."""
        (frames, start), known_frames = self.sources[place], 0
        key = f"trial {plan} {place}" if place else f"trial {plan}"
        while (known := self.journal.get(f"{key} {known_frames}")) is not None:
            yield Measurement(**cast("dict[str, Any]", known))
            known_frames += 1
        with closing(frames.draw(start + known_frames)) as draws:
            for number, (index, image) in enumerate(draws, known_frames):
                tensor, _ = self._task.preprocess(image)
                if number == known_frames and number < _TIMED:
                    for warming in (engine, self.float_engine) * _WARM_UP:
                        warming.infer(tensor)
                measurement = self._measure(engine, number, (place, index), tensor)
                self.journal.put(f"{key} {number}", asdict(measurement))
                yield measurement
                if self.deadline():
                    return

    def _measure(self, engine: Engine, number: int, index: tuple[int, int], tensor: Array) -> Measurement:
        latencies_ms = None
        if number >= _TIMED:
            outputs = engine.infer(tensor)
        else:
            order = (engine, self.float_engine) if number % 2 == 0 else (self.float_engine, engine)
            answered = {timed: _infer_timed(timed, tensor, self.clock) for timed in order}
            outputs, latency_ms = answered[engine]
            latencies_ms = latency_ms, answered[self.float_engine][1]
        truth = self._truth(index, tensor)
        if self._is_broken(outputs, tensor):
            return Measurement(1.0, False, truth.pairs(None), latencies_ms, truth.overlaps_by_class(None))
        served = self._task.answer(outputs, tensor)
        agreement = fidelity(served, truth)
        overlaps = truth.overlaps_by_class(served)
        return Measurement(1.0 - agreement.value, agreement.is_empty, truth.pairs(served), latencies_ms, overlaps)

    def _is_broken(self, outputs: Mapping[str, Array], tensor: Array) -> bool:
        """Return whether outputs are not finite where the reference's are."""
        if all(np.isfinite(output).all() for output in outputs.values()):
            return False
        shapes = {name: output.shape for name, output in outputs.items()}  # a number of candidates may differ
        return bool(output_faults(outputs, self.reference.infer(tensor), shapes))

    def _truth(self, index: tuple[int, int], tensor: Array) -> Answer:
        """Return the reference's answer. It is kept for the next candidate, unless it may be large."""
        if index in self._truths:
            return self._truths[index]
        truth = self._task.answer(self.reference.infer(tensor), tensor)
        if not open_task(self.spec).has_large_answers:
            self._truths[index] = truth
        return truth


def _infer_timed(engine: Engine, tensor: Array, clock: Clock) -> tuple[dict[str, Array], float]:
    """Return the outputs and the latency in ms."""
    started = clock.monotonic_ns()
    outputs = engine.infer(tensor)
    return outputs, (clock.monotonic_ns() - started) / 1e6
