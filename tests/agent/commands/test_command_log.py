"""The log of commands, whatever becomes of its process and its disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from device import NOW, Device, payload
from kept import kept_in, refusing, spoil

from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import MEMORY_S, CommandLog
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult

DAY_S = 86_400.0


def opened(folder: Path, most_rows: int = 100) -> CommandLog:
    return CommandLog(kept_in(folder), most_rows)


class Process:
    """A desk on a log, as a daemon has them; another one on the same path is the next daemon."""

    def __init__(self, folder: Path) -> None:
        self.device = Device()
        self.results: list[CommandResult] = []
        self.errors: list[AgentError] = []
        self.state = kept_in(folder, self.errors.append)
        self.journal = CommandLog(self.state)
        self.desk = CommandDispatcher(self.device.handlers(), self.results.append, command_log=self.journal)
        self.desk.restore([])

    def receive(self, command: bytes, now: float = NOW) -> list[str]:
        before = len(self.results)
        self.desk.receive(command, now)
        return [result.status for result in self.results[before:]]

    def code(self, at: int = -1) -> str:
        """Return the code of the error in a result."""
        error = self.results[at].error
        assert error is not None
        return error.code


def test_a_command_that_was_carried_out_is_answered_by_the_next_process_and_not_done_again(tmp_path: Path) -> None:
    first = Process(tmp_path)
    assert first.receive(payload(op="cancel")) == ["ACCEPTED", "SUCCEEDED"]
    second = Process(tmp_path)
    assert [result.status for result in second.results] == ["SUCCEEDED"], "nobody knows whether its sender has it"
    assert second.receive(payload(op="cancel")) == ["SUCCEEDED"]
    assert second.receive(payload(op="cancel"), now=NOW + 29 * DAY_S) == ["SUCCEEDED"], "done is done"
    assert not second.device.done_with


def test_results_that_the_broker_has_are_not_published_at_the_start(tmp_path: Path) -> None:
    first = Process(tmp_path)
    first.receive(payload(op="cancel"))
    first.journal.mark_delivered(["c1"])
    second = Process(tmp_path)
    assert second.results == []
    assert second.receive(payload(op="cancel")) == ["SUCCEEDED"]


def test_a_command_that_a_kill_interrupted_has_failed_and_is_not_begun_again(tmp_path: Path) -> None:
    first = Process(tmp_path)
    assert first.receive(payload(op="recalibrate")) == ["ACCEPTED"]
    second = Process(tmp_path)
    (published,) = second.results
    assert (published.id, published.status) == ("c1", "FAILED")
    assert second.code() == "command.interrupted"
    assert second.receive(payload(op="recalibrate")) == ["FAILED"]
    assert second.device.jobs == []


def test_the_journal_of_jobs_knows_better(tmp_path: Path) -> None:
    Process(tmp_path).receive(payload(op="recalibrate"))
    device, results = Device(), list[CommandResult]()
    desk = CommandDispatcher(device.handlers(), results.append, command_log=opened(tmp_path))
    committed = CommandResult(id="c1", status="SUCCEEDED", result={"artefact": "0123"})
    desk.restore([], [committed])
    assert results == [committed]
    third = Process(tmp_path)
    assert third.results == [committed]


def test_a_handler_sees_its_command_written_down_already(tmp_path: Path) -> None:
    journal, seen = opened(tmp_path), list[list[str]]()
    handlers = {**Device().handlers(), "cancel": lambda _args, _report: seen.append(opened(tmp_path).unfinished())}
    CommandDispatcher(handlers, lambda _: None, command_log=journal).receive(payload(op="cancel"), NOW)
    assert seen == [["c1"]]


def test_an_end_is_written_before_it_is_published(tmp_path: Path) -> None:
    device, written = Device(), list[list[str]]()
    desk = CommandDispatcher(
        device.handlers(), lambda _: written.append(opened(tmp_path).unfinished()), command_log=opened(tmp_path)
    )
    desk.receive(payload(op="cancel"), NOW)
    assert written == [["c1"], []]


def test_another_command_under_an_id_that_is_taken_is_rejected(tmp_path: Path) -> None:
    for process in (Process(tmp_path), Process(tmp_path)):
        process.receive(payload(op="cancel"))
        assert process.receive(payload(op="rollback")) == ["REJECTED"]
        assert process.code() == "command.reused"
        assert process.receive(payload(op="cancel")) == ["SUCCEEDED"], "its own end is what it was"


def test_the_same_command_in_another_spelling_is_the_same(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.receive(b'{"id":"c1","op":"cancel","args":{},"issued":1.7e9,"expires":1700000060,"version":1}')
    again = b'{"version":1,"expires":1.70000006e9,"issued":1700000000.0,"args":{},"op":"cancel","id":"\\u00631"}'
    assert process.receive(again) == ["SUCCEEDED"]


def test_a_command_that_is_valid_for_longer_than_it_is_remembered_is_refused(tmp_path: Path) -> None:
    process = Process(tmp_path)
    assert process.receive(payload(op="cancel", expires=NOW + MEMORY_S + 1.0)) == ["REJECTED"]
    from_the_future = payload(op="cancel", issued=NOW + DAY_S, expires=NOW + MEMORY_S + DAY_S)
    assert process.receive(from_the_future) == ["REJECTED"]
    assert {result.error.code for result in process.results if result.error} == {"command.validity"}
    assert process.receive(payload(op="cancel", expires=NOW + MEMORY_S)) == ["ACCEPTED", "SUCCEEDED"]


def test_commands_older_than_thirty_days_are_removed(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for number in range(3):
        journal.accept(f"c{number}", "", NOW + 60.0, NOW + number * DAY_S)
        journal.end(CommandResult(id=f"c{number}", status="SUCCEEDED"))
    journal.accept("new", "", NOW + 40 * DAY_S, NOW + 31.5 * DAY_S)
    assert [journal.find(f"c{number}") is None for number in range(3)] == [True, True, False]


def test_beyond_the_most_rows_only_what_has_expired_is_forgotten(tmp_path: Path) -> None:
    journal = opened(tmp_path, most_rows=3)
    for number in range(3):
        journal.accept(f"c{number}", "", NOW + 60.0, NOW)
        journal.end(CommandResult(id=f"c{number}", status="SUCCEEDED"))
    with pytest.raises(AgentError, match=r"command\.full: 3 commands that are still valid"):
        journal.accept("c3", "", NOW + 61.0, NOW + 1.0)
    assert journal.find("c0") is not None, "it could be sent again"
    journal.accept("c3", "", NOW + 120.0, NOW + 60.0)
    assert [journal.find(f"c{number}") is None for number in range(4)] == [True, False, False, False]


def test_a_running_command_is_never_forgotten(tmp_path: Path) -> None:
    journal = opened(tmp_path, most_rows=2)
    journal.accept("runs", "", NOW + 60.0, NOW)
    for number in range(3):
        at = NOW + 40 * DAY_S + 100.0 * number
        journal.accept(f"c{number}", "", at + 60.0, at)
        journal.end(CommandResult(id=f"c{number}", status="SUCCEEDED"))
    assert journal.unfinished() == ["runs"]


def test_a_disk_that_refuses_refuses_what_changes_something_and_answers_the_rest(tmp_path: Path) -> None:
    process = Process(tmp_path)
    with refusing(process.state):
        assert process.receive(payload(op="cancel")) == ["REJECTED"]
        assert process.receive(payload(id="c2")) == ["ACCEPTED", "SUCCEEDED"]
    assert process.code(0) == "state.read"
    assert process.receive(payload(op="cancel")) == ["ACCEPTED", "SUCCEEDED"], "refused is not carried out"


def test_a_result_that_the_disk_refuses_is_reported_and_written_later(tmp_path: Path) -> None:
    process = Process(tmp_path)
    process.receive(payload(op="recalibrate"))
    with refusing(process.state):
        process.device.jobs[0][1].succeed()
    assert process.results[-1].status == "SUCCEEDED"
    assert [error.code for error in process.errors] == ["state.write"]
    assert opened(tmp_path).unfinished() == ["c1"]
    process.receive(payload(id="c2", op="cancel"))
    assert opened(tmp_path).unfinished() == []


def test_a_log_that_holds_no_results_is_lost(tmp_path: Path) -> None:
    opened(tmp_path).accept("c1", "", NOW, NOW)
    spoil(tmp_path, "UPDATE commands SET result = '{}'")
    process = Process(tmp_path)
    assert [error.code for error in process.errors] == ["state.damaged"]
    assert process.receive(payload(op="cancel")) == ["ACCEPTED", "SUCCEEDED"]
