"""The log of commands, whatever becomes of its process and its disk."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from device import NOW, Device, payload

from agent.commands.dispatcher import CommandDispatcher
from agent.commands.log import MEMORY_S, CommandLog
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult

DAY_S = 86_400.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "commands.sqlite"


def opened(path: Path, most_rows: int = 100) -> CommandLog:
    return CommandLog(path, lambda error: pytest.fail(str(error)), most_rows)


class Process:
    """A desk on a log, as a daemon has them; another one on the same path is the next daemon."""

    def __init__(self, path: Path) -> None:
        self.device = Device()
        self.results: list[CommandResult] = []
        self.errors: list[AgentError] = []
        self.journal = CommandLog(path, self.errors.append)
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


def test_a_command_that_was_carried_out_is_answered_by_the_next_process_and_not_done_again(path: Path) -> None:
    first = Process(path)
    assert first.receive(payload(op="cancel")) == ["ACCEPTED", "SUCCEEDED"]
    second = Process(path)
    assert [result.status for result in second.results] == ["SUCCEEDED"], "nobody knows whether its sender has it"
    assert second.receive(payload(op="cancel")) == ["SUCCEEDED"]
    assert second.receive(payload(op="cancel"), now=NOW + 29 * DAY_S) == ["SUCCEEDED"], "done is done"
    assert not second.device.done_with


def test_results_that_the_broker_has_are_not_published_at_the_start(path: Path) -> None:
    first = Process(path)
    first.receive(payload(op="cancel"))
    first.journal.mark_delivered(["c1"])
    second = Process(path)
    assert second.results == []
    assert second.receive(payload(op="cancel")) == ["SUCCEEDED"]


def test_a_command_that_a_kill_interrupted_has_failed_and_is_not_begun_again(path: Path) -> None:
    first = Process(path)
    assert first.receive(payload(op="recalibrate")) == ["ACCEPTED"]
    second = Process(path)
    (published,) = second.results
    assert (published.id, published.status) == ("c1", "FAILED")
    assert second.code() == "command.interrupted"
    assert second.receive(payload(op="recalibrate")) == ["FAILED"]
    assert second.device.jobs == []


def test_the_journal_of_jobs_knows_better(path: Path) -> None:
    Process(path).receive(payload(op="recalibrate"))
    device, results = Device(), list[CommandResult]()
    desk = CommandDispatcher(device.handlers(), results.append, command_log=opened(path))
    committed = CommandResult(id="c1", status="SUCCEEDED", result={"artefact": "0123"})
    desk.restore([], [committed])
    assert results == [committed]
    third = Process(path)
    assert third.results == [committed]


def test_a_handler_sees_its_command_written_down_already(path: Path) -> None:
    journal, seen = opened(path), list[list[str]]()
    handlers = {**Device().handlers(), "cancel": lambda _args, _report: seen.append(opened(path).unfinished())}
    CommandDispatcher(handlers, lambda _: None, command_log=journal).receive(payload(op="cancel"), NOW)
    assert seen == [["c1"]]


def test_an_end_is_written_before_it_is_published(path: Path) -> None:
    device, written = Device(), list[list[str]]()
    desk = CommandDispatcher(
        device.handlers(), lambda _: written.append(opened(path).unfinished()), command_log=opened(path)
    )
    desk.receive(payload(op="cancel"), NOW)
    assert written == [["c1"], []]


def test_another_command_under_an_id_that_is_taken_is_rejected(path: Path) -> None:
    for process in (Process(path), Process(path)):
        process.receive(payload(op="cancel"))
        assert process.receive(payload(op="rollback")) == ["REJECTED"]
        assert process.code() == "command.reused"
        assert process.receive(payload(op="cancel")) == ["SUCCEEDED"], "its own end is what it was"


def test_the_same_command_in_another_spelling_is_the_same(path: Path) -> None:
    process = Process(path)
    process.receive(b'{"id":"c1","op":"cancel","args":{},"issued":1.7e9,"expires":1700000060,"version":1}')
    again = b'{"version":1,"expires":1.70000006e9,"issued":1700000000.0,"args":{},"op":"cancel","id":"\\u00631"}'
    assert process.receive(again) == ["SUCCEEDED"]


def test_a_command_that_is_valid_for_longer_than_it_is_remembered_is_refused(path: Path) -> None:
    process = Process(path)
    assert process.receive(payload(op="cancel", expires=NOW + MEMORY_S + 1.0)) == ["REJECTED"]
    from_the_future = payload(op="cancel", issued=NOW + DAY_S, expires=NOW + MEMORY_S + DAY_S)
    assert process.receive(from_the_future) == ["REJECTED"]
    assert {result.error.code for result in process.results if result.error} == {"command.validity"}
    assert process.receive(payload(op="cancel", expires=NOW + MEMORY_S)) == ["ACCEPTED", "SUCCEEDED"]


def test_commands_older_than_thirty_days_are_removed(path: Path) -> None:
    journal = opened(path)
    for number in range(3):
        journal.accept(f"c{number}", "", NOW + 60.0, NOW + number * DAY_S)
        journal.end(CommandResult(id=f"c{number}", status="SUCCEEDED"))
    journal.accept("new", "", NOW + 40 * DAY_S, NOW + 31.5 * DAY_S)
    assert [journal.find(f"c{number}") is None for number in range(3)] == [True, True, False]


def test_beyond_the_most_rows_only_what_has_expired_is_forgotten(path: Path) -> None:
    journal = opened(path, most_rows=3)
    for number in range(3):
        journal.accept(f"c{number}", "", NOW + 60.0, NOW)
        journal.end(CommandResult(id=f"c{number}", status="SUCCEEDED"))
    with pytest.raises(AgentError, match=r"command\.full: 3 commands that are still valid"):
        journal.accept("c3", "", NOW + 61.0, NOW + 1.0)
    assert journal.find("c0") is not None, "it could be sent again"
    journal.accept("c3", "", NOW + 120.0, NOW + 60.0)
    assert [journal.find(f"c{number}") is None for number in range(4)] == [True, False, False, False]


def test_a_running_command_is_never_forgotten(path: Path) -> None:
    journal = opened(path, most_rows=2)
    journal.accept("runs", "", NOW + 60.0, NOW)
    for number in range(3):
        at = NOW + 40 * DAY_S + 100.0 * number
        journal.accept(f"c{number}", "", at + 60.0, at)
        journal.end(CommandResult(id=f"c{number}", status="SUCCEEDED"))
    assert journal.unfinished() == ["runs"]


def refusing(path: Path) -> sqlite3.Connection:
    """Another process that keeps the file to itself, so that it can neither be read nor written."""
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("BEGIN EXCLUSIVE")
    return db


def test_a_disk_that_refuses_refuses_what_changes_something_and_answers_the_rest(path: Path) -> None:
    process = Process(path)
    with closing(refusing(path)):
        assert process.receive(payload(op="cancel")) == ["REJECTED"]
        assert process.receive(payload(id="c2")) == ["ACCEPTED", "SUCCEEDED"]
    assert process.code(0) == "command.log"
    assert process.receive(payload(op="cancel")) == ["ACCEPTED", "SUCCEEDED"], "refused is not carried out"


def test_a_result_that_the_disk_refuses_is_reported_and_written_later(path: Path) -> None:
    process = Process(path)
    process.receive(payload(op="recalibrate"))
    with closing(refusing(path)):
        process.device.jobs[0][1].succeed()
    assert process.results[-1].status == "SUCCEEDED"
    assert [error.code for error in process.errors] == ["command.write"]
    assert opened(path).unfinished() == ["c1"]
    process.receive(payload(id="c2", op="cancel"))
    assert opened(path).unfinished() == []


@pytest.mark.parametrize("content", [b"no database at all", b"SQLite format 3\0" + b"x" * 4096])
def test_a_damaged_log_is_moved_aside(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    process = Process(path)
    assert [error.code for error in process.errors] == ["command.damaged"]
    assert path.with_name("commands.sqlite.damaged.1").read_bytes() == content
    assert process.receive(payload(op="cancel")) == ["ACCEPTED", "SUCCEEDED"]


def test_a_log_that_holds_no_results_is_moved_aside(path: Path) -> None:
    opened(path).accept("c1", "", NOW, NOW)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE commands SET result = '{}'")
    assert [error.code for error in Process(path).errors] == ["command.damaged"]


@pytest.mark.parametrize("schema", [1, 99], ids=["of a checkout before 0.2.0", "of a newer tared"])
def test_a_log_of_another_schema_is_left_alone(path: Path, schema: int) -> None:
    opened(path)
    with closing(sqlite3.connect(path)) as db:
        db.execute(f"PRAGMA user_version = {schema}")
    before = path.read_bytes()
    with pytest.raises(AgentError, match=rf"command\.schema: .* of schema {schema}; expected schema 2;"):
        opened(path)
    assert path.read_bytes() == before
