"""The observation budget: what is spent on average, faster when it matters, and paid back."""

from __future__ import annotations

import numpy as np
import pytest

from agent.monitoring.observation_budget import ObservationBudget

FPS, INFERENCE_S, OBSERVATION_S = 30, 0.01, 0.02  # the reference takes twice as long as the engine
HOUR = 3600 * FPS


def watch(budget: ObservationBudget, frames: int, start: int = 0, cost_s: float = OBSERVATION_S) -> list[float]:
    """Capture times of the observed frames, of so many."""
    seen = []
    for number in range(start, start + frames):
        budget.earn(INFERENCE_S)
        if budget.due(number / FPS):
            seen.append(number / FPS)
            budget.spend(cost_s)
    return seen


def made(share: float | None = 0.02, period_s: float = 1.0, burst: int = 100) -> ObservationBudget:
    return ObservationBudget(share, period_s, 0.2, burst)


@pytest.mark.parametrize("share", [0.005, 0.01, 0.02])
def test_no_more_than_the_share_is_spent_at_random_times(share: float) -> None:
    budget = made(share)
    gaps = np.diff(watch(budget, HOUR))
    assert budget.spent_share == pytest.approx(share, rel=0.02)
    assert gaps.mean() == pytest.approx(OBSERVATION_S / INFERENCE_S / share / FPS, rel=0.03)
    assert gaps.std() > 0.2 * gaps.mean()


def test_a_cheap_reference_is_asked_no_more_often_than_the_period_says() -> None:
    budget = made()
    gaps = np.diff(watch(budget, HOUR, cost_s=0.001))
    assert gaps.mean() == pytest.approx(1.0, rel=0.05)
    assert budget.spent_share < 0.01


def test_an_alert_is_quick_and_is_paid_back_while_the_scene_is_looked_at() -> None:
    budget = made()
    normal = len(watch(budget, HOUR)) / 3600.0
    budget.set_pace(alert=True)
    burst = watch(budget, 10 * FPS, HOUR)
    assert len(burst) == pytest.approx(50, abs=12)
    assert budget.debt_s == pytest.approx(len(burst) * OBSERVATION_S, rel=0.1)
    budget.set_pace(alert=False)
    after = watch(budget, 60 * FPS, HOUR + 10 * FPS)
    assert len(after) / 60.0 == pytest.approx(normal / 2.0, rel=0.4)
    watch(budget, HOUR, HOUR + 70 * FPS)
    assert budget.debt_s == 0.0
    assert budget.spent_share == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("cost_s", [0.0, 20.0 * OBSERVATION_S])
def test_observations_that_fail_are_paid_for_and_say_nothing_of_what_one_takes(cost_s: float) -> None:
    budget = made(burst=1000)
    watch(budget, HOUR)
    budget.set_pace(alert=True)
    failed, ts = 0, 3600.0
    while failed < 20:
        budget.earn(INFERENCE_S)
        if budget.due(ts):
            budget.spend(cost_s, failed=True)
            failed += 1
        ts += 1 / FPS
    assert budget.debt_s == pytest.approx(20 * cost_s, rel=0.1)
    burst = watch(budget, 10 * FPS, round(ts * FPS))
    assert len(burst) == pytest.approx(50, abs=12)  # at the alert's pace, as had there been no fault


def test_debt_has_a_limit_from_which_on_the_pace_is_normal() -> None:
    budget = made(burst=20)
    budget.set_pace(alert=True)
    watch(budget, HOUR)
    assert budget.debt_s <= 21 * OBSERVATION_S
    assert budget.spent_share == pytest.approx(0.02, rel=0.05)


def test_an_observer_that_rests_saves_up_next_to_nothing() -> None:
    budget = made()
    watch(budget, FPS)
    for _ in range(HOUR):
        budget.earn(INFERENCE_S)  # an outage: nothing is asked for
    assert len(watch(budget, 10 * FPS, HOUR)) <= 6


def test_without_a_share_the_periods_alone_count() -> None:
    budget = made(share=None)
    assert len(watch(budget, 60 * FPS, cost_s=1.0)) == pytest.approx(60, rel=0.15)
    budget.set_pace(alert=True)
    assert len(watch(budget, 60 * FPS, 60 * FPS, cost_s=1.0)) == pytest.approx(300, rel=0.15)
    assert budget.debt_s == 0.0


@pytest.mark.parametrize("slow_s", [1.0, 20.0])
def test_a_slow_observation_does_not_stop_the_others(slow_s: float) -> None:
    """The machine was busy, or the engine was warming up: it is owed, and the scene is looked at."""
    budget = made()
    assert budget.due(0.0)
    budget.spend(slow_s)
    early = watch(budget, 120 * FPS, 1)
    watch(budget, HOUR, 120 * FPS)
    while not budget.due(3800.0):
        budget.earn(INFERENCE_S)
    budget.spend(slow_s)
    late = watch(budget, 60 * FPS, 3800 * FPS + 1)
    assert len(early) >= 5
    assert len(late) >= 5
    assert budget.debt_s > 0.0


@pytest.mark.parametrize("alert", [False, True])
@pytest.mark.parametrize("slow_s", [1.0, 10.0])
@pytest.mark.parametrize("well_s", [0, 600])
def test_an_observer_that_fails_slowly_for_ever_takes_no_more_than_the_share(
    alert: bool, slow_s: float, well_s: int
) -> None:
    """From the first observation on, or after ten minutes; with the pauses after a fault, which end at 30 s."""
    budget, free, tried = made(), 0.0, 0
    watch(budget, well_s * FPS)
    budget.set_pace(alert)
    for second in range(well_s, 86400):
        budget.earn(INFERENCE_S * FPS)
        if second >= free and budget.due(float(second)):
            budget.spend(slow_s, failed=True)
            tried += 1
            free = second + slow_s + 30.0
    assert budget.spent_share == pytest.approx(0.02, rel=0.05)
    assert tried * slow_s > 0.9 * 0.02 * 86400 * INFERENCE_S * FPS


def test_no_failure_runs_further_ahead_than_two_bursts_and_one_observation() -> None:
    budget, most_s = made(), 0.0
    watch(budget, 60 * FPS)
    budget.set_pace(alert=True)
    for number in range(60 * FPS, HOUR):
        budget.earn(INFERENCE_S)
        if budget.due(number / FPS):
            budget.spend(5.0, failed=True)
        most_s = max(most_s, budget._spent_s - 0.02 * budget._inferred_s)
    assert 5.0 < most_s <= 2 * 100 * OBSERVATION_S + 5.0
