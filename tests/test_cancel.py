"""What becomes of a command to cancel; no frame is served."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_trouble_operations import Desk, desk

from agent.commands import Report
from agent.errors import CommandError
from agent.orders import Orders
from agent.requests import CancelArgs, CommandResult

__all__ = ["desk"]  # the fixture


def cancelled(at: Desk) -> CommandResult:
    """What becomes of a command to cancel."""
    handlers = Orders(at.operations, at.operations._service, at.operations._pipeline).handlers
    answers: list[CommandResult] = []
    handlers["cancel"](CancelArgs(), Report("c2", answers.append))
    return answers[-1]


def test_a_job_that_waits_for_headroom_can_be_cancelled(desk: Callable[..., Desk]) -> None:
    at = desk()
    assert at.tick() == "alarm"
    job = at.operations._jobs.job
    assert job is not None
    job.waits("no memory")
    assert cancelled(at).status == "SUCCEEDED"
    assert at.tick() == "", "not again at once, though the alarm is still on"
    (record,) = at.journal.records()
    assert record.state.value == "CANCELLED"


def test_a_candidate_on_probation_can_be_cancelled(desk: Callable[..., Desk]) -> None:
    at = desk(frames=100)
    at.recalibrate()
    at.accept()
    assert cancelled(at).status == "SUCCEEDED"
    assert not at.operations.exchanging
    assert [(job.trigger, job.state.value) for job in at.journal.records()] == [
        ("command", "ROLLED_BACK"),
        ("rollback", "COMMITTED"),
    ]


def test_nothing_cannot_be_cancelled(desk: Callable[..., Desk]) -> None:
    with pytest.raises(CommandError, match=r"command\.nothing"):
        cancelled(desk())
