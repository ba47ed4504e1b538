"""Commands at the device's desk: carried out once, answered always."""

from __future__ import annotations

import pytest
from device import NOW, Device, payload

from agent.commands.dispatcher import CommandDispatcher
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult, RecalibrateArgs


class Desk:
    """A desk whose results are collected."""

    def __init__(self, memory: int = 1000) -> None:
        self.device = Device()
        self.results: list[CommandResult] = []
        self.desk = CommandDispatcher(self.device.handlers(), self.results.append, memory)

    def receive(self, command: bytes, now: float = NOW, retained: bool = False) -> list[str]:
        """The statuses that this command brought forth."""
        before = len(self.results)
        self.desk.receive(command, now, retained)
        return [result.status for result in self.results[before:]]


def test_a_long_command_reports_until_its_end_and_not_after() -> None:
    desk = Desk()
    assert desk.receive(payload(op="recalibrate", args={"frames": 64})) == ["ACCEPTED"]
    args, report = desk.device.jobs[0]
    assert args == RecalibrateArgs(frames=64)
    report.update("observing", 12.5)
    report.update("building")
    report.succeed({"artefact": "abc"})
    report.update("late")
    report.fail(AgentError("late", "a late failure", "none", "none"))
    assert [(result.status, result.step, result.percent) for result in desk.results[1:]] == [
        ("IN_PROGRESS", "observing", 12.5),
        ("IN_PROGRESS", "building", None),
        ("SUCCEEDED", None, None),
    ]


def test_a_repeated_command_gets_its_latest_result_and_nothing_is_done_twice() -> None:
    desk = Desk()
    recalibrate = payload(op="recalibrate")
    desk.receive(recalibrate)
    assert desk.receive(recalibrate) == ["ACCEPTED"]
    desk.device.jobs[0][1].update("observing", 50)
    assert desk.receive(recalibrate) == ["IN_PROGRESS"]
    desk.device.jobs[0][1].succeed()
    assert desk.receive(recalibrate) == ["SUCCEEDED"]
    assert desk.receive(recalibrate, now=NOW + 3600) == ["SUCCEEDED"]  # done is done, it cannot expire
    assert desk.receive(recalibrate, retained=True) == ["SUCCEEDED"]
    assert len(desk.device.jobs) == 1


def test_only_the_newest_ids_are_remembered() -> None:
    desk = Desk(memory=2)
    for command_id in ("a", "b", "c"):
        desk.receive(payload(id=command_id))
    assert desk.receive(payload(id="c")) == ["SUCCEEDED"]
    assert desk.receive(payload(id="b")) == ["SUCCEEDED"]
    assert desk.receive(payload(id="a")) == ["ACCEPTED", "SUCCEEDED"]
    assert desk.device.status_calls == 4


def test_an_error_of_the_handler_fails_the_command_with_its_code() -> None:
    desk = Desk()
    assert desk.receive(payload(op="rollback")) == ["ACCEPTED", "FAILED"]
    error = desk.results[-1].error
    assert error is not None
    assert error.code == "store.no_previous"
    assert error.message == "no previous engine; expected two engines; recalibrate first"


def test_a_retained_command_is_answered_and_nothing_is_done() -> None:
    desk = Desk()
    assert desk.receive(payload(), retained=True) == ["REJECTED"]
    error = desk.results[0].error
    assert error is not None
    assert error.code == "command.retained"
    assert desk.device.status_calls == 0


def test_a_command_without_a_readable_id_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    assert desk.receive(b"\xff") == []
    assert "command=unreadable" in caplog.text
    assert "message.malformed" in caplog.text


def test_a_desk_needs_a_handler_for_every_op() -> None:
    with pytest.raises(ValueError, match="rollback"):
        CommandDispatcher({"status": Device().status}, lambda _result: None)
