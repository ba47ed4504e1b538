"""The guarantees of the bounds on a mean loss, worked out on small sets of losses and measured on large ones."""

from __future__ import annotations

import copy
import math
from collections import Counter
from itertools import combinations_with_replacement
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrate.statistics.loss_bound import _MEANS, LossBound, frames_needed

NEVER = 1e-300  # an error that no capital here reaches: nobody stops playing


def check_fair(bound: LossBound, left: Counter[float], mean: float) -> None:
    """After any losses, no capital is expected to rise with the next draw, for every m that the mean allows."""
    remaining = left.total()
    if remaining == 0:
        return
    expected = {"_above": 0.0, "_below": 0.0}
    for loss, copies in list(left.items()):
        after = copy.deepcopy(bound)
        after.update(loss)
        for side in expected:
            expected[side] += copies / remaining * getattr(after, side).capital
        check_fair(after, left - Counter([loss]), mean)
    for side, sign in (("_above", 1.0), ("_below", -1.0)):
        allowed = sign * (mean - _MEANS) >= -1e-12
        today = getattr(bound, side).capital
        assert (expected[side] <= today * (1.0 + 1e-9))[allowed].all()


@pytest.mark.parametrize("size", [2, 3, 5])
def test_draws_without_replacement_never_favour_a_gambler_whose_mean_is_true(size: int) -> None:
    """Every order of every small set of losses, step by step: so at every rule for stopping, too."""
    for losses in combinations_with_replacement((0.0, 0.4, 1.0), size):
        check_fair(LossBound(NEVER), Counter(losses), sum(losses) / size)


@given(st.lists(st.floats(0.0, 1.0), max_size=20), st.sampled_from([0.004, 0.05, 0.3]))
def test_independent_draws_never_favour_a_gambler_whose_mean_is_true(past: list[float], mean: float) -> None:
    """For the worst null, losses of 0 or 1: at its own mean, the expected capital stays as it is or falls."""
    bound = LossBound(NEVER)
    for loss in past:
        bound.update(loss)
    lost, kept = copy.deepcopy(bound), copy.deepcopy(bound)
    lost.update(1.0)
    kept.update(0.0)
    at = int(np.searchsorted(_MEANS, mean))
    assert _MEANS[at] == mean
    for before, one, zero in ((bound._above, lost._above, kept._above), (bound._below, lost._below, kept._below)):
        expected = mean * one.capital[at] + (1.0 - mean) * zero.capital[at]
        assert expected == pytest.approx(before.capital[at], rel=1e-9)


@pytest.mark.parametrize(("max_loss", "least", "most"), [(0.05, 90, 105), (0.005, 919, 1050)])
def test_frames_without_a_loss(max_loss: float, least: int, most: int) -> None:
    """The least that anything can do: (1 - m)**n <= error."""
    assert least <= frames_needed(max_loss, 0.01) <= most


@pytest.mark.parametrize("error", [0.3, 0.01])
@pytest.mark.parametrize("max_loss", [0.004, 0.02, 0.02017, 0.05, 0.3, 0.9, 0.9999])
def test_frames_needed_is_when_the_bound_gets_there(max_loss: float, error: float) -> None:
    bound = LossBound(error)
    while bound.upper > max_loss:
        bound.update(0.0)
    assert bound.n == frames_needed(max_loss, error)


@given(st.lists(st.floats(0.0, 1.0), max_size=40))
def test_bounds_only_ever_tighten(losses: list[float]) -> None:
    bound = LossBound(0.3)
    upper, lower = bound.upper, bound.lower
    assert (bound.n, bound.mean, lower, upper) == (0, 0.0, 0.0, 1.0)
    for loss in losses:
        bound.update(loss)
        assert bound.upper <= upper
        assert bound.lower >= lower
        upper, lower = bound.upper, bound.lower
    assert bound.n == len(losses)
    assert bound.mean == pytest.approx(np.mean(losses) if losses else 0.0)


def refuted(side: float, losses: np.ndarray, mean: float, error: float) -> bool:
    """Whether the gambler against "at least `mean`" (side 1) or "at most" (-1) ever reaches 1 / error."""
    if side > 0.0:
        parts = {bet / (1.0 - mean): part for bet, part in ((0.98, 0.5), (0.75, 0.25), (0.5, 0.15), (0.3, 0.1))}
    else:
        parts = {excess / (1.0 - mean): 1.0 / 3.0 for excess in (1.0, 5.0, 20.0)}
    total = 0.0
    for n, loss in enumerate(losses):
        if side * (n * mean - total) >= 0.0:
            largest = math.inf if side > 0.0 else 0.5 / mean
            parts = {bet: part * (1.0 + min(bet, largest) * side * (mean - loss)) for bet, part in parts.items()}
        if sum(parts.values()) >= 1.0 / error:
            return True
        total += loss
    return False


@pytest.mark.parametrize("rate", [0.0, 0.003, 0.1, 0.5])
def test_the_bounds_are_exact_to_a_step_of_the_grid(rate: float) -> None:
    losses = (np.random.default_rng(4).random(400) < rate) * 0.7
    bound = LossBound(0.01)
    for loss in losses:
        bound.update(loss)
    assert all(refuted(1.0, losses, mean, 0.01) for mean in np.linspace(bound.upper, 0.999, 20))
    assert not refuted(1.0, losses, bound.upper / 1.0101, 0.01)
    assert all(refuted(-1.0, losses, mean, 0.01) for mean in np.linspace(1e-4, bound.lower, 20) if bound.lower)
    assert not refuted(-1.0, losses, max(bound.lower, 1e-4) * 1.0101, 0.01)


@pytest.mark.parametrize("loss", [-0.1, 1.1, float("nan")])
def test_losses_that_would_void_the_guarantee_are_refused(loss: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        LossBound(0.05).update(loss)


@pytest.mark.parametrize("error", [0.0, 1.0, float("nan")])
def test_impossible_errors_are_refused(error: float) -> None:
    with pytest.raises(ValueError, match="error"):
        LossBound(error)
    with pytest.raises(ValueError, match="error"):
        frames_needed(0.05, error)


@pytest.mark.parametrize("max_loss", [-0.1, 0.0, 5e-5, 1.0, float("nan")])
def test_losses_that_no_number_of_frames_certifies_are_refused(max_loss: float) -> None:
    with pytest.raises(ValueError, match="max_loss"):
        frames_needed(max_loss, 0.05)


def test_numpy_values_leave_no_trace() -> None:
    bound = LossBound(np.float64(0.5))
    for loss in (np.float32(0.5), np.float64(0.25), np.bool_(True)):
        bound.update(cast(float, loss))
    assert {type(value) for value in (bound.mean, bound.upper, bound.lower)} == {float}
    assert type(frames_needed(np.float64(0.05), np.float64(0.01))) is int
