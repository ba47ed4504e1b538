"""How a job goes: journaled, told to the world, and to the operators whose commands it carries out."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from agent.commands import Report
from agent.errors import AgentError
from agent.job import CANCELLED
from agent.job_journal import JobJournal
from agent.job_states import WORK, JobState
from agent.reporting import Reporter
from agent.selection_report import SelectionReport
from calibrate.errors import TaredError


class JobReport:
    """A JobObserver. Each state is in the journal before anybody hears of it, or anything of it is begun."""

    def __init__(
        self,
        trigger: str,
        reporter: Reporter,
        on_failure: Callable[[TaredError], None],
        command: Report | None,
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

    def join(self, command: Report) -> None:
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
