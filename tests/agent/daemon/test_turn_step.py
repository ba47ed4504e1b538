"""Steps of the supervisor's turn that fail."""

from __future__ import annotations

import errno
import logging

import pytest

from agent.daemon.supervisor import TurnStep
from calibrate.errors import TaredError


def test_a_failed_step_is_reported_once_and_each_cause_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    reported: list[TaredError | None] = []
    failures: list[TaredError] = []
    step = TurnStep("report.failed", Exception, "a report at each turn", reported.append, failures.append)
    faults = [ZeroDivisionError("none"), KeyError("health"), OSError(errno.EMFILE, "Too many open files")]
    with caplog.at_level(logging.ERROR):
        for fault in faults * 2:
            with step.may_fail():
                raise fault
    assert [record.exc_info[1] for record in caplog.records if record.exc_info] == faults
    (first,) = reported
    assert str(first).startswith("report.failed: ZeroDivisionError: none; ")
    assert "traceback" in failures[0].remedy
    assert "descriptors" in failures[2].remedy
    for _ in range(30):
        with step.may_fail():
            pass
    assert reported == [first, None]


def test_an_unexpected_exception_ends_the_turn() -> None:
    step = TurnStep("control.failed", OSError, "jobs moved on", lambda _: None)
    with pytest.raises(ZeroDivisionError), step.may_fail():
        raise ZeroDivisionError
