"""Comparisons of a candidate with the reference and the engine in service, with real engines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from candidate_bench import saved_model
from numpy.typing import NDArray
from runtime_under_test import RUNTIME
from turned_clock import TurnedClock
from unexpected import unexpected
from zoo import residual_net

from agent.models.build import build_artefact
from agent.models.model import Model
from agent.validation.comparison import Comparison, Deadline, compare
from agent.vision.output_checks import output_faults
from engines.errors import EngineError
from engines.interface import Array, Backend, Engine
from engines.registry import open_backend

Change = Callable[[dict[str, Array]], dict[str, Array]]


class Changed:
    """An engine whose answers are changed, and which remembers what it was asked."""

    def __init__(self, engine: Engine, change: Change) -> None:
        self._engine, self._change = engine, change
        self.inputs, self.outputs = engine.inputs, engine.outputs
        self.asked: list[Array] = []

    def infer(self, batch: Array) -> dict[str, Array]:
        self.asked.append(batch)
        return self._change(self._engine.infer(batch))

    def close(self) -> None:
        self._engine.close()


class Bench:
    def __init__(self, folder: Path, most: int | None) -> None:
        """most: the largest batch of the profile; None for a model of fixed batch."""
        graph = residual_net(("batch" if most else 1, 3, 8, 8))
        shapes = {"min": [1, 3, 8, 8], "opt": [1, 3, 8, 8], "max": [most, 3, 8, 8]}
        profiles = [{"image": shapes}] if most else []
        self.model: Model = saved_model(folder, graph, profiles=profiles)
        self.backend: Backend = open_backend(RUNTIME)
        self.serving = build_artefact(
            self.model, self.backend, lambda _: folder / "serving", lambda *_: None, calibration=None, precision="fp32"
        )
        rng = np.random.default_rng(0)
        self.frames: list[NDArray[np.float32]] = list(rng.uniform(size=(8, 1, 3, 8, 8)).astype(np.float32))

    def compare(self, change: Change = dict, serving: bool = False) -> tuple[Comparison, Changed]:
        engine = Changed(self.backend.load(self.serving.read_engine()), change)
        path = str(self.serving.path) if serving else None
        with closing(Deadline(unexpected, TurnedClock())) as deadline, closing(engine):
            seen = compare(self.model, self.backend, engine, path, self.frames, deadline)
            return seen, engine


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, None)


def each(change: Callable[[Array], Array]) -> Change:
    return lambda outputs: {name: change(output) for name, output in outputs.items()}


def test_an_engine_beside_itself_is_as_good_and_as_fast(bench: Bench) -> None:
    seen, engine = bench.compare(serving=True)
    assert seen.fidelities.tolist() == [[1.0, 1.0]] * 8
    assert seen.latencies_ms.shape == (200, 2), "more than the frames give: the slowest hundredth is to be known"
    assert (seen.latencies_ms > 0.0).all()
    assert seen.reference_ms.shape == (8,)
    assert (dict(seen.outputs), list(seen.rows)) == ({}, [])
    assert all((asked == frame).all() for asked, frame in zip(engine.asked[1:], bench.frames, strict=False))


def test_without_an_engine_in_service_the_slowest_inferences_are_not_measured(bench: Bench) -> None:
    seen, engine = bench.compare()
    assert seen.fidelities.tolist() == [[1.0]] * 8
    assert len(seen.latencies_ms) == len(engine.asked) - 1 == 8


def test_no_frames_are_no_evidence(bench: Bench) -> None:
    bench.frames = []
    seen, _ = bench.compare(serving=True)
    assert (seen.frames, seen.fidelities.shape, seen.latencies_ms.shape) == (0, (0, 2), (0, 2))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (each(lambda output: output * np.float32(np.nan)), "is not finite"),
        (each(lambda output: output[:, :4]), "is float32 [1, 4], not float32 [1, 5]"),
        (each(lambda output: output.astype(np.int64)), "is int64 [1, 5], not float32 [1, 5]"),
        (lambda outputs: {**outputs, "more": np.zeros(1)}, "its outputs are more, t"),
        (lambda _: {}, "its outputs are , not t"),
    ],
)
def test_impossible_outputs_count_nothing_and_are_named(bench: Bench, change: Change, fault: str) -> None:
    seen, _ = bench.compare(change, serving=True)
    ((words, count),) = seen.outputs.items()
    assert fault in words
    assert count == len(seen.latencies_ms) == 8, "how slow it is at worst is of no interest any more"
    assert seen.fidelities.tolist() == [[0.0, 1.0]] * 8


def test_a_candidate_that_fails_ends_the_comparison(bench: Bench) -> None:
    left = iter(range(5))

    def third_time_unlucky(outputs: dict[str, Array]) -> dict[str, Array]:
        if next(left) == 3:
            raise EngineError("engine.run", "no more", "more", "none")
        return outputs

    seen, _ = bench.compare(third_time_unlucky, serving=True)
    assert dict(seen.outputs) == {"it fails: engine.run: no more": 1}
    assert seen.fidelities.tolist() == [[1.0, 1.0]] * 2


def test_floats_of_any_width_are_floats_and_what_the_reference_has_is_no_fault() -> None:
    wanted = {"x": np.array([[1.0, np.inf]], np.float32)}
    assert output_faults({"x": np.array([[1.0, np.inf]], np.float16)}, wanted, {}) == []
    assert output_faults({"x": np.array([[np.inf, np.inf]], np.float32)}, wanted, {}) == [
        "its output 'x' is not finite"
    ]


def test_an_open_dimension_may_differ_where_it_is_declared() -> None:
    wanted = {"boxes": np.zeros((1, 7, 6), np.float32)}
    found = {"boxes": np.zeros((1, 3, 6), np.float32)}
    assert output_faults(found, wanted, {"boxes": (1, None, 6)}) == []
    assert output_faults(found, wanted, {}) == ["its output 'boxes' is float32 [1, 3, 6], not float32 [1, 7, 6]"]
    assert output_faults(found, wanted, {"boxes": (1, None, 5)})


def shaken(output: Array) -> Array:
    changed: Array = output.copy()
    changed[1:, 0] = np.nextafter(changed[1:, 0], np.float32(np.inf))
    return changed


def reversed_rows(output: Array) -> Array:
    turned: Array = output[::-1].copy()
    return turned


@pytest.mark.parametrize(
    ("change", "most", "words"),
    [
        (dict, 4, []),
        (dict, 2, []),
        (each(shaken), 4, ["differs between equal rows of a batch"]),
        (each(shaken), 2, ["differs between equal rows of a batch"]),
        (
            each(reversed_rows),
            4,
            ["differs between equal rows of a batch", "gives a row of a batch the answer to another one"],
        ),
        (each(reversed_rows), 2, ["gives a row of a batch the answer to another one"]),
        (each(lambda output: output[:1]), 3, ["is [1, 5] for a batch of 3"]),
        (each(shaken), 1, []),
    ],
)
def test_rows_of_a_batch_are_equal_and_apart(tmp_path: Path, change: Change, most: int, words: list[str]) -> None:
    seen, engine = Bench(tmp_path, most).compare(change)
    assert len(seen.rows) == len(words)
    assert all(word in fault for word, fault in zip(words, seen.rows, strict=True))
    assert max(len(batch) for batch in engine.asked) == most


def test_a_missed_deadline_is_reported_once_and_a_kept_one_is_not() -> None:
    missed: list[float] = []
    late, clock = threading.Event(), TurnedClock()

    def on_miss(limit_s: float) -> None:
        missed.append(limit_s)
        late.set()

    with closing(Deadline(on_miss, clock)) as deadline:
        with deadline.within(10.0):
            pass
        clock.turn(20.0)  # between two calls no deadline holds
        with deadline.within(60.0):
            clock.until_waiting()
            clock.turn(59.0)
            clock.until_waiting()
            assert missed == []
            clock.turn(2.0)
            assert late.wait(60.0)
    assert missed == [60.0]
