"""Journal jobs, report them, and answer their commands.

Each state of a job is in the journal before it is reported, and before anything of it is started, so that the next
process knows what this one was doing.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from pydantic import JsonValue

from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.kinds import Recall
from agent.core.state import Job, JobState
from agent.jobs.job import JobJournal
from agent.uplink.reporter import Reporter

_MOST_JOBS = 1000


@dataclass(frozen=True)
class JobSummary:
    """A job of the run: what asked for it, the state in which it ended, and why; the reason is empty for success."""

    trigger: str
    state: str
    reason: str


@dataclass
class JobLedger:
    """What becomes of jobs, for everybody who wants to know it.

    Args:
        then: Takes the event that follows from an action.

    Attributes:
        ended: The newest jobs of this process that have ended, the latest last.
    """

    reporter: Reporter
    journal: JobJournal
    then: Callable[[fact.Event], None] = lambda _: None
    ended: deque[JobSummary] = field(default_factory=lambda: deque(maxlen=_MOST_JOBS), init=False)
    _commands: dict[str, CommandProgress] = field(default_factory=dict, init=False)

    def expect(self, progress: CommandProgress) -> str:
        """Take over a command until it has ended; return its id."""
        self._commands = {key: each for key, each in self._commands.items() if not each.latest.final}
        self._commands[progress.latest.id] = progress
        return progress.latest.id

    def begin(self, action: act.Begin) -> None:
        """Raises AgentError (`state.write`): there is no job then."""
        job = action.job
        self.journal.start(job.id, job.kind.trigger.value, job.kind.request, job.commands)
        self.then(fact.Begun(job.id))

    def join(self, action: act.Join) -> None:
        """Raises AgentError (`state.write`)."""
        job = action.job
        self.journal.join(job.id, job.commands)
        self._commands[job.commands[-1]].update(job.state.value, job.percent)  # the one that has come

    def enter(self, action: act.Enter) -> None:
        """Raises AgentError (`state.write`): then the step must not start."""
        job, on_probation = action.job, action.job.state is JobState.PROBATION
        if action.is_new:
            self.journal.enter(job.id, job.state, artefact=action.artefact or None)
        detail: dict[str, JsonValue] = {"artefact": action.artefact} if on_probation else {"percent": job.percent}
        level = logging.INFO if action.is_new else logging.DEBUG
        self.reporter.event("job", level, trigger=job.kind.trigger.value, step=job.state.value, **detail)
        for command in self._open_commands(job):
            command.update(job.state.value, job.percent)

    def note(self, action: act.Note) -> None:
        job = action.job
        self.reporter.event("job", trigger=job.kind.trigger.value, step=job.state.value, **action.detail)

    def end(self, action: act.End) -> None:
        """A journal that refuses is reported: the next start finds the job again."""
        job, state, error, trigger = action.job, action.state, action.error, action.job.kind.trigger.value
        try:
            self.journal.enter(job.id, state, error=error, result=action.result)
        except AgentError as refusal:
            self.reporter.error(refusal, trigger=trigger)
        if error is None:
            self.reporter.event("job", trigger=trigger, step=state.value)
        elif state is JobState.CANCELLED:
            self.reporter.event("job", trigger=trigger, step=state.value, message=error.found)
        else:
            self.reporter.error(error, trigger=trigger, step=state.value)
        if not isinstance(job.kind, Recall):
            self.ended.append(JobSummary(trigger, state.value, str(error) if error is not None else ""))
        for command in self._open_commands(job):
            if error is None:
                command.succeed(dict(action.result or {}))
            else:
                command.fail(error)

    def answer_command(self, action: act.AnswerCommand) -> None:
        if action.error is None:
            self._commands[action.command].succeed()
        else:
            self._commands[action.command].fail(action.error)

    def _open_commands(self, job: Job) -> list[CommandProgress]:
        """The commands that the job carries out, and that have not been answered by something else."""
        return [self._commands[each] for each in job.commands if each in self._commands]

    def report_error(self, action: act.ReportError) -> None:
        trigger = {"trigger": action.trigger} if action.trigger else {}
        self.reporter.error(action.error, **trigger)
