"""Why the board is degraded, and what keeps a job from starting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from executor_bench import roll_back_often, snapshot_of
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines

from agent.collection.collection import SharedCollection
from agent.common.errors import AgentError
from agent.control.reasons import Reasons, explain
from agent.jobs.child_process import JobOutcome
from agent.jobs.headroom import Headroom

__all__ = ["job_desk", "two_engines"]  # fixtures

FULL = AgentError("recalibration.disk", "a full disk", "room", "free some")


class Board:
    """The bench with the first of the two engines in service."""

    def __init__(self, at: JobDeskBench) -> None:
        self.at, self.executor = at, at.executor
        self.state = at.state
        self.at.configure(automatic=True)

    def degrade(self) -> None:
        self.at.service.calibration = None
        self.state = replace(self.state, drift=None)

    def alarm(self) -> None:
        assert self.state.drift is not None
        self.state = replace(self.state, drift=replace(self.state.drift, state="alarm", serving_db=9.0))

    def look(self, times: int = 3, **changes: Any) -> Reasons:
        states = {"camera": replace(self.state, **changes)}
        for _ in range(times):
            self.executor.tick(states)
        return explain(snapshot_of(self.executor, states))

    def end_job(self, error: AgentError) -> None:
        self.look()
        ScriptedChild.latest.ends_with(JobOutcome(error=error))


@pytest.fixture
def board(job_desk: JobDeskBench) -> Board:
    return Board(job_desk)


def test_where_all_is_well_there_is_nothing_to_say(board: Board) -> None:
    assert board.look() == Reasons()


def test_a_degraded_board_names_the_state_of_the_job_under_way(board: Board) -> None:
    board.degrade()
    assert board.look() == Reasons(
        "the float reference serves, because the job that builds an engine is at CALIBRATING; wait for its end"
    )


@pytest.mark.parametrize("restarts", [False, True])
def test_a_pause_names_the_error_that_it_follows(board: Board, restarts: bool) -> None:
    board.degrade()
    board.end_job(FULL)
    if restarts:
        board.executor = replace(board.executor)
    reasons = board.look()
    assert reasons.code == "recalibration.cooldown"
    assert "a job failed less than 600 s ago: a full disk; free some; wait" in reasons.degraded


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"trouble": "blind"}, "view.blind", "the view is blind; check the camera"),
        ({"trouble": "frozen"}, "view.frozen", "the view is frozen"),
        ({"outage": "preparing"}, "observer", "no frame is observed: preparing"),
        ({"automatic": False}, "recalibration.automatic", "recalibration.automatic is false; recalibrate by command"),
        ({"rollbacks": 3}, "recalibration.rollback_loop", "too many candidates were rolled back in a day"),
        ({"is_stuck": True}, "probation.hang", "a candidate that was rolled back still hangs; restart the daemon"),
    ],
)
def test_the_hindrance_of_an_alarm_is_named(board: Board, changes: dict[str, Any], code: str, words: str) -> None:
    board.alarm()
    if "automatic" in changes:
        board.at.configure(automatic=False)
    if "rollbacks" in changes:
        roll_back_often(board.executor)
    cast(Any, board.executor.pipeline).loop.is_stuck = changes.get("is_stuck", False)
    view = replace(board.state.view, trouble=changes.get("trouble", ""))
    reasons = board.look(view=view, outage=changes.get("outage", ""))
    assert (reasons.code, reasons.degraded) == (code, "")
    assert words in reasons.held_back
    assert board.executor.state.job is None


def test_a_job_that_waits_for_headroom_or_for_something_to_see_is_named(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.degrade()
    monkeypatch.setattr(SharedCollection, "counts", (100, 0))
    dark = replace(board.state.view, trouble="blind")
    reasons = board.look(view=dark)
    assert reasons.code == "collection"
    assert "frames on which something is seen (the view is blind)" in reasons.degraded
    monkeypatch.setattr(SharedCollection, "counts", (100, 100))
    monkeypatch.setattr(Headroom, "reason_to_wait", lambda _: "300 MiB of memory available, 512 MiB needed")
    reasons = board.look()
    assert reasons.code == "headroom"
    assert "300" not in reasons.degraded  # a figure that changes each second would be published each second
