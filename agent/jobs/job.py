"""The journal of jobs: the next process knows from it what this one was doing.

Each state of a job is written to the `JobJournal` before anything of it is started (agent.core has the states).
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.common.database import Database
from agent.common.errors import AgentError
from agent.common.state_files import parse_or_none
from agent.core.state import JobState
from calibrate.errors import TaredError

if TYPE_CHECKING:
    from agent.reports.state import JobRow

JOURNAL = "jobs.sqlite"
_MOST_JOBS = 1000
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
        artefact: Id of the artefact that was put on probation.
        result: The result that its commands get.
    """

    id: str
    trigger: str
    request: Mapping[str, Any]
    command_ids: tuple[str, ...]
    state: JobState
    artefact: str | None
    error: AgentError | None
    result: Mapping[str, Any] | None


def read_journal(state_dir: Path) -> list[JobRow]:
    """Return what a report shows of a journal, the oldest job first; nothing where there is none, or a damaged one."""
    from agent.reports.state import JobRow  # no daemon needs what draws reports

    path = state_dir / JOURNAL
    if not path.exists():
        return []
    wanted = "SELECT trigger, state, artefact, error, created_wall, updated_wall FROM jobs ORDER BY number"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute(wanted).fetchall()
    except (sqlite3.Error, UnicodeDecodeError):  # the latter of a damaged schema, whose names SQLite quotes
        return []

    def parse(row: Sequence[Any]) -> JobRow:
        trigger, state, artefact, error, created, updated = row
        reason = parse_or_none(lambda: json.loads(error)["found"])
        return JobRow(str(trigger), str(state), str(artefact or ""), str(reason or ""), float(created), float(updated))

    return parse_or_none(lambda: [parse(row) for row in rows]) or []


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
                raise self._database.set_aside("its tables are not those of a journal")
        except AgentError as error:
            if error.code == "journal.schema":
                raise
            on_error(error)

    def start(self, job: str, trigger: str, request: Mapping[str, Any], command_ids: Sequence[str]) -> None:
        """Record a job that is REQUESTED. Raises AgentError (`journal.write`)."""
        now = time.time()
        row = (job, trigger, json.dumps(request), json.dumps(command_ids), JobState.REQUESTED.value, now, now)
        columns = "id, trigger, request, command_ids, state, created_wall, updated_wall"
        with self._database.transaction("write") as db:
            db.execute(f"INSERT INTO jobs ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            db.execute(f"DELETE FROM jobs WHERE number <= (SELECT max(number) - {_MOST_JOBS} FROM jobs)")

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
        error_fields = error.as_dict() if error else None
        row = (state.value, artefact, _json(error_fields), _json(result), time.time(), job)
        update = (
            "UPDATE jobs SET state = ?, artefact = coalesce(?, artefact), error = ?, result = ?, updated_wall = ? "
            "WHERE id = ?"
        )
        with self._database.transaction("write") as db:
            present = db.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()
            if present is None:
                raise self._database.access_error(
                    "write", f"no job {job}: the journal was started from scratch meanwhile"
                )
            if not JobState(present[0]).may_become(state):
                raise ValueError(f"job {job} cannot go from {present[0]} to {state.value}")
            db.execute(update, row)

    def join(self, job: str, command_ids: Sequence[str]) -> None:
        """Record all commands that the job carries out. Raises AgentError (`journal.write`)."""
        with self._database.transaction("write") as db:
            db.execute("UPDATE jobs SET command_ids = ? WHERE id = ?", (json.dumps(command_ids), job))

    def records(self) -> list[JobRecord]:
        """Return all jobs in the journal, the newest last; none of a journal that cannot be read.

        That was reported when it was opened, and no job starts that cannot be journaled.
        """
        try:
            with self._database.transaction("read") as db:
                return parse_or_none(lambda: _read_all(db)) or []
        except AgentError:
            return []


def _read_all(db: sqlite3.Connection) -> list[JobRecord]:
    """Read all rows. Raises what `parse_or_none` catches for a table or rows that no journal has written."""
    columns = "id, trigger, request, command_ids, state, artefact, error, result"
    try:
        return [_parse(row) for row in db.execute(f"SELECT {columns} FROM jobs ORDER BY number")]
    except sqlite3.OperationalError as error:  # a table or a column that is not there
        raise ValueError(str(error)) from error


def _parse(row: Sequence[Any]) -> JobRecord:
    """Raises what `parse_or_none` catches for a row that no journal has written."""
    job, trigger, request, command_ids, state, artefact, error, result = row
    return JobRecord(
        job,
        trigger,
        dict(json.loads(request)),
        tuple(json.loads(command_ids)),
        JobState(state),
        artefact,
        AgentError(**json.loads(error)) if error is not None else None,
        json.loads(result) if result is not None else None,
    )


def _json(value: Mapping[str, Any] | None) -> str | None:
    return json.dumps(value) if value is not None else None
