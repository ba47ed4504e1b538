"""One candidate's trial: what is asked of it, what was measured so far, and what that decides."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any, cast

import numpy as np

from agent.common.errors import AgentError
from agent.common.state_files import Journal
from agent.planning.frames import RandomFrames
from agent.validation.confusion import Answer, ConfusedPair, Disagreement, answers
from agent.vision.decode import Prediction
from agent.vision.fidelity import fidelity
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from calibrate.loss_bound import LossBound, frames_needed
from engines.interface import Array, Engine, Progress, silent

MAX_CANDIDATES = 5
ERROR = 0.05  # of all candidates of a search together
# Draws per candidate, in multiples of the fewest. Of candidates with half the loss that is asked all 14 simulated were
# accepted by 16, of those with 0.7 of it 6 of 14 by 20.
_LIMIT = 20
_FASTER = 0.97  # of float's latency at most: the medians of equal engines differ by 1.5 %, see certificate.py


@dataclass(frozen=True)
class Terms:
    """What is asked of each of `candidates` candidates, which were chosen beforehand.

    max_loss: of 1 - fidelity, from 1e-4 on. max_confusion: of the objects of a class that are served as one other. Both
    are fractions in (0, 1).
    """

    max_loss: float
    max_confusion: float
    candidates: int = MAX_CANDIDATES

    @property
    def error(self) -> float:
        """The error of one candidate's bounds."""
        return ERROR / self.candidates

    @cached_property
    def needed(self) -> int:
        """The fewest telling frames that can certify a candidate."""
        return frames_needed(self.max_loss, self.error)


@dataclass(frozen=True)
class TrialResult:
    """How a candidate did beside the reference and the float engine.

    loss: mean over `frames` frames; on empty_frames others neither engine nor reference found anything, so they agree
    without telling anything. upper, lower: its anytime-valid bounds. Latencies are medians in ms over the same frames,
    in turn in one process, after a warm-up. confused: pairs of classes above max_loss, though the mean may be small.
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

    @property
    def is_faster(self) -> bool:
        """Whether it took less time than float by more than chance."""
        return self.latency_ms <= _FASTER * self.latency_float_ms


@dataclass(frozen=True)
class Measurement:
    """One frame, as the journal keeps it. latencies_ms: of candidate and float engine, where they were timed."""

    loss: float
    empty: bool
    answers: Sequence[Answer]
    latencies_ms: tuple[float, float] | None


class Tally:
    """A candidate's measurements so far, and what they decide."""

    def __init__(self, terms: Terms) -> None:
        self.bound = LossBound(terms.error)
        self._terms = terms
        self._disagreement = Disagreement()
        self._empty_frames = 0
        self._latencies_ms: list[tuple[float, float]] = []

    def add(self, measurement: Measurement) -> None:
        if measurement.latencies_ms is not None:
            self._latencies_ms.append(measurement.latencies_ms)
        if measurement.empty:
            self._empty_frames += 1
            return
        self.bound.update(measurement.loss)
        self._disagreement.add(measurement.answers)

    @property
    def is_decided(self) -> bool:
        """Whether more frames would change nothing, or too little."""
        if self._loses_more or self._is_futile or self._is_hopeless:
            return True
        return self._keeps_loss and not self._disagreement.looks_worse(self._terms.max_confusion)

    @property
    def _keeps_loss(self) -> bool:
        return self.bound.upper <= self._terms.max_loss

    @property
    def _loses_more(self) -> bool:
        return self.bound.lower >= self._terms.max_loss

    @property
    def _is_futile(self) -> bool:
        """The mean itself is too high, on frames enough for it to be near the truth; refusing early is no promise."""
        return self.bound.n >= max(100, self._terms.needed) and self.bound.mean >= self._terms.max_loss

    @property
    def _is_hopeless(self) -> bool:
        """Too many draws; or none of the first tells anything, where one in _LIMIT must for the others to suffice."""
        draws = self.bound.n + self._empty_frames
        return draws >= (_LIMIT if self.bound.n else 1) * self._terms.needed

    def trial(self, spec: ModelSpec, ended: str) -> TrialResult:
        """The result; `ended` says why there were no more frames where the measurements decide nothing.

        A trial that ended early for a small loss has no pair that looks worse than max_confusion. So the pairs that
        refuse a candidate are those of a number of draws that was fixed beforehand, as their bound wants it.
        """
        tolerance = min(self._terms.max_loss, self._terms.max_confusion)
        pairs = self._disagreement.confused(spec.label, tolerance, self._terms.error)
        worst = pairs[0] if pairs and pairs[0].low > self._terms.max_confusion else None
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
            accepted=self._keeps_loss and not self._loses_more and not self._is_futile and worst is None,
            reason=self._reason(worst, self._ended() or ended),
        )

    def _ended(self) -> str:
        """Why more frames were not asked for, where that was not for want of them."""
        if self._is_hopeless:
            return "more would take too long"
        return "more would hardly lower it" if self._is_futile else ""

    def _reason(self, worst: ConfusedPair | None, ended: str) -> str:
        asked = f"at most {self._terms.max_loss:g} is asked"
        told = f"on {self.bound.n} frames, {self._empty_frames} others empty"
        if self._loses_more:
            return f"loss at least {self.bound.lower:.3g} {told}; {asked}"
        if self._keeps_loss and worst is not None:
            return (
                f"'{worst.reference}' served as '{worst.candidate}' on {worst.count} of {worst.of} frames, at least "
                f"{worst.low:.3g} of all; at most {self._terms.max_confusion:g} is asked"
            )
        if self._keeps_loss and not self._is_futile:
            return f"loss at most {self.bound.upper:.3g} {told}; {asked}"
        if not self.bound.n:
            return f"nothing found on any of {self._empty_frames} frames, which tells nothing; {ended}"
        return f"loss {self.bound.mean:.3g}, perhaps {self.bound.upper:.3g}, {told}, and {ended}; {asked}"


_TIMED = 50  # frames: two equal engines, medians of 50 in turn, differ by 1.5 % (one standard deviation, 2 CPU cores)
_WARM_UP = 5  # inferences; the first two took up to five times as long on ONNX Runtime


def check_frames(frames: RandomFrames, start: int, terms: Terms) -> None:
    """See whether the frames from place `start` on can certify anything; to be asked before any engine is built.

    They do if there is something on each of them. A live camera has enough. Raises AgentError (`plan.frames`), and
    CameraError where frames cannot be read.
    """
    if frames.count is None:
        return
    left = max(0, frames.count - start)
    if left >= terms.needed:
        return
    limits = [thousandths / 1000 for thousandths in range(1, 1000)]
    first = bisect.bisect_left(limits, -left, key=lambda limit: -frames_needed(limit, terms.error))
    other = f", or accept --max-loss {limits[first]}, for which {left} frames suffice" if first < len(limits) else ""
    raise AgentError(
        "plan.frames",
        f"{left} frames to measure on in {frames.source.shown}, beside {frames.count - left} to search with",
        f"at least {terms.needed} for --max-loss {terms.max_loss:g} with 95 % confidence",
        f"give more frames{other}",
    )


class Certifier:
    """Measures the candidates of one search, each on the same frames in the same random order.

    The frames from place `start` on must not have been used to choose the candidates. All measured frames are kept in
    the journal: a trial that was interrupted replays them, without an engine, and goes on after them. deadline: whether
    the time is up; it ends a trial after a frame that it measured. Raises as `check_frames`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        terms: Terms,
        frames: RandomFrames,
        start: int,
        reference: Engine,
        float_engine: Engine,
        journal: Journal,
        progress: Progress = silent,
        deadline: Callable[[], bool] = lambda: False,
    ) -> None:
        """reference: whose answers count, an Observer will do. float_engine: the one to be faster than."""
        check_frames(frames, start, terms)
        self._spec = spec
        self._terms = terms
        self._frames = frames
        self._start = start
        self._reference = reference
        self._float_engine = float_engine
        self._journal = journal
        self._progress = progress
        self._deadline = deadline
        self._task = VisionTask(spec, reference.inputs, reference.outputs)
        self._truths: dict[int, Prediction] = {}  # by index of the frame
        self._tried: set[str] = set()

    def trial(self, name: str, plan: str, engine: Engine) -> TrialResult:
        """Measure a candidate until its loss is known well enough, the frames or the time end, or nothing more helps.

        It is accepted for its loss and its confusions only: whether it is faster is for the caller to judge. name: of
        the candidate, in what is told. plan: tells its plan from all others, in the journal of every run. Raises
        ValueError for more plans than the terms have candidates, EngineError, CameraError and AgentError
        (`plan.journal`).
        """
        self._tried.add(plan)
        if len(self._tried) > self._terms.candidates:
            raise ValueError(f"the error is split over {self._terms.candidates} candidates, and '{name}' is one more")
        tally = Tally(self._terms)
        with closing(self._measurements(plan, engine)) as measurements:
            for measurement in measurements:
                tally.add(measurement)
                told = f"{name}: loss at most {tally.bound.upper:.3g} on {tally.bound.n} frames"
                self._progress(min(1.0, tally.bound.n / self._terms.needed), told)
                if tally.is_decided:
                    break
        return tally.trial(self._spec, "the time was up" if self._deadline() else "there were no more frames")

    def _measurements(self, plan: str, engine: Engine) -> Generator[Measurement, None, None]:
        """Those in the journal, and then new ones until the time is up, but at least one."""
        begin = 0
        while (known := self._journal.get(_key(plan, begin))) is not None:
            yield Measurement(**cast("dict[str, Any]", known))
            begin += 1
        with closing(self._frames.draw(self._start + begin)) as draws:
            for number, (index, image) in enumerate(draws, begin):
                tensor, _ = self._task.preprocess(image)
                if number == begin and number < _TIMED:
                    for warming in (engine, self._float_engine) * _WARM_UP:
                        warming.infer(tensor)
                measurement = self._measure(engine, number, index, tensor)
                self._journal.put(_key(plan, number), asdict(measurement))
                yield measurement
                if self._deadline():
                    return

    def _measure(self, engine: Engine, number: int, index: int, tensor: Array) -> Measurement:
        latencies_ms = None
        if number >= _TIMED:
            outputs = engine.infer(tensor)
        else:
            order = (engine, self._float_engine) if number % 2 == 0 else (self._float_engine, engine)
            answered = {timed: _infer_timed(timed, tensor) for timed in order}
            outputs, latency_ms = answered[engine]
            latencies_ms = latency_ms, answered[self._float_engine][1]
        truth = self._truth(index, tensor)
        if not all(np.isfinite(output).all() for output in outputs.values()):
            return Measurement(1.0, False, answers(None, truth), latencies_ms)
        served = self._task.decode(outputs, tensor.shape)
        agreement = fidelity(served, truth, self._spec.min_sqnr_db)
        return Measurement(1.0 - agreement.value, agreement.is_empty, answers(served, truth), latencies_ms)

    def _truth(self, index: int, tensor: Array) -> Prediction:
        """The reference's prediction, kept for the next candidate unless it is raw outputs, which may be large."""
        if index in self._truths:
            return self._truths[index]
        truth = self._task.decode(self._reference.infer(tensor), tensor.shape)
        if not isinstance(truth, Mapping):
            self._truths[index] = truth
        return truth


def _key(plan: str, number: int) -> str:
    """In the journal, which the rest of the search writes to as well."""
    return f"trial {plan} {number}"


def _infer_timed(engine: Engine, tensor: Array) -> tuple[dict[str, Array], float]:
    """The outputs, and the latency in ms."""
    started = time.perf_counter_ns()
    outputs = engine.infer(tensor)
    return outputs, (time.perf_counter_ns() - started) / 1e6
