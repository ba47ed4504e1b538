"""Cap and cooldowns: over restarts, over clocks that are set, and over disks that refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import agent.jobs.limits as restraint_module
from agent.common.errors import AgentError
from agent.jobs.limits import AutomationLimits

HOUR, DAY = 3600.0, 86400.0
JOB_PAUSE_S, SWITCH_PAUSE_S = 600.0, 120.0


class Clocks:
    """In place of the module `time`: `pass_s` moves both clocks on, `set_by` the wall clock alone."""

    def __init__(self) -> None:
        self._monotonic_s, self._wall_s = 50.0, 1.7e9

    def monotonic(self) -> float:
        return self._monotonic_s

    def time(self) -> float:
        return self._wall_s

    def pass_s(self, seconds: float) -> None:
        self._monotonic_s += seconds
        self._wall_s += seconds

    def set_by(self, seconds: float) -> None:
        self._wall_s += seconds

    def boot(self) -> None:
        self._monotonic_s = 3.0


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Clocks:
    made = Clocks()
    monkeypatch.setattr(restraint_module, "time", made)
    return made


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "restraint.json"


def told(error: AgentError) -> None:
    raise AssertionError(f"nothing was to be told: {error}")


def restraint_of(
    path: Path | None, per_day: int = 2, on_error: Callable[[AgentError], None] = told
) -> AutomationLimits:
    return AutomationLimits(path, per_day, JOB_PAUSE_S, SWITCH_PAUSE_S, 3, on_error)


@pytest.mark.parametrize("restarts", [False, True])
def test_jobs_are_capped_by_the_day(clocks: Clocks, path: Path, restarts: bool) -> None:
    restraint, taken, passed = restraint_of(path), [], 0.0
    for hour in (0.0, 1.0, 2.0, 23.9, 24.1, 24.2, 25.1):
        clocks.pass_s(hour * HOUR - passed)
        passed = hour * HOUR
        if restarts:
            restraint = restraint_of(path)
        taken.append(restraint.count_job())
    assert taken == [True, True, False, False, True, False, True]


@pytest.mark.parametrize("restarts", [False, True])
def test_pauses_last_as_long_as_they_should(clocks: Clocks, path: Path, restarts: bool) -> None:
    restraint = restraint_of(path)
    assert (restraint.may_start, restraint.may_switch) == (True, True)
    restraint.pause_jobs()
    restraint.pause_switches()
    waited = {"jobs": 0.0, "switches": 0.0}
    for _ in range(1000):
        if restarts:
            restraint = restraint_of(path)
        waited["jobs"] += not restraint.may_start
        waited["switches"] += not restraint.may_switch
        clocks.pass_s(1.0)
    assert waited["jobs"] == pytest.approx(JOB_PAUSE_S, abs=1.0)
    assert waited["switches"] == pytest.approx(SWITCH_PAUSE_S, abs=1.0)


@pytest.mark.parametrize("step_s", [-10 * 365 * DAY, -HOUR, HOUR, 10 * 365 * DAY])
def test_within_a_process_no_clock_that_is_set_changes_anything(clocks: Clocks, path: Path, step_s: float) -> None:
    restraint = restraint_of(path, per_day=1)
    assert restraint.count_job()
    restraint.pause_jobs()
    clocks.set_by(step_s)
    assert (restraint.count_job(), restraint.may_start) == (False, False)
    clocks.pass_s(JOB_PAUSE_S)
    assert (restraint.count_job(), restraint.may_start) == (False, True)


@pytest.mark.parametrize("step_s", [-10 * 365 * DAY, -HOUR, HOUR, 10 * 365 * DAY])
def test_a_clock_that_is_set_while_the_daemon_runs_opens_no_loophole_at_its_restart(
    clocks: Clocks, path: Path, step_s: float
) -> None:
    """As on a board without a battery: it starts in 1970, and NTP sets its clock minutes later."""
    restraint = restraint_of(path, per_day=1)
    restraint.count_job()
    restraint.pause_jobs()
    restraint.pause_switches()
    clocks.set_by(step_s)
    clocks.pass_s(1.0)
    restraint.may_start  # noqa: B018  # asked ten times a second, and so it notices
    clocks.boot()
    clocks.pass_s(60.0)
    again = restraint_of(path, per_day=1)
    assert (again.count_job(), again.may_start, again.may_switch) == (False, False, False)
    clocks.pass_s(SWITCH_PAUSE_S - 61.0)
    assert again.may_switch
    clocks.pass_s(JOB_PAUSE_S - SWITCH_PAUSE_S)
    assert again.may_start
    clocks.pass_s(DAY)
    assert again.count_job()


def test_a_clock_that_is_set_back_between_two_processes_makes_nothing_wait_longer_than_its_pause(
    clocks: Clocks, path: Path
) -> None:
    """What stands in the future counts as now, once: restart after restart it would never be over."""
    before = restraint_of(path, per_day=1)
    before.count_job()
    before.pause_jobs()
    clocks.boot()
    clocks.set_by(-23 * HOUR)
    waited = 0.0
    while not restraint_of(path).may_start:
        clocks.pass_s(30.0)
        waited += 30.0
    assert waited == JOB_PAUSE_S
    while not restraint_of(path, per_day=1).count_job():
        clocks.pass_s(HOUR)
        waited += HOUR
    assert waited == pytest.approx(DAY, abs=HOUR)


def test_on_a_board_without_a_clock_a_stop_does_not_begin_anew_at_each_boot(clocks: Clocks, path: Path) -> None:
    errors: list[AgentError] = []
    before = restraint_of(path, per_day=1, on_error=errors.append)
    before.count_job()
    before.pause_jobs()
    before.pause_switches()
    for _ in range(3):
        before.count_rollback()
    clocks.boot()
    clocks.set_by(-2 * DAY)
    again = restraint_of(path, per_day=1)
    assert (again.may_start, again.may_switch, again.count_job()) == (True, True, True)


def test_a_clock_that_is_set_ahead_between_two_processes_makes_all_of_it_old(clocks: Clocks, path: Path) -> None:
    before = restraint_of(path, per_day=1)
    before.count_job()
    before.pause_jobs()
    clocks.set_by(2 * DAY)
    again = restraint_of(path, per_day=1)
    assert (again.count_job(), again.may_start) == (True, True)


def test_a_cap_that_was_lowered_counts_the_newest_jobs(clocks: Clocks, path: Path) -> None:
    before = restraint_of(path, per_day=5)
    for _ in range(4):
        assert before.count_job()
        clocks.pass_s(HOUR)
    assert not restraint_of(path, per_day=4).count_job()
    lowered = restraint_of(path, per_day=1)
    clocks.pass_s(21.5 * HOUR)
    assert not lowered.count_job()  # though the first of the four is older than a day
    clocks.pass_s(2 * HOUR)
    assert lowered.count_job()


@pytest.mark.parametrize("restarts", [False, True])
def test_three_rollbacks_in_a_day_are_told_once_and_nothing_starts_by_itself(
    clocks: Clocks, path: Path, restarts: bool
) -> None:
    errors: list[AgentError] = []
    restraint, may = restraint_of(path, on_error=errors.append), []
    for _ in range(4):
        clocks.pass_s(HOUR)
        restraint.count_rollback()
        if restarts:
            restraint = restraint_of(path, on_error=errors.append)
        may.append((restraint.may_start, restraint.may_switch))
    assert may == [(True, True), (True, True), (False, False), (False, False)]
    # Once, and again at each of the two restarts since.
    assert [error.code for error in errors] == ["recalibration.rollback_loop"] * (3 if restarts else 1)
    clocks.pass_s(22.5 * HOUR)  # the second is a day old, the third is not
    assert restraint.may_start
    clocks.pass_s(0.0)
    restraint.count_rollback()
    assert not restraint.may_start
    assert [error.code for error in errors] == ["recalibration.rollback_loop"] * (4 if restarts else 2)
    restraint.clear_rollbacks()
    assert restraint.may_start
    assert restraint_of(path).may_start


def test_a_recording_keeps_nothing(clocks: Clocks, tmp_path: Path) -> None:
    first = restraint_of(None, per_day=1)
    first.pause_jobs()
    assert (first.count_job(), first.count_job(), first.may_start) == (True, False, False)
    clocks.set_by(HOUR)
    assert not first.may_start
    again = restraint_of(None, per_day=1)
    assert (again.count_job(), again.may_start) == (True, True)
    assert list(tmp_path.iterdir()) == []


SOUND = {"schema": 2, "jobs": [1.0], "rollbacks": [], "failed": None, "switched": 2.0}


@pytest.mark.parametrize(
    "text",
    ["", "no JSON", "[]", "{}", "\x00", "[" * 100_000, '{"schema": 2}', '{"schema": 1}',
     json.dumps({**SOUND, "schema": 1}), json.dumps({**SOUND, "schema": "3"}),
     json.dumps({**SOUND, "rollbacks": None}), json.dumps({**SOUND, "rollbacks": ["x"]}),
     json.dumps({**SOUND, "jobs": None}), json.dumps({**SOUND, "jobs": ["x"]}), json.dumps({**SOUND, "failed": "x"}),
     json.dumps({**SOUND, "switched": float("nan")}), json.dumps({**SOUND, "switched": 10**400})],
)  # fmt: skip
def test_a_file_that_is_none_is_begun_anew(clocks: Clocks, path: Path, text: str) -> None:
    path.write_text(text)
    restraint = restraint_of(path, per_day=1)
    assert (restraint.may_start, restraint.may_switch, restraint.count_job()) == (True, True, True)
    clocks.pass_s(1.0)
    assert not restraint_of(path, per_day=1).count_job()


def test_a_file_of_a_newer_tared_is_refused_and_left_alone(path: Path) -> None:
    text = json.dumps({**SOUND, "schema": 3})
    path.write_text(text)
    with pytest.raises(AgentError, match=r"restraint\.schema: .*restraint\.json of schema 3; expected schema 2"):
        restraint_of(path)
    assert path.read_text() == text


def test_a_disk_that_refuses_is_told_of_once_and_the_process_is_restrained_all_the_same(
    clocks: Clocks, tmp_path: Path
) -> None:
    errors: list[AgentError] = []
    restraint = AutomationLimits(
        tmp_path / "no folder" / "restraint.json", 1, JOB_PAUSE_S, SWITCH_PAUSE_S, 3, errors.append
    )
    assert (restraint.count_job(), restraint.count_job()) == (True, False)
    restraint.pause_jobs()
    clocks.set_by(HOUR)
    assert not restraint.may_start
    assert [error.code for error in errors] == ["restraint.write"]
