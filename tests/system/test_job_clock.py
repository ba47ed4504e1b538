"""The wall clock is set during a job: the job goes on, its pauses are no longer, and the schedule fires once a day."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from brokers import RealBroker
from daemon_drivers import clock_jumps, failing
from job_kills import FIRST_COMMIT, copied, in_world
from worlds import World

from agent.jobs.job import JobState

pytestmark = [pytest.mark.trial, pytest.mark.broker]
DAY_S = 86_400.0
JUMPS_S = {"a day on": DAY_S, "a day back": -DAY_S, "years on": 20 * 365 * DAY_S, "years back": -20 * 365 * DAY_S}
LATE_S = 600.0  # since the time that is on the schedule


@pytest.mark.parametrize("jump", JUMPS_S)
@pytest.mark.parametrize("state", ["COLLECTING", "BUILDING", "PROBATION", "FAILED"])
def test_a_clock_that_is_set(any_broker: RealBroker, blank: World, tmp_path: Path, state: str, jump: str) -> None:
    world = copied(blank, tmp_path / "world", any_broker)
    world.config["recalibration"] |= {
        "automatic": True,
        "cooldown_s": 2.0,
        "schedule": [time.strftime("%H:%M", time.localtime(time.time() - LATE_S))],
    }
    fails = failing("traceback") if state == "FAILED" else ""  # after which a pause holds
    with in_world(world, any_broker) as case:
        with case.living("only", fails + clock_jumps(state, JUMPS_S[jump])) as life:
            life.wait(lambda: life.said(FIRST_COMMIT))
            if jump != "years back":  # when no clock has been set
                life.wait(lambda: life.said("event=job trigger=schedule step=COMMITTED"))
            assert not life.said("Traceback")
        first, scheduled = case.records("first-start"), case.records("schedule")
        ends = [JobState.FAILED, JobState.COMMITTED] if state == "FAILED" else [JobState.COMMITTED]
        assert [job.state for job in first] == ends
        assert len(scheduled) == (jump != "years back")
