"""The limits of jobs that begin by themselves: caps, pauses, rollbacks, refusals, raises of precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decisions import DAY_S, DecidedBoard, refusal
from raising_world import config_of

from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.kinds import RaisedPrecision
from agent.core.state import NEVER_S, Memory, Restraint
from calibrate.statistics.evidence import Interval

HOUR_S = 3600.0


def alarmed(**recalibration: object) -> DecidedBoard:
    board = DecidedBoard(config_of(**recalibration))
    board.alarm()
    return board


def fails(board: DecidedBoard, code: str = "recalibration.disk") -> None:
    """The job that is due begins, and comes to nothing."""
    board.tick(2)
    if board.state.job is not None:
        board.child_ends(refusal(code))


def test_jobs_are_capped_by_the_day_and_that_is_reported_once() -> None:
    board, begun, passed_s = alarmed(per_day=2, cooldown_s=0.0), [], 0.0
    for hour in (0.0, 1.0, 2.0, 23.9, 24.1, 24.2, 25.1):
        board.turn(hour * HOUR_S - passed_s)
        passed_s, before = hour * HOUR_S, board.count(act.Begin)
        fails(board)
        begun.append(board.count(act.Begin) > before)
    assert begun == [True, True, False, False, True, False, True]
    reported = [each.error.code for each in board.actions if isinstance(each, act.ReportError)]
    assert reported == ["recalibration.cap"] * 2, "again after it was lifted"


def test_a_cap_that_was_lowered_counts_the_newest_jobs() -> None:
    restraint = Restraint()
    for hour in range(4):
        restraint = restraint.started(hour * HOUR_S)
    assert not restraint.is_below_cap(25.5 * HOUR_S, 1)  # though the first of the four is older than a day
    assert restraint.is_below_cap(27.5 * HOUR_S, 1)


def test_a_failure_pauses_what_begins_by_itself_and_a_command_is_not_paused() -> None:
    board = alarmed(cooldown_s=600.0)
    fails(board)
    for seconds in (0.0, 599.0):
        board.turn(seconds)
        board.tick(2)
        assert (board.trigger, board.held_back) == ("", "recalibration.cooldown")
    board.turn(1.0)
    board.tick()
    assert board.trigger == "alarm"


def rolled_back(board: DecidedBoard) -> None:
    """An alarm's candidate fails on live frames."""
    board.facts["probation"] = fact.ProbationNow(False, None)
    board.facts["settings"] = f"of hour {board.monotonic_s}"  # else the refusal would hold
    board.tick(2)
    board.child_ends()
    board.serves()
    assert board.state.job is not None
    board.take(fact.CandidateLeft(board.state.job.id, refusal("probation.hang"), 2.0, True))


def test_after_three_rollbacks_in_a_day_nothing_starts_by_itself() -> None:
    board = alarmed(cooldown_s=0.0)
    for _ in range(3):
        board.turn(HOUR_S)
        rolled_back(board)
    board.tick(2)
    assert (board.trigger, board.held_back) == ("", "recalibration.rollback_loop")
    reported = [each.error.code for each in board.actions if isinstance(each, act.ReportError)]
    assert reported == ["recalibration.rollback_loop"]
    assert board.take(fact.Started(0))[0] == board.actions[-1], "it is said again at each start"
    board.turn(22.5 * HOUR_S)  # the first is a day old
    board.tick()
    assert board.trigger == "alarm"


@pytest.mark.parametrize("rolled", [0, 1])
def test_a_candidate_on_probation_when_the_process_ended_counts_as_rolled_back(rolled: int) -> None:
    board = alarmed()
    board.take(fact.Started(rolled))
    assert len(board.state.memory.restraint.rollbacks_s) == rolled
    board.tick()
    assert board.held_back == ("recalibration.cooldown" if rolled else "")


def test_a_clock_that_is_set_is_noticed_and_what_is_kept_is_written_again() -> None:
    board = alarmed(cooldown_s=600.0)
    fails(board)
    board.tick()
    assert board.tick() == []
    board.wall_s += 10 * 365 * DAY_S
    assert board.tick() == [act.Remember(board.state.memory)]
    assert board.held_back == "recalibration.cooldown"
    assert board.tick() == []


@pytest.mark.parametrize(
    ("rung", "codes"),
    [
        (2, ["recalibration.refused", "recalibration.deadline", "probation.fidelity"]),
        (0, ["probation.recalled", "precision.exhausted"]),
        (1, ["recalibration.disk", "probation.stuck", "recalibration.memory"]),
    ],
    ids=["refused", "none is left", "without a verdict"],
)
def test_the_next_rung_follows_from_how_a_raise_of_precision_ended(rung: int, codes: list[str]) -> None:
    for code in codes:
        board = low()
        fails(board, code)
        assert (board.state.memory.next_rung("day"), board.state.memory.next_rung("night")) == (rung, 1)


def low() -> DecidedBoard:
    """INT8 costs fidelity, though its scales fit."""
    board = DecidedBoard(config_of(cooldown_s=0.0))
    settled = board.camera.settled
    worse = Interval(0.5, 0.4, 0.6, 200)
    board.tick(0, settled=replace(settled, interval=worse))
    return board


def test_raises_are_tried_rung_by_rung_until_none_is_left() -> None:
    board, rungs = low(), []
    for code in ("recalibration.refused", "recalibration.refused", "precision.exhausted"):
        board.tick()
        assert board.state.job is not None
        assert isinstance(board.state.job.kind, RaisedPrecision)
        rungs.append(board.state.job.kind.rung)
        board.tick()
        board.child_ends(refusal(code))
    board.tick()
    assert (rungs, board.trigger, board.held_back) == ([1, 2, 3], "", "precision.exhausted")


def test_only_the_latest_artefacts_whose_precision_was_raised_are_remembered() -> None:
    memory = Memory()
    for number in range(150):
        memory = memory.with_raised(f"{number}", 1)
    assert [memory.next_rung(f"{number}") for number in (0, 49, 50, 149)] == [1, 1, 2, 2]


def test_a_refused_journal_lets_nothing_begin_for_a_minute() -> None:
    board = alarmed()
    board.fails = lambda action: (
        AgentError("state.write", "a full disk", "room", "free some") if isinstance(action, act.Begin) else None
    )
    for _ in range(3):
        board.tick()
    assert board.count(act.Begin) == 1
    assert board.state.memory.restraint == Restraint((), (), NEVER_S, NEVER_S), "none of the day's"
    board.turn(60.0)
    board.tick()
    assert board.count(act.Begin) == 2
