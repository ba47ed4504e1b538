"""The journal of jobs, whatever becomes of its rows."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
from kept import kept_in, spoil

from agent.common.errors import AgentError
from agent.core.state import JobState
from agent.jobs import job as job_journal
from agent.jobs.job import JobJournal

WHY = AgentError("recalibration.refused", "found", "expected", "remedy")


def opened(folder: Path) -> JobJournal:
    return JobJournal(kept_in(folder))


def test_a_state_that_cannot_follow_is_not_written(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.start("a", "alarm", {}, [])
    with pytest.raises(ValueError, match="cannot go from REQUESTED to COMMITTED"):
        journal.enter("a", JobState.COMMITTED)
    assert [record.state for record in journal.records()] == [JobState.REQUESTED]


def test_the_oldest_jobs_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_journal, "_MOST_JOBS", 3)
    journal = opened(tmp_path)
    for number in range(5):
        journal.start(str(number), "alarm", {}, [])
    assert [record.id for record in journal.records()] == ["2", "3", "4"]


@pytest.mark.parametrize(
    "damage",
    ["state = 'DANCING'", "command_ids = '7'", "request = '{'", """error = '{"code": "x"}'"""],
)
def test_a_row_that_no_journal_has_written_costs_the_journal_alone(tmp_path: Path, damage: str) -> None:
    opened(tmp_path).start("a", "alarm", {}, [])
    kept_in(tmp_path).replace({"releases": [("a key", 5)]})
    spoil(tmp_path, f"UPDATE jobs SET {damage}")
    reported: list[AgentError] = []
    journal = JobJournal(kept_in(tmp_path, reported.append))
    assert [(error.code, error.remedy) for error in reported] == [
        ("state.damaged", "check the disk; lost: the journal of jobs")
    ]
    journal.start("b", "alarm", {}, [])
    assert [record.id for record in opened(tmp_path).records()] == ["b"]
    assert kept_in(tmp_path).read("releases", dict) == {"a key": 5}


def test_a_journal_that_is_damaged_in_use_fails_one_job(tmp_path: Path) -> None:
    state = kept_in(tmp_path)
    journal, reported = JobJournal(state), list[AgentError]()
    state.report_to(reported.append)
    journal.start("a", "alarm", {}, [])
    state.path.write_bytes(bytes(range(256)) * 40)
    with pytest.raises(AgentError, match=r"state\.write: .*it was damaged, and has been repaired"):
        journal.enter("a", JobState.COLLECTING)
    with pytest.raises(AgentError, match=r"state\.write: .*no job a"):
        journal.enter("a", JobState.FAILED, error=WHY)
    journal.start("b", "alarm", {}, [])
    journal.enter("b", JobState.COLLECTING)
    assert [error.code for error in reported] == ["state.damaged"]


def test_a_full_disk_fails_the_job_and_harms_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(tmp_path)
    journal.start("a", "alarm", {}, [])

    class Full(sqlite3.Connection):
        """As SQLite does where the file cannot grow."""

        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)  # type: ignore[arg-type]  # passed on as they came
            self.execute("PRAGMA max_page_count = 1")

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *arguments, **more: connect(*arguments, factory=Full, **more))
    with pytest.raises(AgentError, match=r"state\.write: .*full.* the journal of jobs"):
        journal.start("b", "alarm", {"padding": "x" * 100_000}, [])
    monkeypatch.undo()
    assert opened(tmp_path).records()[0].id == "a"
