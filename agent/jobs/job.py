"""Define the states of a job, journal them, and report them: at most one job at a time.

A job is a recalibration, a model update, a switch of regimes or a rollback. It goes through `JobState`; each state is
written to the `JobJournal` before anything of it is started, so that the next process knows what this one was doing.
`JobTracker` does that for one job, and then reports the state as an event and to the job's commands. `JobRegistry`
starts trackers, knows the running one, and tidies up after each job: the artefact store, and memory.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent.collection.report import SelectionReport
from agent.commands.deliveries import StagedModel
from agent.commands.dispatcher import CANCELLED, CommandProgress
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.heap import release_free_memory
from agent.common.state_files import parse_or_none
from agent.jobs.limits import AutomationLimits
from agent.jobs.refusal import Attempt
from agent.models.offline_work import OfflineWork
from agent.planning.raising import PrecisionRaise
from agent.state.salvage import Row
from agent.state.store import StateStore
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.interface import Engine
from engines.store.retention import Freed, Pins, StoreCleaner

if TYPE_CHECKING:
    from agent.reports.state import JobRow

MODEL = "model"  # trigger of a job for another content of the model's file
RUNTIME = "runtime"  # trigger of a job that a start does because the engine was built for another runtime
TRIGGERS = ("first-start", "alarm", "precision", "schedule", "command", MODEL, RUNTIME, "switch", "rollback")
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
# An engine that was built again for another runtime is not on probation: there is nothing to go back to. A start serves
# the model that lies there, however far the job that tried it had come.
_BEFORE_COMMIT = frozenset({JobState.BUILDING, JobState.VALIDATING, JobState.PROBATION})

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


_JOINABLE = (JobState.REQUESTED, JobState.COLLECTING)


@dataclass
class JobTracker:
    """One job. Each state is in the journal before it is reported, and before anything of it is started.

    Start tracking a job that is REQUESTED.

    Args:
        request: What was requested, for the journal.
        command: The command that requested the job, if any.
        on_failure: Called with the error of a job that failed; not for one that was cancelled.

    `error` is the one with which the job ended. `waits` says why it waits for headroom, and is empty while it
    continues. Raises AgentError (`state.write`); there is no job then.
    """

    trigger: str
    reporter: Reporter
    journal: JobJournal
    request: Mapping[str, Any]
    command: CommandProgress | None = None
    on_failure: Callable[[TaredError], None] = lambda _: None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.state = JobState.REQUESTED
        self.error: TaredError | None = None
        self.started_s = self.clock.monotonic_s()
        self._percent = 0
        self.waits = ""
        self._commands = [self.command] if self.command is not None else []
        self.journal.start(self.id, self.trigger, self.request, self._command_ids)

    @property
    def description(self) -> str:
        """State, progress and reason to wait, for displays."""
        return f"{self.state.value} {self._percent} %" + (f", waits: {self.waits}" if self.waits else "")

    def as_dict(self) -> dict[str, Any]:
        """Return the job as `status` reports it."""
        document = {"id": self.id, "trigger": self.trigger, "state": self.state.value, "percent": self._percent}
        return {**document, "waits": self.waits} if self.waits else document

    def join(self, command: CommandProgress) -> None:
        """Carry out one more command that requests the same. Raises AgentError (`state.write`)."""
        self._commands.append(command)
        try:
            self.journal.join(self.id, self._command_ids)
        except AgentError:
            self._commands.remove(command)
            raise
        command.update(self.state.value, self._percent)

    def progress(self, step: str, percent: int) -> None:
        """Report that the job starts a step, or goes on with it, every ten percent; percent is of the whole job.

        Raises AgentError:
            state.write          the step cannot be journaled: then it must not start
            recalibration.child  the step cannot follow, as only a faulty child process reports it
        """
        if (step, percent // 10) == (self.state.value, self._percent // 10):
            return
        state = next((each for each in WORK if each.value == step), self.state)
        is_new = state is not self.state
        if state.value != step or (is_new and not self.state.may_become(state)):
            found = f"a job at {self.state.value} that goes to {step}"
            raise AgentError("recalibration.child", found, "the next step of the job", "see the log, then try again")
        if is_new:
            self.journal.enter(self.id, state)
        self.state, self._percent = state, percent
        level = logging.INFO if is_new else logging.DEBUG
        self.reporter.event("job", level, trigger=self.trigger, step=step, percent=percent)
        for command in self._commands:
            command.update(step, percent)

    def enter_probation(self, artefact_id: str) -> None:
        """Record that the candidate is about to serve. Raises AgentError (`state.write`): then it must not."""
        self.journal.enter(self.id, JobState.PROBATION, artefact=artefact_id)
        self.state = JobState.PROBATION
        self._report_state(artefact=artefact_id)
        for command in self._commands:
            command.update(self.state.value, self._percent)

    def report_waiting(self, reason: str) -> None:
        """Report why the job stands still for want of headroom; empty: it goes on.

        Another reason while it stands still is kept, but not reported: mostly only its figures change.
        """
        if bool(reason) != bool(self.waits):
            self._report_state(percent=self._percent, waits=reason or "no more")
        self.waits = reason

    def report_shortage(self, collected: int, needed: int) -> None:
        """Report that the frames have ended, and that the job goes on with those there are."""
        message = f"the recording has ended: the job continues with {collected} of {needed} frames"
        self._report_state(percent=self._percent, message=message)

    def report_selection(self, selection: SelectionReport, state_dir: Path) -> None:
        """Report how the frames were chosen, as an event and in the state directory."""
        self._report_state(percent=self._percent, selection=selection.detail())
        selection.write(state_dir, self.reporter.error)

    def succeed(self, result: dict[str, Any]) -> None:
        """End the job as COMMITTED: `current` has moved to its engine."""
        self._record_end(JobState.COMMITTED, result=result)
        self._report_state()
        for command in self._commands:
            command.succeed(result)

    def fail(self, error: TaredError, *, rolled_back: bool = False) -> None:
        """End the job as FAILED, or as CANCELLED where that is the error.

        rolled_back: it ends as ROLLED_BACK, because the previous engine serves again.
        """
        self.error = error
        state = JobState.CANCELLED if error.code == CANCELLED else JobState.FAILED
        state = JobState.ROLLED_BACK if rolled_back else state
        if state is not JobState.CANCELLED:
            self.on_failure(error)  # before the journal: after a kill in between nothing is tried again in vain
        self._record_end(state, error=error)
        if self.state is JobState.CANCELLED:
            self._report_state(message=error.found)
        else:
            self.reporter.error(error, trigger=self.trigger, step=self.state.value)
        for command in self._commands:
            command.fail(error)

    @property
    def _command_ids(self) -> list[str]:
        return [command.latest.id for command in self._commands]

    def _report_state(self, **detail: Any) -> None:
        self.reporter.event("job", trigger=self.trigger, step=self.state.value, **detail)

    def _record_end(self, state: JobState, **outcome: Any) -> None:
        """Journal the end. Where that fails it is reported all the same; the next start finds the job again."""
        self.state = state
        try:
            self.journal.enter(self.id, state, **outcome)
        except AgentError as error:
            self.reporter.error(error, trigger=self.trigger)


@dataclass
class Job:
    """One recalibration, or one build of a new model's reference.

    Args:
        tracker: Journals and reports the progress. Its trigger is first-start, alarm, precision, schedule, command or
            model.
        frames: Frames to collect; 0: as configured.
        method: How scales are chosen, see calibrate.threshold; empty: as configured.
        raising: By how much precision is raised; None where it is not.
        max_loss: Largest accepted loss of fidelity; None: as configured.
        staged: The delivered model, which is not in its place yet; None: the model's file as it is now.
        merged: A calibration of the fleet, which is tried instead of one from the frames.
        offline: What the owner has made offline, which is tried instead of a calibration from the frames.
        attempt: What the candidate comes of, once the frames are collected; None where precision is raised, which
            PrecisionAttempts remembers, for offline work, which OfflineQueue does, and for a calibration of the fleet.
    """

    tracker: JobTracker
    frames: int = 0
    method: str = ""
    raising: PrecisionRaise | None = None
    max_loss: float | None = None
    staged: StagedModel | None = None
    merged: Path | None = None
    offline: OfflineWork | None = None
    attempt: Attempt | None = None


@dataclass
class JobRegistry:
    """Starts jobs, one at a time, and tidies up when a job has ended. Runs in the supervisor's thread.

    pins: returns the artefacts that must stay in the store, by role. `started`: the newest jobs of this process.
    """

    reporter: Reporter
    journal: JobJournal
    limits: AutomationLimits
    cleaner: StoreCleaner
    pins: Callable[[], Pins]
    clock: Clock = SYSTEM_CLOCK
    started: deque[JobTracker] = field(default_factory=lambda: deque(maxlen=_MOST_JOBS), init=False)
    _is_untidy: bool = field(default=True, init=False)  # this start, or the previous process, may have left something

    @property
    def job(self) -> JobTracker | None:
        """The running job, also while its candidate is on probation."""
        latest = self._latest
        return latest if latest is not None and not latest.state.is_finished else None

    @property
    def last_error(self) -> TaredError | None:
        """The error with which the latest job ended, in this process or the one before; None if it ended well."""
        latest = self._latest
        return latest.error if latest is not None else self._error_before

    @cached_property
    def _error_before(self) -> TaredError | None:
        return next((record.error for record in self.journal.records()[-1:]), None)

    @property
    def _latest(self) -> JobTracker | None:
        return self.started[-1] if self.started else None

    def start(
        self,
        trigger: str,
        request: Mapping[str, Any],
        command: CommandProgress | None = None,
        on_failure: Callable[[TaredError], None] | None = None,
    ) -> JobTracker:
        """Start a job; none may be running. A job that failed without a command is not started again at once.

        Args:
            on_failure: Called with the error of a job that failed; not for one that was cancelled.

        Raises AgentError (`state.write`).
        """

        def failed(error: TaredError) -> None:
            if command is None and trigger != MODEL:
                self.limits.pause_jobs()
            if on_failure is not None:
                on_failure(error)

        self.started.append(JobTracker(trigger, self.reporter, self.journal, request, command, failed, self.clock))
        self._is_untidy = True
        return self.started[-1]

    def start_with_engine(
        self, engine: Engine, trigger: str, request: Mapping[str, Any], command: CommandProgress | None = None
    ) -> JobTracker:
        """Start a job for an engine that is loaded already; the engine is closed if that fails."""
        try:
            return self.start(trigger, request, command)
        except AgentError:
            engine.close()
            raise

    def start_recall(self, serving: str, command: CommandProgress) -> JobTracker:
        """Start the operator's rollback of a candidate on probation, journaled next to the job that it ends.

        The rollback is complete once `serving` (the current artefact) serves again. It is journaled so that a restarted
        daemon, which receives the command again, does not roll back a second time. Raises AgentError (`state.write`).
        """
        tracker = JobTracker("rollback", self.reporter, self.journal, {"op": "rollback"}, command)
        tracker.enter_probation(serving)
        return tracker

    def join(self, request: Mapping[str, Any], command: CommandProgress) -> bool:
        """Let the running job carry out this command too; False unless it does just that, and still collects frames.

        Raises AgentError (`state.write`).
        """
        if self.job is None or self.job.request != request or self.job.state not in _JOINABLE:
            return False
        self.job.join(command)
        return True

    def make_room(self) -> None:
        """Free disk space for one more engine. Raises EngineError as `StoreCleaner.ensure_room`."""
        self._report_freed(self.cleaner.ensure_room(self.cleaner.largest_bytes(), self.pins()))

    def tidy(self) -> bool:
        """Remove artefacts that nobody needs any more, once after each job; no job may be running.

        Return True where that was due.

        A recalibration by command that was committed lifts the stop after too many rollbacks.
        """
        if not self._is_untidy:
            return False
        self._is_untidy = False
        latest = self._latest
        if latest is not None and (latest.trigger, latest.state) == ("command", JobState.COMMITTED):
            self.limits.clear_rollbacks()
        with self.reporter.reporting_errors():
            self._report_freed(self.cleaner.tidy(self.pins()))
        release_free_memory()
        return True

    def _report_freed(self, freed: Freed) -> None:
        if freed.nbytes:
            removed = [*freed.artefacts, *freed.cached]
            self.reporter.event("store", state="tidied", removed=list(removed), freed_bytes=freed.nbytes)
