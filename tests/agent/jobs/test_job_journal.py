"""The journal of jobs, whatever becomes of its file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from unexpected import unexpected

from agent.common.errors import AgentError
from agent.core.state import JobState
from agent.jobs import job as job_journal
from agent.jobs.job import JobJournal

WHY = AgentError("recalibration.refused", "found", "expected", "remedy")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.sqlite"


def opened(path: Path) -> JobJournal:
    return JobJournal(path, unexpected)


def test_a_state_that_cannot_follow_is_not_written(path: Path) -> None:
    journal = opened(path)
    journal.start("a", "alarm", {}, [])
    with pytest.raises(ValueError, match="cannot go from REQUESTED to COMMITTED"):
        journal.enter("a", JobState.COMMITTED)
    assert [record.state for record in journal.records()] == [JobState.REQUESTED]


def test_the_oldest_jobs_go(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_journal, "_MOST_JOBS", 3)
    journal = opened(path)
    for number in range(5):
        journal.start(str(number), "alarm", {}, [])
    assert [record.id for record in journal.records()] == ["2", "3", "4"]


def of_random_bytes(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 40)


def with_a_hole(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4096:8192] = b"\xa5" * 4096
    path.write_bytes(content)


def changed(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with closing(sqlite3.connect(path)) as db:
            db.execute(statement)
            db.commit()

    return change


@pytest.mark.parametrize(
    "damage",
    [
        of_random_bytes,
        with_a_hole,
        changed("DROP TABLE jobs"),
        changed("UPDATE jobs SET state = 'DANCING'"),
        changed("UPDATE jobs SET command_ids = '7'"),
        changed("""UPDATE jobs SET error = '{"code": "x"}'"""),
    ],
)
def test_a_damaged_journal_is_moved_aside_reported_and_started_anew(path: Path, damage: Callable[[Path], None]) -> None:
    opened(path).start("a", "alarm", {}, [])
    damage(path)
    content, reported = path.read_bytes(), list[AgentError]()
    journal = JobJournal(path, reported.append)
    assert [error.code for error in reported] == ["journal.damaged"]
    assert path.with_name("jobs.sqlite.damaged.1").read_bytes() == content
    assert journal.records() == []
    journal.start("b", "alarm", {}, [])
    assert [record.id for record in opened(path).records()] == ["b"]


def test_a_journal_that_is_damaged_in_use_fails_one_job(path: Path) -> None:
    journal = opened(path)
    journal.start("a", "alarm", {}, [])
    of_random_bytes(path)
    with pytest.raises(AgentError, match=r"journal\.damaged"):
        journal.enter("a", JobState.COLLECTING)
    with pytest.raises(AgentError, match=r"journal\.write: .*no job a"):
        journal.enter("a", JobState.FAILED, error=WHY)
    journal.start("b", "alarm", {}, [])
    journal.enter("b", JobState.COLLECTING)


def test_a_journal_of_a_newer_schema_is_refused_and_left_as_it_is(path: Path) -> None:
    opened(path).start("a", "alarm", {}, [])
    changed("PRAGMA user_version = 99")(path)
    content = path.read_bytes()
    with pytest.raises(AgentError, match=r"journal\.schema: .* of schema 99; expected schema 1"):
        opened(path)
    assert path.read_bytes() == content


def test_an_older_schema_migrates_forward(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened(path).start("a", "alarm", {}, [])
    later = (*job_journal._MIGRATIONS, "ALTER TABLE jobs ADD COLUMN colour TEXT DEFAULT 'red';")
    monkeypatch.setattr(job_journal, "_MIGRATIONS", later)
    assert [record.id for record in opened(path).records()] == ["a"]
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT colour FROM jobs").fetchall() == [("red",)]
        assert db.execute("PRAGMA user_version").fetchone() == (2,)


def test_a_full_disk_fails_the_job_and_harms_nothing_that_was_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = opened(path)
    journal.start("a", "alarm", {}, [])

    class Full(sqlite3.Connection):
        """As SQLite does where the file cannot grow."""

        def __init__(self, *arguments: object, **more: object) -> None:
            super().__init__(*arguments, **more)  # type: ignore[arg-type]  # passed on as they came
            self.execute("PRAGMA max_page_count = 1")

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *arguments, **more: connect(*arguments, factory=Full, **more))
    with pytest.raises(AgentError, match=r"journal\.write: .*full"):
        journal.start("b", "alarm", {"padding": "x" * 100_000}, [])
    monkeypatch.undo()
    assert opened(path).records()[0].id == "a"
