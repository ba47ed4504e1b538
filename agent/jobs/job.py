"""The journal of jobs: the next process knows from it what this one was doing.

Each state of a job is written to the `JobJournal` before anything of it is started (agent.core has the states).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.common.errors import AgentError
from agent.common.state_files import parse_or_none
from agent.core.state import JobState
from agent.state.salvage import Row
from agent.state.store import StateStore
from calibrate.errors import TaredError

if TYPE_CHECKING:
    from agent.reports.state import JobRow

_MOST_JOBS = 1000


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

    def shown(row: Row) -> JobRow:
        _, _, trigger, _, _, state, artefact, error, _, created, updated = row
        reason = parse_or_none(lambda: json.loads(error)["found"])
        return JobRow(trigger, state, artefact or "", str(reason or ""), created, updated)

    return StateStore.copy_of(state_dir, ["jobs"]).read("jobs", lambda rows: [*map(shown, rows)]) or []


class JobJournal:
    """The newest thousand jobs, in the board's state; one thread uses it."""

    def __init__(self, state: StateStore) -> None:
        self._state = state
        self.records()  # reports a journal that is damaged

    def start(self, job: str, trigger: str, request: Mapping[str, Any], command_ids: Sequence[str]) -> None:
        """Record a job that is REQUESTED. Raises AgentError (`state.write`)."""
        now = time.time()
        row = (job, trigger, json.dumps(request), json.dumps(command_ids), JobState.REQUESTED.value, now, now)
        columns = "id, trigger, request, command_ids, state, created_wall, updated_wall"
        with self._state.transaction("write", "jobs") as db:
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

        Raises AgentError (`state.write`), and ValueError if this state cannot follow the present one.
        """
        error_fields = error.as_dict() if error else None
        row = (state.value, artefact, _json(error_fields), _json(result), time.time(), job)
        update = (
            "UPDATE jobs SET state = ?, artefact = coalesce(?, artefact), error = ?, result = ?, updated_wall = ? "
            "WHERE id = ?"
        )
        with self._state.transaction("write", "jobs") as db:
            present = db.execute("SELECT state FROM jobs WHERE id = ?", (job,)).fetchone()
            if present is None:
                found = f"no job {job} in {self._state.path}: the journal was started from scratch meanwhile"
                raise AgentError("state.write", found, "the journal of jobs", "start the job again")
            if not JobState(present[0]).may_become(state):
                raise ValueError(f"job {job} cannot go from {present[0]} to {state.value}")
            db.execute(update, row)

    def join(self, job: str, command_ids: Sequence[str]) -> None:
        """Record all commands that the job carries out. Raises AgentError (`state.write`)."""
        with self._state.transaction("write", "jobs") as db:
            db.execute("UPDATE jobs SET command_ids = ? WHERE id = ?", (json.dumps(command_ids), job))

    def records(self) -> list[JobRecord]:
        """Return all jobs in the journal, the newest last; none of a journal that cannot be read.

        That is reported, and no job starts that cannot be journaled.
        """
        return self._state.read("jobs", lambda rows: [*map(_parse, rows)]) or []


def _parse(row: Row) -> JobRecord:
    """Raises what `parse_or_none` catches for a row that no journal has written."""
    _, job, trigger, request, command_ids, state, artefact, error, result, _, _ = row
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
