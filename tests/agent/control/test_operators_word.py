"""Commands while the view is in trouble, or a candidate on probation; no frame is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
from device import carry_out
from executor_bench import roll_back_often
from trouble_bench import TROUBLES, Desk, desk
from view_bench import camera, scene, watched

from agent.contract.commands import CommandResult, RecalibrateArgs, RollbackArgs
from agent.core.due import stopped_by
from agent.daemon.handlers import EngineHandlers

__all__ = ["desk"]  # the fixture


@pytest.mark.parametrize("trouble", TROUBLES)
def test_the_operators_word_starts_a_job_and_a_trouble_then_takes_nothing_from_it(
    desk: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    at = desk()
    at.tick(trouble)
    at.recalibrate()
    monkeypatch.setattr(at.gathering, "restart", pytest.fail)
    assert at.tick() == at.tick(trouble) == "command"


def stopped(at: Desk) -> str:
    return stopped_by(at.executor.now, at.executor.config, at.executor.state)


def moved(at: Desk) -> Desk:
    """Its camera looks elsewhere."""
    at.findings._view = watched(lambda number: camera(number, scene(5)), 20)
    assert trouble(at) == "moved"
    return at


def trouble(at: Desk) -> str:
    return at.findings._view.state.trouble


def test_an_operators_recalibration_makes_the_present_view_the_usual_one(desk: Callable[..., Desk]) -> None:
    at = moved(desk())
    at.recalibrate()
    assert trouble(at) == "moved"
    at.accept()
    assert at.results[-1].status == "SUCCEEDED"
    for number in range(100):
        at.findings._view.update(float(number), camera(number, scene(5)))
        assert trouble(at) == ""


def test_a_job_by_an_alarm_or_a_cancelled_one_leaves_the_usual_view_as_it_was(desk: Callable[..., Desk]) -> None:
    at = moved(desk())
    at.recalibrate()
    at.executor.stop("the operator thinks again")
    assert trouble(at) == "moved"
    assert at.tick() == "alarm"
    at.accept()
    assert at.events("swap")[-1]["trigger"] == "alarm"
    assert trouble(at) == "moved"


def test_a_rollback_on_probation_takes_the_candidate_back_and_keeps_what_was_current(
    desk: Callable[..., Desk],
) -> None:
    at = desk(frames=100)
    before = at.executor.summary.artefact
    at.recalibrate()
    at.accept()
    assert at.executor.state.trial is not None
    assert at.tick(state="alarm", serving_db=9.0) == ""  # nothing else is begun meanwhile
    answers: list[CommandResult] = []
    carry_out(EngineHandlers(at.executor), "rollback", RollbackArgs(), answers.append, "c2")
    assert [answer.status for answer in answers] == ["ACCEPTED", "IN_PROGRESS", "SUCCEEDED"]
    assert at.results[-1].error is not None
    assert at.results[-1].error.code == "probation.recalled"
    assert at.events("rollback")[-1]["reason"] == "probation.recalled"
    assert at.executor.state.trial is None
    assert at.executor.summary.artefact == before
    current = at.executor.service.store.read("current")
    assert current is None or current.id != at.other.id
    assert [(job.trigger, job.state.value) for job in at.journal.records()] == [
        ("command", "ROLLED_BACK"),
        ("rollback", "COMMITTED"),
    ]


def test_after_rollbacks_a_recalibration_that_stays_is_the_word_that_jobs_start_again(
    desk: Callable[..., Desk],
) -> None:
    at = desk()
    roll_back_often(at.executor)
    assert at.tick() == ""
    assert stopped(at) == "recalibration.rollback_loop"
    at.recalibrate()
    at.executor.stop("the operator thinks better of it")
    assert at.tick() == ""
    assert stopped(at)
    at.recalibrate()
    at.accept()
    at.tick()
    assert stopped(at) == ""


@pytest.mark.parametrize("op", ["recalibrate", "rollback"])
def test_while_a_candidate_still_hangs_no_job_begins_and_a_command_is_refused(
    desk: Callable[..., Desk], op: str
) -> None:
    at = desk()
    pipeline = cast(Any, at.executor.pipeline)
    pipeline.loop.is_stuck = True
    assert at.tick(state="alarm", serving_db=9.0) == ""
    args = RecalibrateArgs() if op == "recalibrate" else RollbackArgs()
    answers: list[CommandResult] = []
    carry_out(EngineHandlers(at.executor), op, args, answers.append)
    error = answers[-1].error
    assert error is not None
    assert (error.code, "a candidate that still hangs" in error.message) == ("command.busy", True)
    assert at.journal.records() == []
    pipeline.loop.is_stuck = False
    assert at.tick(state="alarm", serving_db=9.0) == "alarm"
