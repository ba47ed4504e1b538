"""Totals of a whole stream are bounded from the few frames that were drawn and labelled."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from calibrate.statistics.evidence import Interval
from calibrate.statistics.sampling import MIN_LABELS, STRATA, SampledTotals, Strata

RIGHT = np.array([0.6, 0.8, 0.95, 0.98, 0.99, 1.0])  # by stratum, from the least sure
RIGHT_WHERE_UNSURE = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 0.82])  # frames that look sure are drawn seldom
RATE = 0.1
ACCURACY = [1.0, 0.0], [0.0, 1.0]  # right answers over answers


def stream(
    seed: int, later: float, rates: NDArray[np.float64] = RIGHT
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The stratum and the score of each frame; half-way, so many fewer are right."""
    chance, frames = np.random.default_rng(seed), 1500
    strata = chance.integers(STRATA, size=frames)
    right = rates[strata] * np.where(np.arange(frames) < frames // 2, 1.0, later)
    return strata, (chance.random(frames) < right).astype(float)


def looks(
    seed: int, later: float, is_stratified: bool = True, rates: NDArray[np.float64] = RIGHT
) -> list[tuple[Interval, float]]:
    """The interval at each label, and what all frames so far have scored."""
    strata, scores = stream(seed, later, rates)
    draws = np.random.default_rng(1000 + seed).random(len(scores))
    rule, totals, seen, found = Strata([1.0, 2.0, 3.0, 4.0, 5.0]), SampledTotals(1, 2), np.zeros(STRATA), []
    for frame, stratum in enumerate(strata if is_stratified else np.zeros_like(strata)):
        rule.see(stratum)
        seen[stratum] += 1.0
        if draws[frame] > 5.0 * RATE:  # above any probability
            continue
        probability = rule.probability(stratum, RATE) if is_stratified else RATE
        if draws[frame] < probability:
            totals.add(stratum, 1.0, probability, seen.tolist(), [[scores[frame], 1.0]])
            rule.learn(stratum, scores[frame])
            found.append((totals.ratio(0, *ACCURACY), float(scores[: frame + 1].mean())))
    return found


@pytest.mark.parametrize(
    ("rates", "later"),
    [(RIGHT, 0.8), (RIGHT_WHERE_UNSURE, 1.0), (np.full(STRATA, 0.9), 1.0)],
    ids=["the stream changes", "only frames that look sure are wrong", "sureness says nothing"],
)
def test_the_truth_is_inside_at_every_look(rates: NDArray[np.float64], later: float) -> None:
    missed = [
        any(not each.low <= true <= each.high for each, true in looks(seed, later, rates=rates)) for seed in range(40)
    ]
    assert sum(missed) <= 6  # of 40 at 5 %: more by chance once in 300 times


def test_strata_make_the_interval_narrower() -> None:
    drawn, even = (
        np.mean([each[-1][0].high - each[-1][0].low for each in (looks(seed, 1.0, kind) for seed in range(10))])
        for kind in (True, False)
    )
    assert drawn < 0.9 * even


def test_few_labels_bound_nothing() -> None:
    totals = SampledTotals(1, 2)
    for number in range(1, MIN_LABELS):
        totals.add(5, 1.0, 0.5, [0.0] * 5 + [2.0 * number], [[1.0, 1.0]])
    assert totals.ratio(0, *ACCURACY) == Interval(1.0, 0.0, 1.0, MIN_LABELS - 1)
    assert totals.difference(0, ACCURACY, ACCURACY) == Interval(0.0, -1.0, 1.0, MIN_LABELS - 1)
    assert totals.ratio(0, [1.0, 0.0], [0.0, 0.0]) == Interval(0.0, 0.0, 1.0, 0)


def test_a_difference_of_ratios_is_bounded_tighter_than_each_where_both_err_alike() -> None:
    chance = np.random.default_rng(2)
    totals = SampledTotals(1, 3)
    for number in range(1, 301):
        first = float(chance.random() < 0.8)
        second = first if chance.random() < 0.95 else 1.0 - first
        totals.add(0, 1.0, 0.05, [20.0 * number, *[0.0] * 5], [[first, second, 1.0]])
    loss = totals.difference(0, ([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]), ([0.0, 1.0, 0.0], [0.0, 0.0, 1.0]))
    alone = totals.ratio(0, [1.0, 0.0, 0.0], [0.0, 0.0, 1.0])
    assert loss.low <= 0.8 - (0.8 * 0.95 + 0.2 * 0.05) <= loss.high
    assert loss.high - loss.low < 0.75 * (alone.high - alone.low)


def test_two_streams_are_bounded_together() -> None:
    """Each weighs as it has seconds: half of the labels are of a tenth of the time."""
    whole = SampledTotals(1, 2)
    for seconds, score in ((18.0, 1.0), (2.0, 0.0)):
        part = SampledTotals(1, 2)
        for number in range(1, 101):
            part.add(0, 1.0, 1.0 / seconds, [seconds * number, *[0.0] * 5], [[score, 1.0]])
        whole += part
    found = whole.ratio(0, *ACCURACY)
    assert math.isclose(found.estimate, 0.9, abs_tol=0.01)
    assert found.n == 200


@pytest.mark.parametrize("cuts", [[1.0, 2.0], [1.0, 3.0, 2.0, 4.0, 5.0]])
def test_cuts_that_part_no_strata_are_refused(cuts: list[float]) -> None:
    with pytest.raises(ValueError, match="ascending cuts"):
        Strata(cuts)


def test_unsure_frames_are_drawn_more_often_and_as_many_in_all_as_expected() -> None:
    rule, chance = Strata([1.0, 2.0, 3.0, 4.0, 5.0]), np.random.default_rng(3)
    for _ in range(300):
        for stratum in range(STRATA):
            rule.see(stratum)
            rule.learn(stratum, float(chance.random() < RIGHT[stratum]))
    found = [rule.probability(stratum, RATE) for stratum in range(STRATA)]
    assert found[0] > 2.0 * found[3] > 0.0
    assert math.isclose(np.mean(found), RATE, rel_tol=1e-6)
