"""A job of a whole daemon fails once: the engine serves on, the sender gets the reason, the next job succeeds."""

from __future__ import annotations

import pytest
from daemon_drivers import failing, write_refused
from job_kills import Case

from agent.jobs.job import JobState

pytestmark = [pytest.mark.trial, pytest.mark.broker, pytest.mark.usefixtures("quick_repeats")]

# By what fails, see `daemon_drivers`: the code of the error that its sender gets.
CODES = {
    "write_job": "recalibration.disk",
    "popen": "recalibration.child",
    "room": "store.room",
    "delay": "headroom.delay",
    "pause": "headroom.pause",
    "memory": "recalibration.memory",
    "timeout": "recalibration.timeout",
    "candidate": "artefact.damaged",
    "promote": "store.write",
    "traceback": "recalibration.child",
    "calibration": "calibration.empty",
    "builder": "engine.build",
    "judge": "recalibration.child",
}


@pytest.mark.parametrize("name", CODES)
def test_a_failure_costs_its_job_alone(case: Case, name: str) -> None:
    check(case, failing(name), CODES[name], [JobState.FAILED, JobState.COMMITTED], serves_new=name == "promote")


@pytest.mark.parametrize(
    "state", ["REQUESTED", "COLLECTING", "CALIBRATING", "PLANNING", "BUILDING", "VALIDATING", "PROBATION"]
)
def test_a_step_that_cannot_be_journaled_is_not_begun(case: Case, state: str) -> None:
    ends = [JobState.FAILED, JobState.COMMITTED] if state != "REQUESTED" else [JobState.COMMITTED]
    check(case, write_refused(state), "journal.write", ends)


def check(case: Case, driver: str, code: str, ends: list[JobState], serves_new: bool = False) -> None:
    before, known = case.current, len(case.records("command"))
    with case.living("only", driver) as life:
        life.wait_served()
        result = case.outcome(case.send("recalibrate", frames="8", method="mse"))
        assert result.error is not None
        assert result.error.code == code
        assert (life.status()["engine"] == before) is not serves_new
        assert case.current == before
        assert case.children() == []
        case.check_store()
        frames = life.status()["frames"]
        life.wait(lambda: life.status()["frames"] > frames)
        assert case.outcome(case.send("recalibrate", frames="8", method="percentile:99.9")).status == "SUCCEEDED"
        assert life.status()["engine"] == case.current != before
        life.wait(lambda: life.status()["job"] is None)
        case.check_store()
    assert [job.state for job in case.records("command")[known:]] == ends
