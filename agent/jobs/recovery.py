"""The jobs of a process that is gone: each is concluded before there is another, and whoever asked is told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agent.commands.dispatcher import failure
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.jobs.job import MODEL, PROVEN, RUNTIME, JobJournal, JobRecord, JobState
from agent.models.engine_service import reject
from agent.system.state_dir import remove_leftovers
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.store.store import Store

INTERRUPTED = "recalibration.interrupted"


@dataclass
class RecoveryResult:
    """What the commands of jobs are answered that end only now; rolled_back: how many candidates were on probation."""

    news: list[CommandResult] = field(default_factory=list)
    rolled_back: int = 0


def results(
    command_ids: Iterable[str], state: JobState, error: AgentError | None, result: Mapping[str, Any] | None
) -> list[CommandResult]:
    """What the commands of a job that ended so are answered."""
    if state is JobState.COMMITTED or error is None:
        return [CommandResult(id=each, status="SUCCEEDED", result=dict(result or {})) for each in command_ids]
    return [CommandResult(id=each, status="FAILED", error=failure(error)) for each in command_ids]


class CrashRecovery:
    """What a process that is gone left in the state directory, as it was before this one changes anything."""

    def __init__(self, state_dir: Path, reporter: Reporter) -> None:
        """Sweeps, and removes a candidate that was on probation: before anything can be chosen to serve. current: the
        id that the store's `current` led to.

        Holding the directory's lock is the caller's part. Raises AgentError (`journal.schema`).
        """
        remove_leftovers(state_dir)
        self._reporter = reporter
        self.current = _current_artefact(state_dir)
        self.journal = JobJournal(state_dir / "jobs.sqlite", reporter.error)
        try:
            self._records = self.journal.records()
        except AgentError:  # told of when it was opened
            self._records = []
        on_probation = [
            record for record in self._records if record.state is JobState.PROBATION and record.trigger not in PROVEN
        ]
        for record in on_probation:
            self._reject(record, state_dir)
        # A candidate that the end of the process took back: so it has done what an operator's rollback was asking for.
        self._left_probation = any(record.artefact != self.current for record in on_probation)

    @property
    def known(self) -> list[CommandResult]:
        """What the commands of all jobs that are over were answered, the newest last."""
        over = [record for record in self._records if record.state.over]
        return [each for job in over for each in results(job.command_ids, job.state, job.why, job.result)]

    @property
    def proven(self) -> set[str]:
        """The artefacts that jobs have put in service to stay, by id."""
        kept = [record.artefact for record in self._records if record.state is JobState.COMMITTED]
        return {artefact for artefact in kept if artefact is not None}

    @property
    def rebuild_interrupted(self) -> bool:
        """Whether the process ended, or was killed, while it last built for a changed runtime."""
        last = next((record for record in reversed(self._records) if record.trigger == RUNTIME), None)
        return last is not None and (not last.state.over or (last.why is not None and last.why.code == INTERRUPTED))

    def conclude(self, content: str) -> RecoveryResult:
        """End the jobs that have not ended. content: of the model's file that is served, as `content_of` has it.

        A candidate that became current was committed, whatever the journal came to say of it; another one was not. So
        was what has taken the place of an engine for another runtime.
        """
        concluded = RecoveryResult()
        for record in self._records:
            if not record.state.over:
                self._end(record, self._end_of(record, content), concluded)
        return concluded

    def _reject(self, record: JobRecord, state_dir: Path) -> None:
        error = _interrupted(record)
        try:
            why = {"trigger": record.trigger, "reason": error.code, "found": error.found}
            reject(Store(state_dir), record.artefact or "", why)
        except TaredError as refusal:
            self._reporter.error(refusal)

    def _end(self, record: JobRecord, state: JobState, concluded: RecoveryResult) -> None:
        committed = state is JobState.COMMITTED
        error = None if committed else _interrupted(record)
        result = {"artefact": record.artefact, "fidelity": None} if committed else None
        try:
            self.journal.enter(record.id, state, error=error, result=result)
        except AgentError as refusal:  # the next start finds it again; whoever asked is told all the same
            self._reporter.error(refusal)
        if error is None:
            self._reporter.event("job", trigger=record.trigger, step=state.value)
        else:
            self._reporter.error(error, trigger=record.trigger, step=state.value)
        concluded.rolled_back += state is JobState.ROLLED_BACK and record.trigger not in PROVEN
        concluded.news += results(record.command_ids, state, error, result)

    def _end_of(self, record: JobRecord, content: str) -> JobState:
        if record.state is JobState.PROBATION:
            back = record.trigger == "rollback" and self._left_probation
            return JobState.COMMITTED if back or record.artefact == self.current else JobState.ROLLED_BACK
        built = record.state is JobState.BUILDING and (
            (record.trigger == MODEL and record.request.get("content") == content)
            or (record.trigger == RUNTIME and record.request.get("instead_of", self.current) != self.current)
        )
        return JobState.COMMITTED if built else JobState.FAILED


def _current_artefact(state_dir: Path) -> str:
    """The id that `current` leads to; empty where there is none."""
    link = state_dir / "current"
    return link.readlink().name if link.is_symlink() else ""


def _interrupted(record: JobRecord) -> AgentError:
    found = f"the daemon ended at {record.state.value}"
    remedy = "what served before serves; send it again under a new id, or wait: what holds on gives a new occasion"
    return AgentError(INTERRUPTED, found, "a daemon that runs until the job has ended", remedy)
