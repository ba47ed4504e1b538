"""The states of a job, and which may follow which."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from agent.collection.report import SelectionReport
from agent.common.database import Database
from agent.common.errors import AgentError
from agent.common.state_files import understood
from agent.planning.precision_raise import PrecisionRaise
from calibrate.errors import TaredError


class JobState(str, Enum):
    """In the order in which a job goes through them; a job may pass over some, and never goes back."""

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
    def over(self) -> bool:
        """Whether a job ends in it."""
        return self in _OVER

    def may_become(self, later: JobState) -> bool:
        """Whether a job may go from this state to the later one."""
        if self.over:
            return False
        if later is JobState.COMMITTED:
            return self in _SERVES_NEXT
        if later is JobState.ROLLED_BACK:
            return self is JobState.PROBATION
        return later.over or _ORDER.index(self) < _ORDER.index(later)


_ORDER = tuple(JobState)
WORK = _ORDER[: _ORDER.index(JobState.PROBATION)]  # in which there is no candidate yet
_OVER = frozenset({JobState.COMMITTED, JobState.ROLLED_BACK, JobState.FAILED, JobState.CANCELLED})
# What was built for another runtime or of another model is not on probation: there is nothing to go back to.
_SERVES_NEXT = frozenset({JobState.BUILDING, JobState.PROBATION})

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


MODEL = "model"  # the trigger of a job for another content of the model's file
RUNTIME = "runtime"  # of one that a start does because what serves was built for another runtime
PROVEN = ("switch", "rollback")  # triggers: to engines that have served before, whose first answer is enough


class JobObserver(Protocol):
    """Who asked for a job, and hears of it; percent is of the whole job.

    What is told before something is begun raises AgentError where that cannot be journaled: then it must not begin.
    """

    @property
    def id(self) -> str: ...

    def progress(self, step: str, percent: int) -> None:
        """Before a step, and in it. Raises AgentError."""

    def probation(self, artefact_id: str) -> None:
        """Before the candidate may serve its first frame. Raises AgentError."""

    def succeed(self, result: dict[str, Any]) -> None:
        """Once `current` has moved."""

    def roll_back(self, error: TaredError) -> None:
        """Once the engine from before serves again."""

    def fail(self, error: TaredError) -> None: ...


class WorkObserver(JobObserver, Protocol):
    """Who also hears what becomes of the work before there is a candidate."""

    def waits(self, reason: str) -> None:
        """For the board to have something to spare, and why; empty: no more."""

    def selected(self, selection: SelectionReport, state_dir: Path) -> None:
        """Before they are handed over."""


@dataclass
class Job:
    """One recalibration, or one build of a new model's reference.

    trigger: first-start, alarm, precision, schedule, command or model. started_s: monotonic time of the trigger.
    raising: by how much precision is raised, None where it is not. max_loss: None as configured. reason: why it stands
    still, empty if it does not. model: the file of a new model that is not in its place yet. merged: a calibration of
    the fleet, which is tried in the place of one from the frames.
    """

    trigger: str
    frames: int
    method: str
    report: WorkObserver
    raising: PrecisionRaise | None = None
    max_loss: float | None = None
    started_s: float = field(default_factory=time.monotonic)
    step: str = JobState.REQUESTED.value
    percent: int = 0
    reason: str = ""
    model: Path | None = None
    merged: Path | None = None

    def advance(self, step: str, percent: int) -> None:
        """Note the progress; report it at each new step, and ten percent after ten percent. Raises AgentError."""
        news = (step, percent // 10) != (self.step, self.percent // 10)
        self.step, self.percent = step, percent
        if news:
            self.report.progress(step, percent)

    def waits(self, reason: str) -> bool:
        """Note why it stands still now, empty if it does not; whether it does."""
        if reason != self.reason:
            self.reason = reason
            self.report.waits(reason)
        return bool(reason)
