"""End the jobs that a crashed or killed process left unfinished, before another job starts.

`CrashRecovery` cleans the state directory and removes a candidate that was on probation, before an engine is chosen to
serve. While one is chosen, it keeps the job of a start after a change of the runtime: the engine is rebuilt from its
own calibration. Once one serves, `end_unfinished_jobs` decides of each job whether it was committed, and answers its
commands.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.commands.dispatcher import failure
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.core import actions as act
from agent.core.causes import INTERRUPTED
from agent.core.kinds import Rebuild, Trigger
from agent.core.state import Job, JobState
from agent.jobs.job import JobJournal, JobRecord
from agent.jobs.ledger import JobLedger
from agent.models.engine_service import reject
from agent.state.store import StateStore
from agent.system.state_dir import remove_leftovers
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.store.artefact import Store

# Triggers of swaps to engines that have served before.
_PROVEN = (Trigger.SWITCH, Trigger.ROLLBACK)


@dataclass
class RecoveryResult:
    """The answers to the commands of jobs that end only now, and how many candidates were on probation."""

    results: list[CommandResult] = field(default_factory=list)
    rolled_back: int = 0


def _results(
    command_ids: Iterable[str], state: JobState, error: AgentError | None, result: Mapping[str, Any] | None
) -> list[CommandResult]:
    """Return the answers to the commands of a job that ended in this state."""
    if state is JobState.COMMITTED or error is None:
        return [CommandResult(id=each, status="SUCCEEDED", result=dict(result or {})) for each in command_ids]
    return [CommandResult(id=each, status="FAILED", error=failure(error)) for each in command_ids]


class CrashRecovery:
    """The state that the previous process left in the state directory, before this one changes anything.

    Attributes:
        current: Id of the artefact that `current` led to; empty for none.
    """

    def __init__(self, state_dir: Path, state: StateStore, reporter: Reporter) -> None:
        """Remove leftover files, and a candidate that was on probation, so that it cannot be chosen to serve.

        The caller holds the directory's lock.
        """
        remove_leftovers(state_dir)
        self._reporter = reporter
        link = state_dir / "current"
        self.current = link.readlink().name if link.is_symlink() else ""
        self.journal = JobJournal(state)
        self._records = self.journal.records()
        on_probation = [
            record
            for record in self._records
            if record.state is JobState.PROBATION and record.trigger not in (Trigger.MODEL, *_PROVEN)
        ]
        for record in on_probation:
            error = _interrupted(record)
            with reporter.reporting_errors():
                rollback = {"trigger": record.trigger, "reason": error.code, "found": error.found}
                reject(Store(state_dir), record.artefact or "", rollback)
        # The end of the process took a candidate back, and so has done what an operator's rollback requested.
        self._left_probation = any(record.artefact != self.current for record in on_probation)
        self._rebuild: Job | None = None
        self._ledger = JobLedger(reporter, self.journal)
        self._start_error: TaredError | None = None
        self._refusal: AgentError | None = None  # the journal's, at the rebuild's first step

    @property
    def command_results(self) -> list[CommandResult]:
        """The answers to the commands of all finished jobs, the newest last."""
        return [
            result
            for job in self._records
            if job.state.is_finished
            for result in _results(job.command_ids, job.state, job.error, job.result)
        ]

    @property
    def rebuild_interrupted(self) -> bool:
        """True if the process ended or was killed while it last built for a changed runtime."""
        last = next((record for record in reversed(self._records) if record.trigger == Trigger.RUNTIME), None)
        return last is not None and (
            not last.state.is_finished or (last.error is not None and last.error.code == INTERRUPTED)
        )

    def on_start_error(self, error: TaredError) -> None:
        """Report an error that `EngineService.start` met; that of an artefact of another runtime starts a job."""
        self._reporter.error(error)
        self._start_error = error
        if error.code == "artefact.runtime" and self._rebuild is None:
            job = Job(uuid.uuid4().hex[:12], Rebuild(self.current), 0.0)
            try:
                self._ledger.begin(act.Begin(job))
                self._rebuild = job
                self._rebuild = replace(job, state=JobState.BUILDING)
                self._ledger.enter(act.Enter(self._rebuild))
            except AgentError as refusal:  # the engine is rebuilt all the same
                self._reporter.error(refusal)
                self._refusal = refusal

    def engine_started(self, artefact: str, degraded: bool) -> None:
        """End the job of the start, if there is one: this artefact serves; degraded: it is the reference."""
        job = self._rebuild
        if job is None:
            return
        error = self._start_error if degraded and self._start_error is not None else self._refusal
        if error is not None:
            self._ledger.end(act.End(job, JobState.FAILED, error))
        else:
            self._ledger.end(act.End(job, JobState.COMMITTED, result={"artefact": artefact}))

    def end_unfinished_jobs(self, content: str) -> RecoveryResult:
        """End the jobs that have not ended.

        A job was committed if its candidate became current, whatever the journal says of it. So was one whose engine
        has replaced an engine for another runtime, and one whose model is served now. All others have failed.

        content: of the model's file that is served, as `content_of` returns it.
        """
        recovered = RecoveryResult()
        for record in self._records:
            if record.state.is_finished:
                continue
            state = self._end_state(record, content)
            committed = state is JobState.COMMITTED
            error = None if committed else _interrupted(record)
            result = {"artefact": record.artefact, "fidelity": None} if committed else None
            with self._reporter.reporting_errors():  # the next start finds the job again; its commands are answered now
                self.journal.enter(record.id, state, error=error, result=result)
            if error is None:
                self._reporter.event("job", trigger=record.trigger, step=state.value)
            else:
                self._reporter.error(error, trigger=record.trigger, step=state.value)
            recovered.rolled_back += state is JobState.ROLLED_BACK and record.trigger not in _PROVEN
            recovered.results += _results(record.command_ids, state, error, result)
        return recovered

    def _end_state(self, record: JobRecord, content: str) -> JobState:
        if record.trigger == Trigger.MODEL:
            if record.request.get("content") == content and record.state.may_become(JobState.COMMITTED):
                return JobState.COMMITTED
            return JobState.ROLLED_BACK if record.state is JobState.PROBATION else JobState.FAILED
        if record.state is JobState.PROBATION:
            back = record.trigger == Trigger.ROLLBACK and self._left_probation
            return JobState.COMMITTED if back or record.artefact == self.current else JobState.ROLLED_BACK
        replaced = record.trigger == Trigger.RUNTIME and record.request.get("instead_of", self.current) != self.current
        return JobState.COMMITTED if replaced and record.state is JobState.BUILDING else JobState.FAILED


def _interrupted(record: JobRecord) -> AgentError:
    found = f"the daemon ended at {record.state.value}"
    remedy = (
        "the previous engine serves; send the command again under a new id, or wait: "
        "a cause that lasts starts a new job"
    )
    return AgentError(INTERRUPTED, found, "a daemon that runs until the job has ended", remedy)
