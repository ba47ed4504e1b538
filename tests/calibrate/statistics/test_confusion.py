"""Confused pairs: those that are planted are found, and chance is not named."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest

from calibrate.statistics.confusion import Pair, confused_pairs

DIGITS = dict.fromkeys(range(10), 50)


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    """At `low`, so many counts or more are as improbable as the split error says: over the nine classes seen."""
    (pair,) = confused_pairs({(6, 8): 20}, {**DIGITS, 9: 0}, 0.05, 0.1)
    as_many = sum(math.comb(50, count) * pair.low**count * (1.0 - pair.low) ** (50 - count) for count in range(20, 51))
    assert as_many == pytest.approx(0.1 * 0.05 / 9, rel=1e-9)


def test_the_worst_come_first() -> None:
    totals = {0: 100, 1: 100, 2: 10}
    pairs = confused_pairs({(0, 1): 40, (1, 0): 60, (1, 2): 40, (2, 0): 10}, totals, 0.05)
    assert [(pair.reference, pair.candidate) for pair in pairs] == [(2, 0), (1, 0), (0, 1), (1, 2)]
    assert pairs[2].low == pairs[3].low


def test_all_of_a_class_may_be_confused() -> None:
    (pair,) = confused_pairs({(2, 0): 10}, {2: 10}, 0.05)
    assert pair.low == pytest.approx(0.0025**0.1)  # error * tolerance, of ten in ten


@pytest.mark.parametrize(
    ("classes", "rates", "n", "tolerance"),
    [
        (10, [0.05] * 9, 60, 0.05),
        (1, [1 / 40] * 40, 40, 1 / 40),  # as many candidate classes as the rates' sum allows
        (1, [1 / 400] * 400, 40, 1 / 40),  # ten times as many
        (3, [0.02] * 10 + [0.3] * 2, 80, 0.02),  # true confusions beside chance: their `low` is not above the rate
    ],
)
def test_pairs_are_named_above_their_rate_in_at_most_the_error_of_runs(
    classes: int, rates: list[float], n: int, tolerance: float
) -> None:
    rng = np.random.default_rng(5)
    runs, error = 400, 0.4
    wrong = 0
    chances = [*rates, max(0.0, 1.0 - sum(rates))]
    for _ in range(runs):
        answers = rng.multinomial(n, chances, size=classes)[:, :-1]
        counts = {(-1 - a, b): int(answers[a, b]) for a, b in zip(*answers.nonzero(), strict=True)}
        pairs = confused_pairs(counts, {-1 - a: n for a in range(classes)}, tolerance, error)
        wrong += any(pair.low > rates[pair.candidate] for pair in pairs)
    assert wrong <= runs * error + 3.0 * math.sqrt(runs * error * (1.0 - error))


def test_a_single_count_names_nothing_of_more_than_one() -> None:
    for of in (2, 20, 1000):
        assert confused_pairs({(6, 8): 1}, {6: of}, 1e-6, 0.4) == ()


def test_nothing_counted_names_nothing() -> None:
    assert confused_pairs({}, {}, 0.05) == ()
    assert confused_pairs({}, DIGITS, 0.05) == ()
    assert confused_pairs({(6, 8): 0, (11, 8): 0}, {6: 0, 1: 5}, 0.05) == ()


@pytest.mark.parametrize(("tolerance", "error"), [(0.0, 0.05), (1.0, 0.05), (0.05, 0.0), (0.05, 0.5)])
def test_impossible_settings_are_refused(tolerance: float, error: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        confused_pairs({}, DIGITS, tolerance, error)


def test_numpy_counts_leave_no_trace() -> None:
    a, b, n = np.int64(6), np.int32(8), np.int64(40)
    assert confused_pairs({(a, b): n}, {a: n}, 0.5) == (Pair(6, 8, 40, 40, 0.025 ** (1 / 40)),)
    (pair,) = confused_pairs({(a, b): n}, {a: n}, 0.5)
    assert [type(value) for value in astuple(pair)] == [int, int, int, int, float]
