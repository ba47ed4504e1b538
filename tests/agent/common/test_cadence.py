"""Periods recur, and do not come in a burst."""

from __future__ import annotations

from agent.common.timing import PeriodicTimer


def test_a_turn_that_came_late_does_not_put_the_next_off() -> None:
    cadence = PeriodicTimer(5.0, 0.0)
    assert cadence.due(6.0)
    assert cadence.due(10.0)


def test_missed_periods_are_not_made_up_for() -> None:
    cadence = PeriodicTimer(5.0, 0.0)
    assert cadence.due(60.0)
    assert not cadence.due(64.9)
    assert cadence.due(65.0)


def test_another_period_begins_at_once() -> None:
    cadence = PeriodicTimer(3600.0, 0.0)
    cadence.set_period(2.0, 10.0)
    assert not cadence.due(11.9)
    assert cadence.due(12.0)
    cadence.set_period(2.0, 13.9)
    assert cadence.due(14.0), "the same one goes on"
