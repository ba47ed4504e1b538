"""An engine on trial is always decided on, whatever the disk refuses meanwhile."""

from __future__ import annotations

from decisions import DecidedBoard, refusal
from raising_world import config_of

from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import facts as fact


def on_probation() -> DecidedBoard:
    """An alarm's candidate serves, and has not answered enough yet."""
    board = DecidedBoard(config_of())
    board.alarm()
    board.facts["probation"] = fact.ProbationNow(False, None)
    board.tick(2)
    board.child_ends()
    board.serves()
    assert board.state.candidate == "night"
    return board


def test_a_recall_that_cannot_be_journaled_leaves_the_candidate_to_its_judges() -> None:
    board = on_probation()
    full = AgentError("state.write", "a full disk", "room", "free some")
    board.fails = lambda action: full if isinstance(action, act.Enter) else None
    assert board.take(fact.AskedToGoBack("c1", "dusk"))[-1] == act.AnswerCommand("c1", full)
    board.facts["probation"] = fact.ProbationNow(True, refusal("probation.fidelity"))
    assert any(isinstance(action, act.GoBack) for action in board.tick())


def test_an_engine_that_the_disk_refuses_to_make_current_is_saved_later_and_its_job_has_failed() -> None:
    board = on_probation()
    full = AgentError("store.write", "a full disk", "room", "free some")
    board.fails = lambda action: full if isinstance(action, act.MakeCurrent) else None
    board.facts["probation"] = fact.ProbationNow(True, None)
    board.tick()
    assert (board.state.job, board.state.last_error and board.state.last_error.code) == (None, "store.write")
    board.fails = lambda _: None
    board.turn(60.0)
    assert act.MakeCurrent in map(type, board.tick())
    assert board.state.unsaved is None
