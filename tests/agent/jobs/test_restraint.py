"""Cap and cooldowns: over restarts, over clocks that are set, and over disks that refuse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from kept import kept_in, refusing
from turned_clock import TurnedClock
from unexpected import unexpected

from agent.common.errors import AgentError
from agent.jobs.limits import AutomationLimits

Limits = Callable[..., AutomationLimits]

HOUR, DAY = 3600.0, 86400.0
JOB_PAUSE_S, SWITCH_PAUSE_S = 600.0, 120.0


class BoardClock(TurnedClock):
    def set_by(self, seconds: float) -> None:
        self.set_wall(self.wall_s() + seconds)

    def boot(self) -> None:
        self._monotonic_s = 3.0


@pytest.fixture
def clock() -> BoardClock:
    return BoardClock(50.0)


@pytest.fixture
def limits(tmp_path: Path, clock: BoardClock) -> Limits:
    """Makes the limits of one more process."""

    def make(per_day: int = 2, on_error: Callable[[AgentError], None] = unexpected) -> AutomationLimits:
        return AutomationLimits(kept_in(tmp_path), per_day, JOB_PAUSE_S, SWITCH_PAUSE_S, 3, on_error, clock)

    return make


@pytest.mark.parametrize("restarts", [False, True])
def test_jobs_are_capped_by_the_day(limits: Limits, clock: BoardClock, restarts: bool) -> None:
    restraint, taken, passed = limits(), [], 0.0
    for hour in (0.0, 1.0, 2.0, 23.9, 24.1, 24.2, 25.1):
        clock.turn(hour * HOUR - passed)
        passed = hour * HOUR
        if restarts:
            restraint = limits()
        taken.append(restraint.count_job())
    assert taken == [True, True, False, False, True, False, True]


def test_a_cap_that_was_lowered_counts_the_newest_jobs(limits: Limits, clock: BoardClock) -> None:
    before = limits(per_day=4)
    for _ in range(4):
        assert before.count_job()
        clock.turn(HOUR)
    lowered = limits(per_day=1)
    clock.turn(21.5 * HOUR)
    assert not lowered.count_job()  # though the first of the four is older than a day
    clock.turn(2 * HOUR)
    assert lowered.count_job()


@pytest.mark.parametrize("restarts", [False, True])
def test_pauses_last_as_long_as_they_should(limits: Limits, clock: BoardClock, restarts: bool) -> None:
    restraint = limits()
    assert (restraint.may_start, restraint.may_switch) == (True, True)
    restraint.pause_jobs()
    restraint.pause_switches()
    waited = {"jobs": 0.0, "switches": 0.0}
    for _ in range(100):
        if restarts:
            restraint = limits()
        waited["jobs"] += 0.0 if restraint.may_start else 10.0
        waited["switches"] += 0.0 if restraint.may_switch else 10.0
        clock.turn(10.0)
    assert waited["jobs"] == pytest.approx(JOB_PAUSE_S, abs=10.0)
    assert waited["switches"] == pytest.approx(SWITCH_PAUSE_S, abs=10.0)


@pytest.mark.parametrize("step_s", [-10 * 365 * DAY, HOUR])
def test_a_clock_that_is_set_while_the_daemon_runs_opens_no_loophole_at_its_restart(
    limits: Limits, clock: BoardClock, step_s: float
) -> None:
    """As on a board without a battery: it starts in 1970, and NTP sets its clock minutes later."""
    restraint = limits(per_day=1)
    restraint.count_job()
    restraint.pause_jobs()
    restraint.pause_switches()
    clock.set_by(step_s)
    clock.turn(1.0)
    restraint.may_start  # noqa: B018  # asked ten times a second, and so it notices
    clock.boot()
    clock.turn(60.0)
    again = limits(per_day=1)
    assert (again.count_job(), again.may_start, again.may_switch) == (False, False, False)
    clock.turn(SWITCH_PAUSE_S - 61.0)
    assert again.may_switch
    clock.turn(JOB_PAUSE_S - SWITCH_PAUSE_S)
    assert again.may_start
    clock.turn(DAY)
    assert again.count_job()


def test_a_clock_that_is_set_back_between_two_processes_makes_nothing_wait_longer_than_its_pause(
    limits: Limits, clock: BoardClock
) -> None:
    """A time from the future counts as now, once: else it would hold again after each restart."""
    before = limits(per_day=1)
    before.count_job()
    before.pause_jobs()
    clock.boot()
    clock.set_by(-23 * HOUR)
    waited = 0.0
    while not limits().may_start:
        clock.turn(30.0)
        waited += 30.0
    assert waited == JOB_PAUSE_S
    while not limits(per_day=1).count_job():
        clock.turn(HOUR)
        waited += HOUR
    assert waited == pytest.approx(DAY, abs=HOUR)


def test_on_a_board_without_a_clock_a_stop_does_not_begin_anew_at_each_boot(limits: Limits, clock: BoardClock) -> None:
    errors: list[AgentError] = []
    before = limits(per_day=1, on_error=errors.append)
    before.count_job()
    before.pause_jobs()
    before.pause_switches()
    for _ in range(3):
        before.count_rollback()
    clock.boot()
    clock.set_by(-2 * DAY)
    again = limits(per_day=1)
    assert (again.may_start, again.may_switch, again.count_job()) == (True, True, True)


@pytest.mark.parametrize("restarts", [False, True])
def test_after_three_rollbacks_in_a_day_nothing_starts_by_itself(
    limits: Limits, clock: BoardClock, restarts: bool
) -> None:
    errors: list[AgentError] = []
    restraint, may = limits(on_error=errors.append), []
    for _ in range(4):
        clock.turn(HOUR)
        restraint.count_rollback()
        if restarts:
            restraint = limits(on_error=errors.append)
        may.append((restraint.may_start, restraint.may_switch))
    assert may == [(True, True), (True, True), (False, False), (False, False)]
    # Once, and again at each of the two restarts since.
    assert [error.code for error in errors] == ["recalibration.rollback_loop"] * (3 if restarts else 1)
    clock.turn(22.5 * HOUR)  # the second is a day old, the third is not
    assert restraint.may_start
    restraint.count_rollback()
    assert not restraint.may_start
    assert [error.code for error in errors] == ["recalibration.rollback_loop"] * (4 if restarts else 2)
    restraint.clear_rollbacks()
    assert restraint.may_start
    assert limits().may_start


def test_a_full_disk_is_reported_once_and_the_limits_hold_all_the_same(limits: Limits, clock: BoardClock) -> None:
    errors: list[AgentError] = []
    restraint = limits(1)
    restraint.state.report_to(errors.append)
    with refusing(restraint.state):
        assert (restraint.count_job(), restraint.count_job()) == (True, False)
        restraint.pause_jobs()
        clock.set_by(HOUR)
        assert not restraint.may_start
    assert [error.code for error in errors] == ["state.write"]
    assert "the limits of the day" in str(errors[0])
