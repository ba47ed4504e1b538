"""SIGTERM in each state of a job: the daemon ends in order, and the job with it."""

from __future__ import annotations

import json
import signal

import pytest
from daemon_drivers import at_write
from daemon_life import LIMIT_S
from job_kills import Case

from agent.core.state import JobState

pytestmark = [pytest.mark.trial, pytest.mark.broker, pytest.mark.usefixtures("quick_repeats")]

CANCELLED, COMMITTED = JobState.CANCELLED, JobState.COMMITTED
# By the state in which it comes: those in which the job may end.
ENDS = {
    "REQUESTED": {CANCELLED},
    "COLLECTING": {CANCELLED},
    "CALIBRATING": {CANCELLED},
    "PLANNING": {CANCELLED},
    "BUILDING": {CANCELLED},
    "VALIDATING": {CANCELLED, COMMITTED},  # the second where the child is done before the signal is heeded
    "PROBATION": {CANCELLED, COMMITTED},  # as it comes before the candidate's first answer, or after it
    "COMMITTED": {COMMITTED},
}


@pytest.mark.parametrize("state", ENDS)
def test_a_signal_in_any_state_ends_the_daemon_in_order_and_its_job_with_it(case: Case, state: str) -> None:
    before = case.current
    with case.living("only", at_write("after", state, "command", signal.SIGTERM)) as life:
        life.wait_served()
        command = case.send("recalibrate", frames="8", method="mse")
        assert life.process.wait(LIMIT_S) == 0, life.log.read_text()
        assert json.loads(case.output("only").read_text())["frames"] > 0
        assert not life.said("Traceback")
    result, (*_, job) = case.outcome(command), case.records("command")
    assert job.state in ENDS[state]
    assert case.current == (job.artefact if job.state is COMMITTED else before)
    assert case.children() == []
    assert list((case.world.state_dir / "jobs").glob("*")) == []
    case.check_store()
    if job.state is COMMITTED:
        assert result.status == "SUCCEEDED"
    else:
        assert result.error is not None
        assert result.error.code == "recalibration.cancelled"
