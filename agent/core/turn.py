"""One decision while it is made: the state as it becomes, and the actions so far.

All parts of a decision work on a `Turn`. It holds what each of them needs, and the small steps that several share.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pydantic import JsonValue

from agent.common.errors import AgentError, CommandError
from agent.core import actions as act
from agent.core import facts as fact
from agent.core.due import ROLLBACK_LOOP, is_looping
from agent.core.kinds import Kind, OperatorRollback, Switch
from agent.core.state import WORK, EngineTrial, Job, JobState, Restraint, State

if TYPE_CHECKING:
    from agent.config import Config


@dataclass
class Turn:
    """What a decision starts from, and what has become of it. settings, facts: as for `decide`."""

    now: fact.Now
    settings: Config
    state: State
    facts: fact.BoardFacts
    actions: list[act.Action] = field(default_factory=list)

    @property
    def is_swapping(self) -> bool:
        """True while an engine is on trial, or the frame path has yet to close the previous one."""
        return self.state.trial is not None or self.facts.is_committing

    @property
    def is_idle(self) -> bool:
        """True while a job may start. While an engine still hangs no other could be tried, so none is built."""
        return self.state.job is None and not self.is_swapping and not self.facts.is_stuck

    @property
    def is_working(self) -> bool:
        """True while a job is under way whose engine is not tried yet."""
        return self.state.job is not None and self.state.trial is None and self.state.job.state in WORK

    def do(self, action: act.Action) -> None:
        self.actions.append(action)

    def set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]  # the caller names fields with their types

    @property
    def job(self) -> Job:
        assert self.state.job is not None, "the caller has looked"
        return self.state.job

    def change_job(self, identity: str, **changes: object) -> None:
        job = self.state.job
        if job is not None and job.id == identity:
            self.set(job=replace(job, **changes))  # type: ignore[arg-type]

    def enter(self, state: JobState, percent: int, artefact: str = "") -> None:
        """Report a step, and every ten percent of one."""
        job = self.job
        is_new = state is not job.state
        changed = replace(job, state=state, percent=percent)
        if is_new or percent // 10 != job.percent // 10:
            self.set(job=changed)
            self.do(act.Enter(changed, is_new, artefact))

    def note(self, **detail: JsonValue) -> None:
        self.do(act.Note(self.job, detail))

    @property
    def patience_s(self) -> float:
        return self.now.monotonic_s + self.settings.recalibration.timeout_s

    @property
    def ahead_s(self) -> float:
        return self.now.wall_s - self.now.monotonic_s

    def remember(self) -> None:
        self.set(ahead_s=self.ahead_s)
        self.do(act.Remember(self.state.memory))

    def restrain(self, restraint: Restraint) -> None:
        self.set(memory=replace(self.state.memory, restraint=restraint))
        self.remember()

    def pause_jobs(self) -> None:
        """Start the pause after a failed job: its cause may pass, but not at once."""
        self.restrain(replace(self.state.memory.restraint, failed_s=self.now.monotonic_s))

    def count_rollback(self) -> None:
        """Count a candidate that was taken out of service; report it if that was one too many."""
        looped = is_looping(self.now, self.settings, self.state)
        self.restrain(self.state.memory.restraint.rolled_back(self.now.monotonic_s))
        if is_looping(self.now, self.settings, self.state) and not looped:
            self.do(act.ReportError(rollback_loop(self.settings)))

    @property
    def comparison(self) -> act.CompareWithRefused:
        refusal = self.state.refusal(self.facts.settings)
        return act.CompareWithRefused(refusal.attempt.scene if refusal is not None else None)

    def compare_with_refused(self) -> None:
        """Find out whether the latest refusal, and raises in vain, hold for the present engine and settings."""
        if self.facts.raising != self.state.memory.raised_under:
            self.set(memory=replace(self.state.memory, raised={}, raised_under=self.facts.raising))
        if self.facts.settings != self.state.compared:
            self.set(compared=self.facts.settings)
            self.do(self.comparison)

    def on_trial(self, identity: str) -> tuple[Job | None, EngineTrial | None, fact.ProbationNow | None]:
        """Return the job of this id with its trial; of a model that was kept, nothing changes any more."""
        job = self.state.job
        if job is None or job.id != identity or self.state.needs_new_run:
            return None, None, None
        return job, self.state.trial, self.facts.probation

    def go_back(self, job: Job, error: AgentError, is_final: bool = False) -> None:
        if self.state.trial is not None:
            self.set(trial=replace(self.state.trial, leaves=error))
        self.do(act.GoBack(job, error, is_final))

    def begin(self, kind: Kind, commands: tuple[str, ...] = ()) -> None:
        """Journal a job; `Begun` follows."""
        job = Job(self.facts.fresh, kind, self.now.monotonic_s, commands)
        self.set(pending=job)
        self.do(act.Begin(job))

    def load(self, kind: Switch | OperatorRollback, commands: tuple[str, ...] = ()) -> None:
        """Load an engine that has served before; `Loaded` follows, and only then the job begins."""
        job = Job(self.facts.fresh, kind, self.now.monotonic_s, commands)
        self.set(pending=job)
        self.do(act.Load(job, kind.artefact))

    def refuse(self, command: str, code: str, found: str, expected: str, remedy: str) -> None:
        self.do(act.AnswerCommand(command, CommandError(code, found, expected, remedy)))


def rollback_loop(settings: Config) -> AgentError:
    """Return the error that says why nothing starts by itself any more."""
    found = f"{settings.probation.rollbacks_per_day} candidates rolled back in a day"
    remedy = "see the rollback events; recalibrate by command once their cause is gone"
    return AgentError(ROLLBACK_LOOP, found, "candidates that stay in service; no job starts by itself any more", remedy)
