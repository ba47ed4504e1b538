"""Why the board is degraded, and what keeps a job from starting: the same sentence in each place where people look."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from device import carry_out
from executor_bench import roll_back_often
from job_bench import JobDeskBench, ScriptedChild, job_desk, two_engines

from agent.collection.collection import SharedCollection
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult, StatusArgs
from agent.control.reasons import Reasons, explain
from agent.daemon.handlers import EngineHandlers
from agent.daemon.prometheus import DaemonMetrics
from agent.jobs.child_process import JobOutcome
from agent.jobs.headroom import Headroom
from agent.monitoring.camera_monitor import CameraState

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
        return explain(self.executor, states)

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


def test_each_place_shows_the_same_sentence(board: Board) -> None:
    board.degrade()
    board.end_job(FULL)
    why = board.look()
    pipeline = cast(Any, board.executor.pipeline)
    states: dict[str, CameraState] = {"camera": board.state}
    pipeline.observer.states = lambda: states
    pipeline.served, pipeline.feeds = 0, {"camera": _feed()}
    answers: list[CommandResult] = []
    carry_out(EngineHandlers(board.executor), "status", StatusArgs(), answers.append)
    status = answers[-1].result
    assert status is not None
    assert status["degraded_reason"] == why.degraded
    assert (status["held_back"], status["held_back_code"]) == (why.held_back, why.code)
    exporter = DaemonMetrics()
    exporter.set_source(board.executor, None)
    samples = {sample.name: sample.labels for metric in exporter.collect() for sample in metric.samples}
    assert samples["tared_degraded_info"] == {"reason": why.degraded}
    assert samples["tared_job_held_back_info"] == {"code": why.code, "reason": why.held_back}


def _feed() -> SimpleNamespace:
    totals = SimpleNamespace(frames=0, dropped={}, latency_buckets=[], latency_sum_s=0.0)
    estimate = SimpleNamespace(as_dict=dict)
    return SimpleNamespace(
        name="camera",
        is_up=True,
        lost="",
        accuracy=SimpleNamespace(estimate=estimate),
        run_meter=SimpleNamespace(totals=lambda: totals),
    )
