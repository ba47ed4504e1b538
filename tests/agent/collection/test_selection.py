"""The selection of frames fills a calibration in time, and with varied frames where there are any."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.collection.selection import (
    BRIGHTNESS,
    CLASS,
    COLUMNS,
    DUPLICATE,
    EARLY,
    NOTHING,
    OTHERS,
    ROWS,
    TAKEN,
    FrameSelector,
    LumaGrid,
)

FRAMES, WITHIN_S, ALERT_S = 96, 60.0, 0.2
NEEDED = FRAMES * 4 // 3
Look = Callable[[int], tuple[LumaGrid, Collection[int]]]


def looks(level: float, seed: int = 0, contrast: float = 40.0) -> LumaGrid:
    """A frame of mean brightness `level` that is like no other of another seed."""
    around = np.random.default_rng(seed).uniform(-contrast, contrast, (ROWS, COLUMNS))
    return LumaGrid(np.clip(level + around - around.mean(), 0.0, 255.0).astype(np.uint8))


STILL = looks(100.0)


def still(number: int) -> tuple[LumaGrid, Collection[int]]:
    """Nothing but a camera's noise."""
    noise = np.random.default_rng(number).integers(0, 3, (ROWS, COLUMNS))
    return LumaGrid((STILL.luma + noise).astype(np.uint8)), ()


def identical(_: int) -> tuple[LumaGrid, Collection[int]]:
    return STILL, ()


def lively(number: int) -> tuple[LumaGrid, Collection[int]]:
    return looks(100.0, number), ()


def run(selection: FrameSelector, look: Look, seconds: float, hurried: bool = False, begin: float = 0.0) -> list[str]:
    """Return the outcome of every frame at the alert pace."""
    count = round(seconds / ALERT_S)
    return [selection.consider(begin + n * ALERT_S, *look(n), hurried=hurried) for n in range(count)]


def fills_at(outcomes: list[str]) -> float:
    """Seconds until enough frames are taken."""
    taken = np.cumsum([outcome == TAKEN for outcome in outcomes])
    assert taken[-1] >= NEEDED, "never filled"
    return float(np.argmax(taken >= NEEDED)) * ALERT_S


# ---- filled in time


@pytest.mark.parametrize("look", [still, lively, identical], ids=["still", "lively", "identical"])
@pytest.mark.parametrize("hurried", [False, True])
def test_any_scene_fills_a_calibration_in_time(look: Look, hurried: bool) -> None:
    assert fills_at(run(FrameSelector(FRAMES, WITHIN_S), look, 70.0, hurried)) <= WITHIN_S + 1.0


@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25)
def test_no_mixture_of_scenes_starves_it(seed: int) -> None:
    """Lights and classes that come and go, twins of what was there before, and a clock that is set back."""
    rng = np.random.default_rng(seed)
    levels, classes = rng.uniform(0.0, 255.0, 5), rng.integers(0, 4, (5, 2))
    selection, ts, taken = FrameSelector(FRAMES, WITHIN_S), 0.0, 0
    scene, lasting = 0, rng.uniform(0.01, 0.3)
    for _ in range(round((WITHIN_S + 1.0) / ALERT_S)):
        scene = int(rng.integers(5)) if rng.uniform() < lasting else scene
        ts += ALERT_S
        grid = looks(levels[scene], int(rng.integers(3)))
        taken += selection.consider(ts, grid, classes[scene].tolist()) == TAKEN
    assert taken >= NEEDED


def test_a_lively_scene_does_not_fill_it_at_once_unless_somebody_waits() -> None:
    calm = run(FrameSelector(FRAMES, WITHIN_S), lively, 70.0)
    hurried = run(FrameSelector(FRAMES, WITHIN_S), lively, 70.0, hurried=True)
    assert fills_at(calm) >= WITHIN_S / 3
    assert fills_at(hurried) == pytest.approx(NEEDED * ALERT_S, abs=1.0)
    quick = FrameSelector(FRAMES, WITHIN_S)
    outcomes = [quick.consider(n * 0.02, *lively(n)) for n in range(3000)]
    assert EARLY in outcomes
    assert np.argmax(np.cumsum([outcome == TAKEN for outcome in outcomes]) >= NEEDED) * 0.02 >= WITHIN_S / 2 - 1.0


def test_rare_frames_are_all_taken() -> None:
    selection = FrameSelector(FRAMES, WITHIN_S)
    assert {selection.consider(2.0 * n, *still(n)) for n in range(FRAMES)} == {TAKEN}


def test_frames_are_taken_all_along() -> None:
    outcomes = run(FrameSelector(FRAMES, WITHIN_S), still, WITHIN_S)
    taken_at = np.flatnonzero([outcome == TAKEN for outcome in outcomes]) * ALERT_S
    assert np.diff(taken_at).max() <= 2.0 * WITHIN_S / NEEDED
    assert np.histogram(taken_at, 6, (0.0, WITHIN_S))[0].min() >= NEEDED // 8


def test_after_a_pause_not_everything_is_taken_for_long() -> None:
    selection = FrameSelector(FRAMES, WITHIN_S)
    run(selection, still, 5.0)
    late = run(selection, still, 20.0, begin=10_000.0)
    assert late[:10].count(TAKEN) == 10
    assert late[50:].count(DUPLICATE) > 10


def test_a_clock_that_is_set_back_stops_nothing() -> None:
    selection = FrameSelector(FRAMES, WITHIN_S)
    run(selection, still, 20.0, begin=5000.0)
    assert run(selection, still, 20.0).count(TAKEN) >= NEEDED * 20.0 / WITHIN_S - 2
    assert selection.counts.span_s == pytest.approx(40.0, abs=1.0)


def test_once_there_is_enough_an_hour_more_of_the_same_adds_little() -> None:
    selection, taken = FrameSelector(FRAMES, WITHIN_S), [0]
    for hour in range(2):
        for n in range(3600):
            selection.consider(3600.0 * hour + n, *still(n))
        taken.append(selection.counts.taken)
    assert NEEDED < taken[1] < 6 * NEEDED
    assert taken[2] < 1.25 * taken[1]
    new = [selection.consider(7200.0 + n, *lively(n + 1)) for n in range(20)]
    assert new.count(TAKEN) == 20  # what is new still is
    assert selection.counts.taken == taken[2] + 20


# ---- better than that


def test_a_twin_gives_way_to_what_is_new() -> None:
    """Every tenth frame shows something, of a scene that stands still."""
    selection = FrameSelector(FRAMES, WITHIN_S)
    for n in range(300):
        look = looks(100.0, 1000 + n) if n % 10 == 0 else still(n)[0]
        outcome = selection.consider(n * ALERT_S, look, ())
        assert outcome == TAKEN or n % 10
    assert selection.counts.outcomes[DUPLICATE] > 100


def test_an_exact_repeat_is_nothing_new_even_in_a_hurry() -> None:
    selection = FrameSelector(FRAMES, WITHIN_S)
    assert selection.consider(0.0, STILL, (), hurried=True) == TAKEN
    assert selection.consider(0.01, STILL, (), hurried=True) == DUPLICATE
    assert selection.consider(0.02, still(1)[0], (), hurried=True) == TAKEN


def test_a_twin_of_a_frame_some_time_ago_is_no_news_either() -> None:
    """Three looks take turns: no more of them are taken than the schedule asks for."""
    selection = FrameSelector(FRAMES, WITHIN_S)
    outcomes = run(selection, lambda n: (looks(100.0, n % 3), ()), WITHIN_S)
    assert outcomes.count(TAKEN) <= NEEDED + 3
    assert outcomes.count(DUPLICATE) >= len(outcomes) - NEEDED - 3


def shares(show: Callable[[int], tuple[float, Collection[int]]], reason: str) -> tuple[FrameSelector, FrameSelector]:
    """Select among lively frames of these brightnesses and classes, once with time and once in a hurry."""
    chosen, plain = FrameSelector(FRAMES, WITHIN_S), FrameSelector(FRAMES, WITHIN_S)
    for n in range(round(WITHIN_S / ALERT_S)):
        level, classes = show(n)
        chosen.consider(n * ALERT_S, looks(level, n, 20.0), classes)
        plain.consider(n * ALERT_S, looks(level, n, 20.0), classes, hurried=True)
    assert chosen.counts.outcomes[reason] > 10
    assert reason not in plain.counts.outcomes
    return chosen, plain


def test_a_light_in_excess_is_thinned() -> None:
    chosen, plain = shares(lambda n: (40.0 if n % 12 == 0 else 200.0 if n % 12 == 6 else 100.0, ()), BRIGHTNESS)
    rare = [1, 6]
    assert sum(chosen.counts.brightness[place] for place in rare) >= 48  # nearly all of the 50
    share, plainly = (max(each.counts.brightness) / each.counts.taken for each in (chosen, plain))
    assert share < plainly - 0.1


def test_a_class_in_excess_is_thinned() -> None:
    """Class 0 is everywhere; a frame that shows a rare one beside it counts for the rare one."""
    chosen, plain = shares(lambda n: (100.0, (0, 1) if n % 10 == 0 else (2,) if n % 10 == 5 else (0,)), CLASS)
    assert [chosen.counts.classes[rare] for rare in (1, 2)] == [30, 30]
    share, plainly = (each.counts.classes[0] / each.counts.taken for each in (chosen, plain))
    assert share < plainly - 0.05


def test_empty_frames_are_a_class_of_their_own() -> None:
    chosen, _ = shares(lambda n: (100.0, (n % 20 // 10,) if n % 10 == 0 else ()), CLASS)
    assert [chosen.counts.classes[rare] for rare in (0, 1)] == [15, 15]
    assert chosen.counts.classes[NOTHING] < 240


# ---- bounded, and accounted for


def test_every_frame_is_accounted_for() -> None:
    selection = FrameSelector(FRAMES, WITHIN_S)
    outcomes = run(selection, lambda n: lively(n) if n % 7 == 0 else still(n), 50.0)
    counts = selection.counts
    assert counts.outcomes.total() == len(outcomes)
    assert counts.taken == outcomes.count(TAKEN) == sum(counts.brightness) == sum(counts.classes.values())
    assert counts.span_s == pytest.approx(49.8)


def test_a_network_with_any_number_of_classes_fills_no_memory() -> None:
    selection = FrameSelector(FRAMES, WITHIN_S)
    for n in range(2000):
        selection.consider(float(n), STILL, (3 * n, 3 * n + 1, 3 * n + 2))
    counts = selection.counts
    assert len(counts.classes) == 257
    assert counts.classes[OTHERS] > 0
