"""Killed at every line of a job, before and after it is written: the next daemon serves, and every sender is answered.

All of it takes minutes, by `make trials`; the default suite runs one case.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from brokers import RealBroker
from daemon_drivers import at_write, child_killed, other_runtime
from job_kills import Case, copied, in_world, put_other_model
from worlds import World

from agent.core.state import JobState
from engines.store.artefact import read_artefact

BEFORE, AFTER = "before", "after"
INTERRUPTED, COMMAND_INTERRUPTED = "recalibration.interrupted", "command.interrupted"
# By the state of a job that was killed right after that was written: how the next daemon ends it. What is written
# right before is the state before. A state that jobs come to need one more line here.
RECALIBRATION = [
    "REQUESTED",
    "COLLECTING",
    "CALIBRATING",
    "PLANNING",
    "BUILDING",
    "VALIDATING",
    "PROBATION",
    "COMMITTED",
]
EXCHANGE = ["REQUESTED", "PROBATION", "COMMITTED"]
MODEL = ["REQUESTED", "BUILDING", "VALIDATING", "PROBATION", "COMMITTED"]
RUNTIME = ["REQUESTED", "BUILDING", "COMMITTED"]
RAISING = ["PLANNING", "BUILDING"]
CHILD = ["CALIBRATING", "PLANNING", "BUILDING", "VALIDATING", "OUTCOME"]
MOMENTS = [BEFORE, AFTER]

slow, broker, trial = pytest.mark.slow, pytest.mark.broker, pytest.mark.trial
pytestmark = [slow, broker, pytest.mark.usefixtures("quick_repeats")]


def cases(states: list[str], *default: tuple[str, str]) -> list[object]:
    """Each state with both moments; those of the default suite, and the others for `make trials`."""
    every = [(state, moment) for state in states for moment in MOMENTS]
    return [pytest.param(*each, marks=[] if each in default else trial) for each in every]


def expected(states: list[str], state: str, moment: str) -> str:
    """The state that the journal holds when the process dies; empty where it holds nothing of the job."""
    place = states.index(state) - (moment == BEFORE)
    return states[place] if place >= 0 else ""


@pytest.mark.parametrize(("state", "moment"), cases(RECALIBRATION))
def test_a_recalibration_by_command(case: Case, state: str, moment: str) -> None:
    known, before = len(case.records("command")), case.current
    with case.living("first", at_write(moment, state, "command")) as first:
        first.wait_served()
        command = case.send("recalibrate", frames="8", method="mse")
        case.check_killed(first)
    with case.living("second") as second:
        result = case.outcome(command)
        case.check_sound(second)
        second.wait(lambda: second.status()["job"] is None)
    jobs, held = case.records("command")[known:], expected(RECALIBRATION, state, moment)
    if not held:  # nobody knows but that it was asked for
        assert result.error is not None
        assert (jobs, result.error.code, case.current) == ([], COMMAND_INTERRUPTED, before)
        return
    (job,) = jobs
    committed = held == "COMMITTED" or (moment, state) == (BEFORE, "COMMITTED")
    end = JobState.COMMITTED if committed else JobState.ROLLED_BACK if held == "PROBATION" else JobState.FAILED
    assert (job.state, result.status) == (end, "SUCCEEDED" if committed else "FAILED")
    assert result.error is None or result.error.code == INTERRUPTED
    assert job.command_ids == (command,)
    assert case.current == (job.artefact if committed else before)


@trial
@pytest.mark.parametrize(("state", "moment"), cases(EXCHANGE))
def test_a_rollback_by_command(case: Case, state: str, moment: str) -> None:
    previous = (case.world.state_dir / "previous").readlink().name
    with case.living("first", at_write(moment, state, "rollback")) as first:
        first.wait_served()
        command = case.send("rollback")
        case.check_killed(first)
    with case.living("second") as second:
        result = case.outcome(command)
        case.check_sound(second)
    jobs, held = case.records("rollback"), expected(EXCHANGE, state, moment)
    committed = held == "COMMITTED" or (moment, state) == (BEFORE, "COMMITTED")
    assert [job.state.is_finished for job in jobs] == [True] * (
        held != ""
    )  # else nobody knows but that it was asked for
    assert result.status == ("SUCCEEDED" if committed else "FAILED")
    assert (case.current == previous) is committed


@trial
@pytest.mark.parametrize(("state", "moment"), cases(["PROBATION", "ROLLED_BACK"]))
def test_a_candidate_that_the_operator_takes_back(case: Case, state: str, moment: str) -> None:
    """It is taken back once: a daemon that dies over it must not go back one engine further."""
    case.world.config["probation"] = {"frames": 100_000, "seconds": 0.0}
    before = case.current
    trigger = "rollback" if state == "PROBATION" else "command"
    with case.living("first", at_write(moment, state, trigger)) as first:
        first.wait_served()
        candidate = case.send("recalibrate", frames="8", method="mse")
        first.wait(lambda: first.said("event=swap .*trigger=command"))
        recall = case.send("rollback")
        case.check_killed(first)
    with case.living("second") as second:
        taken, recalled = case.outcome(candidate), case.outcome(recall)
        case.check_sound(second)
    written = (state, moment) == ("ROLLED_BACK", AFTER)
    assert taken.error is not None
    assert taken.error.code == ("probation.recalled" if written else INTERRUPTED)
    assert case.records("command")[-1].state is JobState.ROLLED_BACK
    if (state, moment) == ("PROBATION", BEFORE):  # nobody knows of it any more but that it was asked for
        assert recalled.error is not None
        assert recalled.error.code == INTERRUPTED
    else:
        assert recalled.status == "SUCCEEDED"
    assert case.current == before


@trial
@pytest.mark.parametrize(("state", "moment"), cases(RAISING))
def test_a_raised_precision(any_broker: RealBroker, low: World, tmp_path: Path, state: str, moment: str) -> None:
    world = copied(low, tmp_path / "world", any_broker)
    with in_world(world, any_broker) as case:
        before = case.current
        with case.living("first", at_write(moment, state, "precision")) as first:
            case.check_killed(first)
        (job,) = case.records("precision")
        assert job.state.value == expected(["CALIBRATING", *RAISING], state, moment)
        world.config["recalibration"]["automatic"] = False
        with case.living("second") as second:
            case.check_sound(second)
            second.wait(lambda: second.status()["job"] is None)
        (job,) = case.records("precision")
        assert (job.state, case.current) == (JobState.FAILED, before)
        world.config["recalibration"]["automatic"] = True
        with case.living("third") as third:  # it is tried again as it was
            third.wait(lambda: third.said("event=job trigger=precision step=COMMITTED"))
    assert case.current != before


@pytest.mark.parametrize(("state", "moment"), cases(["FAILED", "CANCELLED"]))
def test_a_job_that_comes_to_nothing(case: Case, state: str, moment: str) -> None:
    """By its time limit, and by SIGTERM."""
    before = case.current
    if state == "FAILED":
        case.give_no_time()
    with case.living("first", at_write(moment, state, "command")) as first:
        first.wait_served()
        command = case.send("recalibrate", frames="10000")
        if state == "CANCELLED":
            first.wait(lambda: first.said("trigger=command step=COLLECTING"))
            first.process.terminate()
        case.check_killed(first)
    case.world.config["recalibration"].pop("timeout_s", None)
    with case.living("second") as second:
        result = case.outcome(command)
        case.check_sound(second)
    written = {"FAILED": "recalibration.timeout", "CANCELLED": "recalibration.cancelled"}[state]
    assert result.error is not None
    assert result.error.code == (written if moment == AFTER else INTERRUPTED)
    assert case.current == before


@trial
@pytest.mark.parametrize(("state", "moment"), cases(RECALIBRATION))
def test_a_first_calibration_is_made_all_the_same(
    blank: World, any_broker: RealBroker, tmp_path: Path, state: str, moment: str
) -> None:
    world = copied(blank, tmp_path / "world", any_broker)
    with in_world(world, any_broker) as case:
        with case.living("first", at_write(moment, state, "first-start")) as first:
            case.check_killed(first)
        with case.living("second") as second:
            second.wait(lambda: not second.status()["degraded"])
            second.wait(lambda: second.status()["job"] is None)
            case.check_sound(second)
    jobs = case.records("first-start")
    assert [job.state for job in jobs].count(JobState.COMMITTED) == 1
    assert jobs[-1].state is JobState.COMMITTED
    assert case.current == jobs[-1].artefact


@trial
@pytest.mark.parametrize(("state", "moment"), cases(MODEL))
def test_a_new_model(case: Case, state: str, moment: str) -> None:
    with case.living("first", at_write(moment, state, "model")) as first:
        first.wait_served()
        put_other_model(case.world)
        case.check_killed(first)
    with case.living("second") as second:
        case.check_sound(second)
        second.wait(lambda: not second.status()["degraded"])
    held = expected(MODEL, state, moment)
    committed = held in MODEL[1:]
    ends = [JobState.COMMITTED] if committed else [JobState.FAILED] if held else []
    assert [job.state for job in case.records("model")] == ends


@trial
@pytest.mark.parametrize(("state", "moment"), cases(RUNTIME))
def test_another_runtime(case: Case, state: str, moment: str) -> None:
    """A start that was killed while it built anew is not killed again: the next one leaves that to a job's child."""
    known, before = len(case.records("first-start")), case.current
    with case.living("first", other_runtime() + at_write(moment, state, "runtime")) as first:
        case.check_killed(first)
    with case.living("second", other_runtime()) as second:
        second.wait(lambda: not second.status()["degraded"])
        second.wait(lambda: second.status()["job"] is None)
        case.check_sound(second)
    interrupted = (state, moment) in (("REQUESTED", AFTER), ("BUILDING", BEFORE), ("BUILDING", AFTER))
    ends = [JobState.FAILED] * 2 if interrupted else [JobState.COMMITTED]
    assert [job.state for job in case.records("runtime")] == ends
    assert [job.state for job in case.records("first-start")[known:]] == [JobState.COMMITTED] * interrupted
    assert read_artefact(case.world.state_dir / "current").manifest["inputs"]["backend"]["runtime"] == "another"
    assert case.current != before


@pytest.mark.parametrize(("step", "moment"), cases(CHILD, ("VALIDATING", BEFORE)))
def test_a_child_that_is_killed_costs_its_job_alone(case: Case, step: str, moment: str) -> None:
    before = case.current
    with case.living("only", child_killed(moment, step)) as life:
        life.wait_served()
        command = case.send("recalibrate", frames="8", method="mse")
        result = case.outcome(command)
        case.check_sound(life)
        frames = life.status()["frames"]
        life.wait(lambda: life.status()["frames"] > frames)
    (*_, job) = case.records("command")
    if (step, moment) == ("OUTCOME", AFTER):
        assert (result.status, case.current) == ("SUCCEEDED", job.artefact)
    else:
        assert result.error is not None
        assert result.error.code == "recalibration.memory"
        assert (job.state, case.current) == (JobState.FAILED, before)
