"""SIGTERM in each state of a job: the daemon ends in order, and the job with it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from brokers import RealBroker
from daemon_drivers import at_write
from daemon_life import LIMIT_S, Life
from job_kills import Case, copied, in_world
from worlds import World

from agent.jobs.job import JobState

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


def check_ended(case: Case, life: Life, trigger: str, ends: set[JobState], before: str) -> None:
    """In order, and the job in one of these states; nothing is left."""
    assert life.process.wait(LIMIT_S) == 0, life.log.read_text()
    assert json.loads(case.output("only").read_text())["frames"] > 0
    assert not life.said("Traceback")
    (*_, job) = case.records(trigger)
    assert job.state in ends
    assert case.current == (job.artefact if job.state is COMMITTED else before)
    assert case.children() == []
    assert list((case.world.state_dir / "jobs").glob("*")) == []
    case.check_store()


@pytest.mark.parametrize("state", ENDS)
def test_in_a_state_on_the_way(case: Case, state: str) -> None:
    before = case.current
    with case.living("only", at_write("after", state, "command", signal.SIGTERM)) as life:
        life.wait_served()
        command = case.send("recalibrate", frames="8", method="mse")
        check_ended(case, life, "command", ENDS[state], before)
    result, (*_, job) = case.outcome(command), case.records("command")
    if job.state is COMMITTED:
        assert result.status == "SUCCEEDED"
    else:
        assert result.error is not None
        assert result.error.code == "recalibration.cancelled"


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED", "ROLLED_BACK"])
def test_at_an_end(case: Case, state: str) -> None:
    """CANCELLED: a second SIGTERM, while the first one's work is done."""
    before, frames = case.current, "8" if state == "ROLLED_BACK" else "10000"
    if state == "FAILED":
        case.give_no_time()
    case.world.config["probation"] = {"frames": 100_000, "seconds": 0.0}
    with case.living("only", at_write("after", state, "command", signal.SIGTERM)) as life:
        life.wait_served()
        command = case.send("recalibrate", frames=frames, method="mse")
        if state == "CANCELLED":
            life.wait(lambda: life.said("trigger=command step=COLLECTING"))
            life.process.terminate()
        elif state == "ROLLED_BACK":
            life.wait(lambda: life.said("event=swap .*trigger=command"))
            recall = case.send("rollback")
        check_ended(case, life, "command", {JobState(state)}, before)
    if state == "ROLLED_BACK":
        assert case.outcome(recall).status == "SUCCEEDED"
        assert case.records("rollback")[-1].state is COMMITTED
    assert case.outcome(command).status == "FAILED"


def test_while_precision_is_raised(any_broker: RealBroker, low: World, tmp_path: Path) -> None:
    with in_world(copied(low, tmp_path / "world", any_broker), any_broker) as case:
        before = case.current
        with case.living("only", at_write("after", "PLANNING", "precision", signal.SIGTERM)) as life:
            check_ended(case, life, "precision", {CANCELLED}, before)
