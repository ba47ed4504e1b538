"""An interrupted trial measures nothing twice; it measures latencies in turns with float."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from trial_bench import (
    TIMED,
    WARM_UP,
    Compute,
    MakeTrialBench,
    NumpyEngine,
    digit,
    misread,
    read_digits,
    write_video,
)
from turned_clock import TurnedClock

from agent.planning.certificate import Terms, TrialResult
from engines.interface import Array


class Interrupted(Exception):
    pass


def only(trials: dict[str, TrialResult]) -> TrialResult:
    (trial,) = trials.values()
    return trial


def failing(compute: Compute, runs: int) -> Compute:
    """Computes so often, and then raises; once more before that, for the example of its output."""
    left = iter(range(runs + 1))

    def attempt(batch: NDArray[np.float32]) -> Array:
        if next(left, None) is None:
            raise Interrupted
        return compute(batch)

    return attempt


def by_digit(clock: TurnedClock, compute: Compute) -> Compute:
    """Larger digits take longer, so that a latency follows from the frame and not from when it is measured."""

    def timed(batch: NDArray[np.float32]) -> Array:
        clock.turn(1e-4 * digit(batch))
        return compute(batch)

    return timed


def test_an_interrupted_trial_goes_on_where_it_was(
    trial_bench: MakeTrialBench, engine_clock: TurnedClock, tmp_path: Path
) -> None:
    """At the first frames, while latencies are measured, and after; then nothing of it is measured again."""
    digits = [6 if number % 32 == 0 else number % 6 for number in range(240)]
    video = write_video(tmp_path / "short.avi", digits, [number % 50 == 7 for number in range(240)])
    terms = Terms(0.12, 0.25)
    compute = by_digit(engine_clock, misread(lambda number, marked: marked or number == 6, 8))
    whole = trial_bench(terms, video)
    expected, runs = whole.trial(compute)
    assert runs - WARM_UP > 100  # a frame each
    for frame in (1, TIMED, 97):
        whole.journal.finish()
        interrupted = trial_bench(terms, video)
        with pytest.raises(Interrupted):
            interrupted.trial(failing(compute, WARM_UP + frame))
        resumed = trial_bench(terms, video)
        trial, rest = resumed.trial(compute)
        assert trial == expected
        assert rest == runs - frame - (WARM_UP if frame >= TIMED else 0)
        assert resumed.reference.runs == whole.reference.runs - frame

    replayed, none = trial_bench(terms, video).trial(compute)
    assert (replayed, none) == (expected, 0)


def test_a_candidate_of_an_interrupted_search_has_taken_its_part_of_the_error(trial_bench: MakeTrialBench) -> None:
    trial_bench().trial(read_digits, "first")
    resumed = trial_bench().certifier
    assert (resumed.number_of("another"), resumed.number_of("first")) == (2, 1)


def test_latencies_are_medians_of_the_same_frames_after_the_warm_up(
    trial_bench: MakeTrialBench, engine_clock: TurnedClock
) -> None:
    made = trial_bench()
    slow_in_the_end = NumpyEngine(
        engine_clock, read_digits, lambda run: 9.0 if run < WARM_UP or run >= WARM_UP + 50 else 1.0
    )
    trial = only(made.certifier.try_candidate("int8", slow_in_the_end))
    assert (trial.latency_ms, trial.latency_float_ms) == (1.0, 2.0)
    uneven = NumpyEngine(engine_clock, read_digits, lambda run: 1.0 + run % 2)
    assert only(made.certifier.try_candidate("uneven", uneven)).latency_ms == 1.5


def test_candidate_and_float_go_first_in_turns(trial_bench: MakeTrialBench, engine_clock: TurnedClock) -> None:
    order: list[str] = []
    made = trial_bench()

    def noted(name: str) -> Compute:
        def compute(batch: NDArray[np.float32]) -> Array:
            order.append(name)
            return read_digits(batch)

        return compute

    made.float_engine._compute = noted("float")
    candidate = NumpyEngine(engine_clock, noted("int8"))
    order.clear()
    made.certifier.try_candidate("int8", candidate)
    timed = order[2 * WARM_UP : 2 * WARM_UP + 2 * TIMED]
    assert timed == ["int8", "float", "float", "int8"] * (TIMED // 2)
    assert set(order[2 * WARM_UP + 2 * TIMED :]) == {"int8"}
