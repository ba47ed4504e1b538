"""The last step of a search for a plan: few candidates, measured beside the float engine on frames nobody has seen.

A certificate is an upper bound on a candidate's loss over all of those frames, see `calibrate.loss_bound`. Its error
is split over the candidates (Bonferroni), which are few and chosen beforehand: with 95 % confidence no bound of any of
them is too low, however many frames were looked at and whichever candidate is taken.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import asdict
from typing import Any, cast

import numpy as np

from agent.decode import Prediction
from agent.errors import AgentError
from agent.fidelity import fidelity
from agent.journal import Journal
from agent.model_spec import ModelSpec
from agent.planning.disagreement import answers
from agent.planning.held_out import RandomFrames
from agent.planning.trial import Measurement, Tally, Terms, Trial
from agent.vision import VisionTask
from calibrate.loss_bound import frames_needed
from engines.backend import Array, Engine, Progress, silent

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

    def trial(self, name: str, plan: str, engine: Engine) -> Trial:
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
