"""Define the states of a job, and keep the journal of all jobs.

A job is a recalibration, a model update, a switch of regimes or a rollback. It goes through `JobState`; each state is
written to the `JobJournal` before anything of it is started, so that the next process knows what this one was doing.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from agent.common.database import Database
from agent.common.errors import AgentError
from agent.common.state_files import parse_or_none
from calibrate.errors import TaredError

MODEL = "model"  # trigger of a job for another content of the model's file
RUNTIME = "runtime"  # trigger of a job that a start does because the engine was built for another runtime
PROVEN = ("switch", "rollback")  # triggers of swaps to engines that have served before: their first answer is enough


class JobState(str, Enum):
    """The states, in the order in which a job goes through them. A job may skip some, and never goes back."""

    REQUESTED = "REQUESTED"
    COLLECTING = "COLLECTING"
    CALIBRATING = "CALIBRATING"
    PLANNING = "PLANNING"
    BUILDING = "BUILDING"
    VALIDATING = "VALIDATING"
    PROBATION = "PROBATION"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_finished(self) -> bool:
        """True for a state in which a job ends."""
        return self in _FINISHED

    def may_become(self, later: JobState) -> bool:
        """Return True if a job may go from this state to the later one."""
        if self.is_finished:
            return False
        if later is JobState.COMMITTED:
            return self in _BEFORE_COMMIT
        if later is JobState.ROLLED_BACK:
            return self is JobState.PROBATION
        return later.is_finished or _ORDER.index(self) < _ORDER.index(later)


_ORDER = tuple(JobState)
WORK = _ORDER[: _ORDER.index(JobState.PROBATION)]  # the states in which there is no candidate yet
_FINISHED = frozenset({JobState.COMMITTED, JobState.ROLLED_BACK, JobState.FAILED, JobState.CANCELLED})
# An engine for another runtime or of another model is not on probation: there is nothing to go back to.
_BEFORE_COMMIT = frozenset({JobState.BUILDING, JobState.PROBATION})

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

    Args:
        request: What was requested.
        command_ids: The commands that requested it.
        artefact: Id of the artefact that was put on probation.
        error: Code, found, expected and remedy of a job that failed.
        result: The result that its commands get.
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
    def raised_error(self) -> AgentError | None:
        """The error as it was raised."""
        return AgentError(**self.error) if self.error is not None else None


class JobJournal:
    """The newest thousand jobs, in the file at `path`; one thread uses it.

    The file is opened for each transaction, because jobs are rare, and so the next process finds what this one found.
    It has a rollback journal: with a write-ahead log it could not even be read on a disk that is full or read-only. A
    damaged file is moved aside, reported as `journal.damaged`, and started from scratch.
    """

    def __init__(self, path: Path, on_error: Callable[[AgentError], None]) -> None:
        """Open the journal, or create it.

        on_error is called for a file that is damaged, or cannot be opened. Raises AgentError (`journal.schema`) for a
        file of a newer tared.
        """
        holds, loss = "the journal of jobs", "earlier requests may be repeated"
        self._database = Database(path, "journal", holds, loss, _MIGRATIONS, _PRAGMAS)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self._database.transaction("read") as db:
                sound = db.execute("PRAGMA quick_check").fetchone() == ("ok",)
                records = parse_or_none(lambda: _read_all(db)) if sound else None
            if records is None:
                raise self._database.set_aside("it does not hold what a journal holds")
        except AgentError as error:
            if error.code == "journal.schema":
                raise
            on_error(error)

    def start(self, job: str, trigger: str, request: Mapping[str, Any], command_ids: Sequence[str]) -> None:
        """Record a job that is REQUESTED. Raises AgentError (`journal.write`)."""
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
        """Record that the job is about to be in this state.

        Raises AgentError (`journal.write`), and ValueError if this state cannot follow the present one.
        """
        error_fields = {key: getattr(error, key) for key in ("code", "found", "expected", "remedy")} if error else None
        row = (state.value, artefact, _json(error_fields), _json(result), time.time(), job)
        update = (
            "UPDATE jobs SET state = ?, artefact = coalesce(?, artefact), error = ?, result = ?, updated_wall = ? "
            "WHERE id = ?"
        )
        self._record(job, state, update, row)

    def join(self, job: str, command_ids: Sequence[str]) -> None:
        """Record all commands that the job carries out. Raises AgentError (`journal.write`)."""
        with self._database.transaction("write") as db:
            db.execute("UPDATE jobs SET command_ids = ? WHERE id = ?", (json.dumps(command_ids), job))

    def records(self) -> list[JobRecord]:
        """Return all jobs in the journal, the newest last. Raises AgentError (`journal.read`)."""
        with self._database.transaction("read") as db:
            return [_parse(row) for row in db.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY number")]

    def _record(self, job: str, state: JobState, statement: str, row: Sequence[Any]) -> None:
        """Write a job's new state durably, all of it or nothing."""
        with self._database.transaction("write") as db:
            if state is not JobState.REQUESTED:
                present = db.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()
                if present is None:
                    raise self._database.access_error(
                        "write", f"no job {job}: the journal was started from scratch meanwhile"
                    )
                if not JobState(present[0]).may_become(state):
                    raise ValueError(f"job {job} cannot go from {present[0]} to {state.value}")
            db.execute(statement, row)
            db.execute(f"DELETE FROM jobs WHERE number <= (SELECT max(number) - {_MOST_JOBS} FROM jobs)")


def _read_all(db: sqlite3.Connection) -> list[JobRecord]:
    """Read all rows. Raises what `parse_or_none` catches for a table or rows that no journal has written."""
    try:
        return [_parse(row) for row in db.execute(f"SELECT {_COLUMNS} FROM jobs ORDER BY number")]
    except sqlite3.OperationalError as error:  # a table or a column that is not there
        raise ValueError(str(error)) from error


def _parse(row: Sequence[Any]) -> JobRecord:
    """Raises what `parse_or_none` catches for a row that no journal has written."""
    job, trigger, request, command_ids, state, artefact, error, result = row
    error = json.loads(error) if error is not None else None
    if error is not None:
        AgentError(**error)
    result = json.loads(result) if result is not None else None
    return JobRecord(
        job,
        trigger,
        dict(json.loads(request)),
        tuple(json.loads(command_ids)),
        JobState(state),
        artefact,
        error,
        result,
    )


def _json(value: Mapping[str, Any] | None) -> str | None:
    return json.dumps(value) if value is not None else None
