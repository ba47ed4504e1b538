"""A deadline for calls that cannot be interrupted: one that hangs in a runtime hears no signal.

Nothing but the end of the process ends it. A runtime that hangs without giving Python's lock back stops this watch
too: then the daemon's limit for the whole job is what is left.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agent.models.model import Model
from agent.validation.confusion import ConfusionCounts, answers
from agent.vision.fidelity import Fidelity, fidelity
from agent.vision.output_checks import largest_batch, output_faults, row_faults
from agent.vision.task import VisionTask
from calibrate.errors import TaredError
from engines.interface import Array, Backend, Engine, Observer, Progress, silent
from engines.store.artefact import read_artefact
from engines.store.signing import find_key

_LOOK_S = 0.05  # between two looks: starting a watch costs nothing then, and times that are measured stay what they are


class Deadline:
    """Calls `on_miss(limit in s)`, in a thread of its own, once the body of `within` has taken longer than its limit.

    on_miss is expected to end the process: whoever is late is not coming back.
    """

    def __init__(self, on_miss: Callable[[float], None]) -> None:
        self._on_miss = on_miss
        self._watched: tuple[float, float] | None = None  # (monotonic time it is due, limit), set as one
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="deadline", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, limit_s: float) -> Iterator[None]:
        """The body has so many seconds; one body at a time."""
        self._watched = time.monotonic() + limit_s, limit_s
        try:
            yield
        finally:
            self._watched = None

    def close(self) -> None:
        """Watch no more."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_S):
            watched = self._watched
            if watched is not None and time.monotonic() > watched[0]:
                self._on_miss(watched[1])
                return


HeldOut = Sequence[Array]

_TIMED = 200  # inferences of each engine, from which on the slowest hundredth is more than one of them
_TIMING_S = 3.0  # for those that the held-out frames are too few for: the candidate is wanted soon
_LEAST_DEADLINE_S = 5.0  # for one inference on a machine whose cores, memory and caches others use too
_DEADLINE = 20.0  # times what the reference took at most
_NO_ANSWER = Fidelity(0.0)


@dataclass(frozen=True)
class Comparison:
    """What was seen on `frames` held-out frames. Columns: the candidate, then the engine in service where there is one.

    fidelities: (telling frames, engines), of the frames on which an engine or the reference found anything.
    latencies_ms: (inferences, engines), those of a row on the same frame, one right after the other.
    reference_ms: the reference's, per frame. outputs: what is wrong with the candidate's outputs, in words, and on how
    many frames. rows: what is wrong with batches. misread: per engine, which classes it takes for which.
    """

    frames: int
    fidelities: NDArray[np.float64]
    latencies_ms: NDArray[np.float64]
    reference_ms: NDArray[np.float64]
    misread: Sequence[ConfusionCounts]
    outputs: Mapping[str, int] = field(default_factory=dict)
    rows: Sequence[str] = ()


def compare(
    model: Model,
    backend: Backend,
    candidate: Engine,
    serving: str | None,
    held_out: HeldOut,
    deadline: Deadline,
    progress: Progress = silent,
) -> Comparison:
    """Run the three frame by frame in turn.

    held_out: network inputs (1, C, H, W), of any sizes. serving: directory of the artefact in service. deadline: an
    inference of the candidate that hangs ends this process through it. progress: of the reference engine, where that
    has to be built. Raises TaredError for a reference or an engine in service that does not run; a candidate that does
    not is what is compared here.
    """
    reference = backend.observer(model.reference, model.placement.taps, progress)
    engines = [candidate]
    try:
        if serving is not None:
            engines.append(backend.load(read_artefact(Path(serving), find_key()).read_engine()))
        return _PairedRun(model, reference, engines, deadline).run(held_out)
    finally:
        reference.close()
        for engine in engines[1:]:
            engine.close()


class _CandidateFailedError(Exception):
    """The candidate has raised an error: there is nothing more to compare."""


class _PairedRun:
    """One comparison while it is made. engines: the candidate, and the one in service where there is one."""

    def __init__(self, model: Model, reference: Observer, engines: Sequence[Engine], deadline: Deadline) -> None:
        self._spec = model.spec
        self._reference = reference
        self._task = VisionTask(model.spec, reference.inputs, reference.outputs)
        # A detector's number of candidates may depend on the frame; every other shape is the reference's.
        self._declared = {each.name: each.shape for each in reference.outputs} if model.spec.task == "detect" else {}
        self._engines = engines
        self._deadline = deadline
        self._misread = [ConfusionCounts() for _ in engines]
        self._faults: Counter[str] = Counter()
        self._rows: list[str] = []
        self._scores: list[list[float]] = []
        self._latencies_ms: list[list[float]] = []
        self._reference_ms: list[float] = []
        self._slowest_ms = 0.0  # of the reference, the first inference included

    def run(self, held_out: HeldOut) -> Comparison:
        try:
            self._warm_up(held_out[:1])
            most = largest_batch(self._engines[0], self._spec)
            self._rows = row_faults(lambda batch: self._infer(0, batch)[0], held_out, most)
            for tensor in held_out:
                self._compare(tensor)
            if len(self._engines) > 1 and not self._faults:
                self._time(held_out)
        except _CandidateFailedError as error:
            self._faults[str(error)] += 1
        columns = len(self._engines)
        return Comparison(
            len(held_out),
            np.array(self._scores).reshape(-1, columns),
            np.array(self._latencies_ms).reshape(-1, columns),
            np.array(self._reference_ms),
            self._misread,
            self._faults,
            self._rows,
        )

    def _warm_up(self, held_out: HeldOut) -> None:
        """A first inference takes up to five times as long."""
        for tensor in held_out:
            started = time.perf_counter()
            self._reference.infer(tensor)
            self._slowest_ms = (time.perf_counter() - started) * 1e3
            self._in_turn(tensor)

    def _compare(self, tensor: Array) -> None:
        started = time.perf_counter()
        expected = self._reference.infer(tensor)
        self._reference_ms.append((time.perf_counter() - started) * 1e3)
        self._slowest_ms = max(self._slowest_ms, self._reference_ms[-1])
        outputs, latencies_ms = self._in_turn(tensor)
        self._latencies_ms.append(latencies_ms)
        row = [self._agreement(column, found, expected, tensor.shape) for column, found in enumerate(outputs)]
        if not all(agreement.is_empty for agreement in row):
            self._scores.append([agreement.value for agreement in row])

    def _time(self, held_out: HeldOut) -> None:
        """More inferences, where the held-out frames are too few to tell of the slowest ones."""
        ends_s = time.monotonic() + _TIMING_S
        while held_out and len(self._latencies_ms) < _TIMED and time.monotonic() < ends_s:
            self._latencies_ms.append(self._in_turn(held_out[len(self._latencies_ms) % len(held_out)])[1])

    def _in_turn(self, tensor: Array) -> tuple[list[dict[str, Array]], list[float]]:
        """Outputs and latencies in ms, by column. Who goes first finds other caches than who goes second: they swap."""
        columns = list(range(len(self._engines)))
        order = columns if len(self._latencies_ms) % 2 else columns[::-1]
        found = {column: self._infer(column, tensor) for column in order}
        return [found[column][0] for column in columns], [found[column][1] for column in columns]

    def _infer(self, column: int, batch: Array) -> tuple[dict[str, Array], float]:
        if column:
            started = time.perf_counter()
            outputs = self._engines[column].infer(batch)
            return outputs, (time.perf_counter() - started) * 1e3
        limit_s = len(batch) * max(_LEAST_DEADLINE_S, _DEADLINE * self._slowest_ms / 1e3)
        with self._deadline.within(limit_s):
            started = time.perf_counter()
            try:
                outputs = self._engines[0].infer(batch)
            except TaredError as error:
                raise _CandidateFailedError(f"it fails: {error.code}: {error.found}") from error
            return outputs, (time.perf_counter() - started) * 1e3

    def _agreement(
        self, column: int, outputs: Mapping[str, Array], expected: Mapping[str, Array], shape: tuple[int, ...]
    ) -> Fidelity:
        truth = self._task.decode(expected, shape)
        faults = output_faults(outputs, expected, self._declared)
        served = None
        if not faults:
            try:
                served = self._task.decode(outputs, shape)
            except TaredError as error:
                faults = [f"its outputs cannot be decoded: {error.found}"]
        if column == 0:
            self._faults.update(faults)
        self._misread[column].add(answers(served, truth))
        return _NO_ANSWER if served is None else fidelity(served, truth, self._spec.min_sqnr_db)
