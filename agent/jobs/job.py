"""Every job's states in SQLite, written before each step: what a killed daemon was doing is known to the next one."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.database import Database
from agent.errors import AgentError
from agent.job_states import JobState
from agent.state_file import understood
from calibrate.errors import TaredError

_MOST_JOBS = 1000
_COLUMNS = "id, trigger, request, command_ids, state, artefact, error, result"
_MIGRATIONS = (
    """
    CREATE TABLE jobs (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        trigger TEXT NOT NULL,
        request TEXT NOT NULL,
        command_ids TEXT NOT NULL,
        state TEXT NOT NULL,
        artefact TEXT,
        error TEXT,
        result TEXT,
        created_wall REAL NOT NULL,
        updated_wall REAL NOT NULL
    );
    """,
)
_PRAGMAS = ("synchronous = EXTRA",)  # with a rollback journal FULL may lose the last commit


@dataclass(frozen=True)
class JobRecord:
    """A job as the journal has it.

    request: what was asked for. command_ids: of all who asked. artefact: id of the one that was put on probation.
    error: code, found, expected and remedy of a job that came to nothing. result: as its commands are told.
    """

    id: str
    trigger: str
    request: Mapping[str, Any]
    command_ids: tuple[str, ...]
    state: JobState
    artefact: str | None
    error: Mapping[str, str] | None
    result: Mapping[str, Any] | None

    @property
    def why(self) -> AgentError | None:
        """The error as it was raised."""
        return AgentError(**self.error) if self.error is not None else None


class JobJournal:
    """The newest thousand jobs, in the file at `path`; one thread uses it.

    The file is opened for each transaction: jobs are rare, and what is found at the path is what the next process will
    find there. It has a rollback journal, for with a write-ahead log it could not even be read on a disk that is full,
    or read-only. A damaged file is moved aside, told of as `journal.damaged`, and begun anew.
    """

    def __init__(self, path: Path, on_error: Callable[[AgentError], None]) -> None:
        """on_error hears of a file that is damaged, or cannot be opened. Raises AgentError (`journal.schema`) for one
        of a newer tared."""
        holds, loss = "the journal of jobs", "what was asked before may be asked again"
        self._database = Database(path, "journal", holds, loss, _MIGRATIONS, _PRAGMAS)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._check()
        except AgentError as error:
            if error.code == "journal.schema":
                raise
            on_error(error)

    def begin(self, job: str, trigger: str, request: Mapping[str, Any], command_ids: Sequence[str]) -> None:
        """A job is asked for. Raises AgentError (`journal.write`)."""
        now = time.time()
        row = (job, trigger, json.dumps(request), json.dumps(command_ids), JobState.REQUESTED.value, now, now)
        columns = "id, trigger, request, command_ids, state, created_wall, updated_wall"
        self._record(job, JobState.REQUESTED, f"INSERT INTO jobs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def enter(
        self,
        job: str,
        state: JobState,
        *,
        artefact: str | None = None,
        error: TaredError | None = None,
        result: Mapping[str, Any] | None = None,
    ) -> None:
        """The job is about to be in this state. Raises AgentError (`journal.write`), ValueError for no such way."""
        why = {key: getattr(error, key) for key in ("code", "found", "expected", "remedy")} if error else None
        row = (state.value, artefact, _json(why), _json(result), time.time(), job)
        update = (
            "UPDATE jobs SET state = ?, artefact = coalesce(?, artefact), error = ?, result = ?, updated_wall = ? "
            "WHERE id = ?"
        )
        self._record(job, state, update, row)

    def _state(self, db: sqlite3.Connection, job: str) -> JobState:
        row = db.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()
        if row is None:
            raise self._database.refused("write", f"no job {job}: the journal was begun anew meanwhile")
        return JobState(row[0])

    def join(self, job: str, command_ids: Sequence[str]) -> None:
        """Whose commands the job carries out, all of them. Raises AgentError (`journal.write`)."""
        with self._database.transaction("write") as db:
            db.execute("UPDATE jobs SET command_ids = ? WHERE id = ?", (json.dumps(command_ids), job))

    def records(self) -> list[JobRecord]:
        """All jobs that are known, the newest last. Raises AgentError (`journal.read`)."""
        with self._database.transaction("read") as db:
            return [_record(row) for row in db.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY number")]

    def _record(self, job: str, state: JobState, statement: str, row: Sequence[Any]) -> None:
        """Write a job's new state, all of it or nothing, durably."""
        with self._database.transaction("write") as db:
            if state is not JobState.REQUESTED:
                before = self._state(db, job)
                if not before.may_become(state):
                    raise ValueError(f"job {job} cannot go from {before.value} to {state.value}")
            db.execute(statement, row)
            db.execute(f"DELETE FROM jobs WHERE number <= (SELECT max(number) - {_MOST_JOBS} FROM jobs)")

    def _check(self) -> None:
        """Whether all can be read; what cannot is moved aside."""
        with self._database.transaction("read") as db:
            sound = db.execute("PRAGMA quick_check").fetchone() == ("ok",)
            rows = understood(lambda: _all_read(db)) if sound else None
        if rows is None:
            raise self._database.set_aside("it does not hold what a journal holds")


def _all_read(db: sqlite3.Connection) -> list[JobRecord]:
    try:
        return [_record(row) for row in db.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY number")]
    except sqlite3.OperationalError as error:  # a table or a column that is not there
        raise ValueError(str(error)) from error


def _record(row: Sequence[Any]) -> JobRecord:
    """Raises what `understood` takes for a row that no journal has written."""
    job, trigger, request, command_ids, state, artefact, error, result = row
    why = json.loads(error) if error is not None else None
    if why is not None:
        AgentError(**why)
    result = json.loads(result) if result is not None else None
    return JobRecord(
        job, trigger, dict(json.loads(request)), tuple(json.loads(command_ids)), JobState(state), artefact, why, result
    )


def _json(value: Mapping[str, Any] | None) -> str | None:
    return json.dumps(value) if value is not None else None
