"""The store of a running daemon kept small, while no child works in it and nothing is on probation."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.collection.report import SelectionReport
from agent.commands.dispatcher import CANCELLED, CommandProgress
from agent.common.errors import AgentError
from agent.config import StoreConfig
from agent.jobs.job import MODEL, WORK, JobJournal, JobState
from agent.jobs.limits import AutomationLimits
from agent.system.process import give_back
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.errors import EngineError
from engines.interface import Engine
from engines.store.retention import Freed, Pins, StoreCleaner
from engines.store.store import Store


class Housekeeping:
    """needed: what must stay, by role, at the time of each call."""

    def __init__(self, store: Store, config: StoreConfig, needed: Callable[[], Pins], reporter: Reporter) -> None:
        self._upkeep = StoreCleaner(store, config.keep, config.reserve_bytes)
        self._needed = needed
        self._reporter = reporter

    def tidy(self) -> None:
        """Remove what nobody needs any more; a disk that refuses is told of."""
        try:
            freed = self._upkeep.tidy(self._needed())
        except EngineError as error:
            self._reporter.error(error)
            return
        self._tell(freed)

    def make_room(self) -> None:
        """For one more engine. Raises EngineError as `StoreCleaner.ensure_room`."""
        self._tell(self._upkeep.ensure_room(self._upkeep.largest_bytes(), self._needed()))

    def _tell(self, freed: Freed) -> None:
        if freed.nbytes:
            removed = [*freed.artefacts, *freed.cached]
            self._reporter.event("store", state="tidied", removed=list(removed), freed_bytes=freed.nbytes)


class JobTracker:
    """A JobObserver. Each state is in the journal before anybody hears of it, or anything of it is begun."""

    def __init__(
        self,
        trigger: str,
        reporter: Reporter,
        on_failure: Callable[[TaredError], None],
        command: CommandProgress | None,
        journal: JobJournal,
        request: Mapping[str, Any] | None = None,
    ) -> None:
        """The job is REQUESTED. on_failure hears why it came to nothing, unless it was just cancelled. request: what is
        asked for.

        Raises AgentError (`journal.write`); there is no job then.
        """
        self.id = uuid.uuid4().hex[:12]
        self.trigger = trigger
        self.request = dict(request or {})
        self.state = JobState.REQUESTED
        self._percent = 0
        self._reason = ""
        self._reporter = reporter
        self._on_failure = on_failure
        self._commands = [command] if command is not None else []
        self._journal = journal
        journal.begin(self.id, trigger, self.request, self._command_ids)

    @property
    def over(self) -> bool:
        """Whether the job has come to its end."""
        return self.state.over

    @property
    def words(self) -> str:
        """Where it is, for displays."""
        return f"{self.state.value} {self._percent} %" + (f", waits: {self._reason}" if self._reason else "")

    def as_dict(self) -> dict[str, Any]:
        """The job as `status` tells it."""
        told = {"id": self.id, "trigger": self.trigger, "state": self.state.value, "percent": self._percent}
        return {**told, "waits": self._reason} if self._reason else told

    def join(self, command: CommandProgress) -> None:
        """One more command that asks for the same. Raises AgentError (`journal.write`)."""
        self._commands.append(command)
        try:
            self._journal.join(self.id, self._command_ids)
        except AgentError:
            self._commands.remove(command)
            raise
        command.progress(self.state.value, self._percent)

    def progress(self, step: str, percent: int) -> None:
        """The job begins with a step, or goes on with it. Raises AgentError: `journal.write`, and `recalibration.child`
        for a step that cannot follow, as only a child process may tell of."""
        state = next((each for each in WORK if each.value == step), self.state)
        news = state is not self.state
        if state.value != step or (news and not self.state.may_become(state)):
            found = f"a job at {self.state.value} that goes to {step}"
            raise AgentError("recalibration.child", found, "one step after the other", "see the log, try again")
        if news:
            self._journal.enter(self.id, state)
        self.state, self._percent = state, percent
        self._reporter.event(
            "job", logging.INFO if news else logging.DEBUG, trigger=self.trigger, step=step, percent=percent
        )
        for command in self._commands:
            command.progress(step, percent)

    def probation(self, artefact_id: str) -> None:
        """The candidate is about to serve. Raises AgentError (`journal.write`): then it must not."""
        self._journal.enter(self.id, JobState.PROBATION, artefact=artefact_id)
        self.state = JobState.PROBATION
        self._reporter.event("job", trigger=self.trigger, step=self.state.value, artefact=artefact_id)
        for command in self._commands:
            command.progress(self.state.value, self._percent)

    def waits(self, reason: str) -> None:
        """It stands still for want of headroom, and why; empty: it goes on. The figures in a reason are no news."""
        if bool(reason) != bool(self._reason):
            words = {"waits": reason} if reason else {"waits": "no more"}
            self._reporter.event("job", trigger=self.trigger, step=self.state.value, percent=self._percent, **words)
        self._reason = reason

    def selected(self, selection: SelectionReport, state_dir: Path) -> None:
        """The frames are there: how they were chosen, in an event and in the state directory."""
        detail = selection.detail()
        self._reporter.event(
            "job", trigger=self.trigger, step=self.state.value, percent=self._percent, selection=detail
        )
        selection.write(state_dir, self._reporter.error)

    def succeed(self, result: dict[str, Any]) -> None:
        """COMMITTED: what the job has built serves, and would at the next start."""
        self._end(JobState.COMMITTED, result=result)
        self._reporter.event("job", trigger=self.trigger, step=self.state.value)
        for command in self._commands:
            command.succeed(result)

    def roll_back(self, error: TaredError) -> None:
        """ROLLED_BACK: the engine from before serves again."""
        self._fails(JobState.ROLLED_BACK, error)

    def fail(self, error: TaredError) -> None:
        """FAILED, or CANCELLED where that is the error."""
        self._fails(JobState.CANCELLED if error.code == CANCELLED else JobState.FAILED, error)

    @property
    def _command_ids(self) -> list[str]:
        return [command.latest.id for command in self._commands]

    def _fails(self, state: JobState, error: TaredError) -> None:
        self._end(state, error=error)
        if state is JobState.CANCELLED:
            self._reporter.event("job", trigger=self.trigger, step=state.value, message=error.found)
        else:
            self._reporter.error(error, trigger=self.trigger, step=state.value)
            self._on_failure(error)
        for command in self._commands:
            command.fail(error)

    def _end(self, state: JobState, **outcome: Any) -> None:
        """Whoever waits hears of the end all the same where it cannot be written; the next start finds it out."""
        self.state = state
        try:
            self._journal.enter(self.id, state, **outcome)
        except AgentError as error:
            self._reporter.error(error, trigger=self.trigger)


_JOINABLE = (JobState.REQUESTED, JobState.COLLECTING)


class JobRegistry:
    """What a job leaves in the store, and in memory, is tidied up when it is over."""

    def __init__(
        self, reporter: Reporter, journal: JobJournal, restraint: AutomationLimits, housekeeping: Housekeeping
    ) -> None:
        self._reporter = reporter
        self._journal = journal
        self._restraint = restraint
        self._housekeeping = housekeeping
        self._latest: JobTracker | None = None
        self._untidy = True  # the start may have left something, and so may the process before

    @property
    def job(self) -> JobTracker | None:
        """The running one, on probation too."""
        return self._latest if self._latest is not None and not self._latest.over else None

    def begin(
        self,
        trigger: str,
        request: Mapping[str, Any],
        command: CommandProgress | None = None,
        on_failure: Callable[[TaredError], None] | None = None,
    ) -> JobTracker:
        """A job, of which none runs. on_failure hears why it came to nothing, unless it was just cancelled.

        What failed by itself may pass, but is not tried again at once. Raises AgentError (`journal.write`).
        """

        def failed(error: TaredError) -> None:
            if command is None and trigger != MODEL:
                self._restraint.pause_jobs()
            if on_failure is not None:
                on_failure(error)

        self._latest = JobTracker(trigger, self._reporter, failed, command, self._journal, request)
        self._untidy = True
        return self._latest

    def begin_with(
        self, engine: Engine, trigger: str, request: Mapping[str, Any], command: CommandProgress | None = None
    ) -> JobTracker:
        """As `begin`, for an engine that is loaded already, and closed where there is no job."""
        try:
            return self.begin(trigger, request, command)
        except AgentError:
            engine.close()
            raise

    def recall(self, serving: str, command: CommandProgress) -> JobTracker:
        """The operator's rollback of what is on probation, journaled beside the job that it ends.

        It is done as soon as `serving`, the artefact that is current, serves again: also by another process, which must
        not take the repeated command for one to go back further. Raises AgentError (`journal.write`).
        """
        report = JobTracker("rollback", self._reporter, lambda _: None, command, self._journal, {"op": "rollback"})
        report.probation(serving)
        return report

    def joins(self, request: Mapping[str, Any], command: CommandProgress) -> bool:
        """Whether the running job is to do just that, with frames of now; it then carries out this command, too. Raises
        AgentError (`journal.write`)."""
        if self.job is None or self.job.request != request or self.job.state not in _JOINABLE:
            return False
        self.job.join(command)
        return True

    def tidy(self) -> None:
        """Once after each job; nothing may be running. A recalibration that the operator wanted and that stays is the
        word that jobs may start by themselves again."""
        if self._untidy:
            self._untidy = False
            latest = self._latest
            if latest is not None and (latest.trigger, latest.state) == ("command", JobState.COMMITTED):
                self._restraint.clear_rollbacks()
            self._housekeeping.tidy()
            give_back()
