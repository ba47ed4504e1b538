"""Compare a candidate engine with the reference and the engine in service, on the same held-out frames.

`compare` runs the three in turn, frame by frame, and returns a `Comparison`: fidelities, latencies, confused classes
and faulty outputs. `Deadline` ends the process if the candidate hangs.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.models.model import Model
from agent.validation.confusion import Disagreement
from agent.vision.answer import Answer
from agent.vision.fidelity import Fidelity, PooledIou, fidelity
from agent.vision.output_checks import largest_batch, output_faults, row_faults
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError
from engines.interface import Array, Backend, Engine, Observer, Progress, silent
from engines.store.artefact import read_artefact
from engines.store.signing import find_key

HeldOut = Sequence[Array]

_TIMED = 200  # inferences of each engine: enough that the slowest hundredth is more than one of them
_TIMING_S = 3.0  # limit for the extra inferences where held-out frames are too few: the candidate is needed soon
_LEAST_DEADLINE_S = 5.0  # for one inference on a machine whose cores, memory and caches others use too
_DEADLINE = 20.0  # times the slowest inference of the reference
_NO_ANSWER = Fidelity(0.0)
_MOST_DIFFERING = 8  # frames that a report shows


@dataclass(frozen=True, eq=False)
class Difference:
    """A held-out frame (1, C, H, W) on which the candidate and the reference differ; fidelity: of the candidate."""

    frame: Array
    served: Answer
    reference: Answer
    fidelity: float


@dataclass(frozen=True)
class Comparison:
    """The observations on `frames` held-out frames. Columns: the candidate, then the engine in service, if any.

    Args:
        fidelities: (informative frames, engines), of the frames on which an engine or the reference found anything.
        latencies_ms: (inferences, engines); those of a row are on the same frame, one right after the other.
        reference_ms: Latency of the reference per frame.
        float_ms: The same of the float engine, (inferences,), in turn with those of `latencies_ms`; empty where it is
            not timed.
        confusion: Per engine, which classes it takes for which.
        outputs: What is wrong with the candidate's outputs, in words -> on how many frames.
        rows: What is wrong with batches.
        differing: The frames of least fidelity, the worst first; a few.
        pooled: Per engine, its IoU with the reference, by class.
    """

    frames: int
    fidelities: NDArray[np.float64]
    latencies_ms: NDArray[np.float64]
    reference_ms: NDArray[np.float64]
    float_ms: NDArray[np.float64]
    confusion: Sequence[Disagreement]
    outputs: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[str] = ()
    differing: Sequence[Difference] = ()
    pooled: Sequence[PooledIou] = ()


def compare(
    model: Model,
    backend: Backend,
    candidate: Engine,
    serving: str | None,
    held_out: HeldOut,
    deadline: Deadline,
    progress: Progress = silent,
    load_float: Callable[[], Engine] | None = None,
) -> Comparison:
    """Run reference, candidate and engine in service in turn, frame by frame.

    Args:
        serving: Directory of the artefact in service, if any.
        load_float: Returns the float engine, to be timed with them; None: it is not.
        held_out: Network inputs (1, C, H, W), of any sizes.
        deadline: Ends this process if an inference of the candidate hangs.
        progress: Progress of the reference engine, where that has to be built.

    Raises TaredError for a reference, an engine in service or a float engine that does not run. A candidate that does
    not run is a result.
    """
    with ExitStack() as stack:
        reference = stack.enter_context(closing(model.open_observer(backend, progress)))
        engines = [candidate]
        if serving is not None:
            content = read_artefact(Path(serving), find_key()).read_engine()
            engines.append(stack.enter_context(closing(backend.load(content))))
        in_float = stack.enter_context(closing(load_float())) if load_float is not None else None
        return _PairedRun(model, reference, engines, in_float, deadline).run(held_out)


class _CandidateFailedError(Exception):
    """The candidate has raised an error, which ends the comparison."""


class _PairedRun:
    """One comparison while it is made. engines: the candidate, and the engine in service, if any."""

    def __init__(
        self,
        model: Model,
        reference: Observer,
        engines: Sequence[Engine],
        in_float: Engine | None,
        deadline: Deadline,
    ) -> None:
        self._spec = model.spec
        self._reference = reference
        self._task = VisionTask(model.spec, reference.inputs, reference.outputs)
        # A number of candidates may depend on the frame; every other shape is the reference's.
        self._declared = (
            {each.name: each.shape for each in reference.outputs} if open_task(model.spec).has_open_outputs else {}
        )
        self._engines = engines
        self._float = in_float
        self._deadline = deadline
        self._confusion = [Disagreement() for _ in engines]
        self._pooled = [PooledIou() for _ in engines]
        self._faults: Counter[str] = Counter()
        self._rows: list[str] = []
        self._scores: list[list[float]] = []
        self._latencies_ms: list[list[float]] = []
        self._reference_ms: list[float] = []
        self._float_ms: list[float] = []
        self._differing: list[Difference] = []
        self._slowest_ms = 0.0  # the reference's slowest inference, the first one included

    def run(self, held_out: HeldOut) -> Comparison:
        try:
            for tensor in held_out[:1]:  # a first inference takes up to five times as long
                _, self._slowest_ms = _timed(self._reference, tensor)
                self._infer_in_turn(tensor)
                self._float_ms.clear()
            most = largest_batch(self._engines[0], self._spec)
            self._rows = row_faults(lambda batch: self._infer(0, batch)[0], held_out, most)
            for tensor in held_out:
                self._compare(tensor)
            if (len(self._engines) > 1 or self._float is not None) and not self._faults:
                self._time(held_out)
        except _CandidateFailedError as error:
            self._faults[str(error)] += 1
        columns = len(self._engines)
        return Comparison(
            len(held_out),
            np.array(self._scores).reshape(-1, columns),
            np.array(self._latencies_ms).reshape(-1, columns),
            np.array(self._reference_ms),
            np.array(self._float_ms),
            self._confusion,
            self._faults,
            self._rows,
            self._differing,
            self._pooled,
        )

    def _compare(self, tensor: Array) -> None:
        expected, reference_ms = _timed(self._reference, tensor)
        self._reference_ms.append(reference_ms)
        self._slowest_ms = max(self._slowest_ms, reference_ms)
        outputs, latencies_ms = self._infer_in_turn(tensor)
        self._latencies_ms.append(latencies_ms)
        row = [self._agreement(column, served, expected, tensor) for column, served in enumerate(outputs)]
        if not all(agreement.is_empty for agreement in row):
            self._scores.append([agreement.value for agreement in row])

    def _time(self, held_out: HeldOut) -> None:
        """Add inferences where the held-out frames are too few to know the slowest ones."""
        ends_s = time.monotonic() + _TIMING_S
        while held_out and len(self._latencies_ms) < _TIMED and time.monotonic() < ends_s:
            self._latencies_ms.append(self._infer_in_turn(held_out[len(self._latencies_ms) % len(held_out)])[1])

    def _infer_in_turn(self, tensor: Array) -> tuple[list[dict[str, Array]], list[float]]:
        """Return outputs and latencies in ms by column; time the float engine, too.

        The order alternates: the first one warms the caches.
        """
        columns = list(range(len(self._engines)))
        turns = [*columns, None] if self._float is not None else columns
        results = {}
        for column in turns if len(self._latencies_ms) % 2 else turns[::-1]:
            if column is not None:
                results[column] = self._infer(column, tensor)
            elif self._float is not None:
                self._float_ms.append(_timed(self._float, tensor)[1])
        return [results[column][0] for column in columns], [results[column][1] for column in columns]

    def _infer(self, column: int, batch: Array) -> tuple[dict[str, Array], float]:
        if column:
            return _timed(self._engines[column], batch)
        limit_s = len(batch) * max(_LEAST_DEADLINE_S, _DEADLINE * self._slowest_ms / 1e3)
        with self._deadline.within(limit_s):
            try:
                return _timed(self._engines[0], batch)
            except TaredError as error:
                raise _CandidateFailedError(f"it fails: {error.code}: {error.found}") from error

    def _agreement(
        self, column: int, outputs: Mapping[str, Array], expected: Mapping[str, Array], tensor: Array
    ) -> Fidelity:
        truth = self._task.answer(expected, tensor)
        faults = output_faults(outputs, expected, self._declared)
        served = None
        if not faults:
            try:
                served = self._task.answer(outputs, tensor)
            except TaredError as error:
                faults = [f"its outputs cannot be decoded: {error.found}"]
        if column == 0:
            self._faults.update(faults)
        self._pooled[column].add(truth.overlaps_by_class(served))
        self._confusion[column].add(truth.pairs(served))
        if served is None:
            return _NO_ANSWER
        agreement = fidelity(served, truth)
        if column == 0 and agreement.value < 1.0:
            differing = [*self._differing, Difference(tensor, served, truth, agreement.value)]
            self._differing = sorted(differing, key=lambda each: each.fidelity)[:_MOST_DIFFERING]
        return agreement


def _timed(engine: Engine, tensor: Array) -> tuple[dict[str, Array], float]:
    """Return the outputs of an inference, and how long it took in ms."""
    started = time.perf_counter()
    outputs = engine.infer(tensor)
    return outputs, (time.perf_counter() - started) * 1e3


_POLL_S = 0.05  # seldom enough that times measured meanwhile are not changed


class Deadline:
    """Call `on_miss(limit in s)` in a thread of its own once the body of `within` exceeds its limit.

    A call that hangs in a runtime cannot be interrupted, and receives no signal: on_miss is expected to end the
    process. A runtime that hangs without releasing Python's lock stops this thread too. Then only the daemon's limit
    for the whole job is left.
    """

    def __init__(self, on_miss: Callable[[float], None], clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._on_miss = on_miss
        self._watched: tuple[float, float] | None = None  # (monotonic time it is due, limit), set as one
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """Limit the body to so many seconds; one body at a time."""
        self._watched = self._clock.monotonic_s() + limit_s, limit_s
        try:
            yield
        finally:
            self._watched = None

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._clock.wait(self._closed, _POLL_S):
            watched = self._watched
            if watched is not None and self._clock.monotonic_s() > watched[0]:
                self._on_miss(watched[1])
                return
