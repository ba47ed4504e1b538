"""The state on which decisions rest: what runs now, and what is remembered over a restart.

Everything here is a value. `Memory` is kept in the state directory. `answered`, `vain` and `last_error` come from the
journal of jobs; the rest begins anew with each process. Times are monotonic, in s, and are kept as wall-clock times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

from agent.core.kinds import Kind

if TYPE_CHECKING:
    from agent.common.errors import AgentError
    from agent.monitoring.drift import Regime
    from calibrate.errors import TaredError

_DAY_S = 86_400.0
_MOST_ARTEFACTS = 100
NEVER_S = -math.inf


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
JOINABLE = (JobState.REQUESTED, JobState.COLLECTING)  # in which a job may carry out one more command
# An engine that was built again for another runtime is not on probation: there is nothing to go back to. A start serves
# the model that lies there, however far the job that tried it had come.
_BEFORE_COMMIT = frozenset({JobState.BUILDING, JobState.VALIDATING, JobState.PROBATION})


@dataclass(frozen=True)
class Attempt:
    """The origins of a candidate.

    Args:
        settings: As `settings_id` (agent.jobs.fingerprints) returns it.
        scene: The regime that suits its frames best.
    """

    settings: str
    scene: Regime


@dataclass(frozen=True)
class Refusal:
    """An attempt, and why its candidate was refused."""

    attempt: Attempt
    error: TaredError


@dataclass(frozen=True)
class Restraint:
    """What was started and what failed of late, which limits what starts by itself.

    Args:
        starts_s, rollbacks_s: The newest last.
        failed_s, switched_s: The latest; NEVER_S for none.
    """

    starts_s: tuple[float, ...] = ()
    rollbacks_s: tuple[float, ...] = ()
    failed_s: float = NEVER_S
    switched_s: float = NEVER_S

    def is_looping(self, now_s: float, most: int) -> bool:
        """Return True if `most` candidates were rolled back within a day."""
        newest = self.rollbacks_s[-most:]
        return len(newest) == most and now_s - newest[0] < _DAY_S

    def is_below_cap(self, now_s: float, per_day: int) -> bool:
        """Return True if one more job may start today."""
        newest = self.starts_s[-per_day:]
        return len(newest) < per_day or now_s - newest[0] >= _DAY_S

    def started(self, now_s: float) -> Restraint:
        return replace(self, starts_s=_within_a_day(self.starts_s, now_s))

    def rolled_back(self, now_s: float) -> Restraint:
        return replace(self, rollbacks_s=_within_a_day(self.rollbacks_s, now_s))


def _within_a_day(times_s: tuple[float, ...], now_s: float) -> tuple[float, ...]:
    return (*(each for each in times_s if now_s - each < _DAY_S), now_s)


@dataclass(frozen=True)
class Memory:
    """What decisions remember over a restart, and over a power cut.

    Args:
        raised: By artefact of low fidelity, how many raises of its precision were refused; None: no other may be
            tried. The latest artefact is the last.
        raised_under: What `raised` depends on: `raising_id` (agent.jobs.fingerprints).
        refusal: The latest one of a candidate.
    """

    restraint: Restraint = field(default_factory=Restraint)
    raised: Mapping[str, int | None] = field(default_factory=dict)
    raised_under: str = ""
    refusal: Refusal | None = None

    def next_rung(self, artefact: str) -> int:
        """Return the rung to begin with for this artefact, as in PrecisionRaise; 0: none may be tried."""
        refused = self.raised.get(artefact, 0)
        return 0 if refused is None else refused + 1

    def with_raised(self, artefact: str, refused: int | None) -> Memory:
        others = {each: count for each, count in self.raised.items() if each != artefact}
        return replace(self, raised=dict([*others.items(), (artefact, refused)][-_MOST_ARTEFACTS:]))


@dataclass(frozen=True)
class Job:
    """The running job. Each of its states is journaled before anything of it starts.

    Args:
        commands: Ids of the commands that it carries out.
        percent: Of the whole job.
        waits: Why it stands still for want of headroom; empty while it goes on.
        frames: To collect.
        max_loss: Largest accepted loss, which probation goes by as the verdict has; None: as configured.
        fidelity: Of the candidate, by its verdict; None before, and for an engine that has served before.
        attempt: What the candidate comes of, once the frames are handed over; None where a refusal says nothing of it.
        counts: Frames collected, and informative ones of those that judge, up to the numbers that are needed.
        until_s: When its collection ends in vain, unless a frame comes that counts.
        child_since_s: When its child process was started; None while there is none.
        is_paused: The child is.
    """

    id: str
    kind: Kind
    started_s: float
    commands: tuple[str, ...] = ()
    state: JobState = JobState.REQUESTED
    percent: int = 0
    waits: str = ""
    frames: int = 0
    max_loss: float | None = None
    fidelity: float | None = None
    attempt: Attempt | None = None
    counts: tuple[int, int] = (0, 0)
    until_s: float = math.inf
    child_since_s: float | None = None
    is_paused: bool = False

    @property
    def is_collecting(self) -> bool:
        """True until a child process has its frames."""
        return self.child_since_s is None and self.state in JOINABLE

    @property
    def description(self) -> str:
        """State, progress and reason to wait, for displays."""
        return f"{self.state.value} {self.percent} %" + (f", waits: {self.waits}" if self.waits else "")


@dataclass(frozen=True)
class EngineTrial:
    """The engine of the running job, which is on trial.

    Args:
        serves: It has answered a frame.
        leaves: Why the frame path has been asked to go back to the previous engine; None while it has not.
        recall: The operator's rollback, if there is one.
    """

    artefact: str
    serves: bool = False
    leaves: AgentError | None = None
    recall: Job | None = None


@dataclass(frozen=True)
class Unsaved:
    """An engine that serves, though the disk has refused to make it current. retry_s: when it is tried again."""

    job: Job
    artefact: str
    retry_s: float


@dataclass(frozen=True)
class ModelToTry:
    """A new model that waits for its trial, or is tried.

    Args:
        command: Id of the command that delivered it; empty for another content of the model's file.
        retry_s: It is not tried before.
        job: Id of the job that tries it; empty while it waits.
    """

    content: str
    command: str = ""
    retry_s: float = 0.0
    job: str = ""


@dataclass(frozen=True)
class Hindrance:
    """The reason why a job that is due does not start, or does not go on.

    Args:
        code: For programs: a configuration key, or an error code.
        found: The reason, as a clause.
        remedy: As in an error.
    """

    code: str
    found: str
    remedy: str


@dataclass(frozen=True)
class State:
    """Everything that decisions rest on beside settings and facts.

    Args:
        answered: Times of the schedule for which a job was started.
        vain: By attempt of offline work, the error with which it ended.
        job: The running one, also while its engine is on trial.
        pending: A job that is about to begin: its engine is being loaded, or the journal is being written.
        compared: The settings for which the cameras compare their scenes with that of the refusal.
        model: The new model, if there is one.
        needs_new_run: This run has to end: the next one serves what the model's file holds.
        reference_is_new: A reference took the place of a wrong one, and no job has started since.
        troubles: The trouble of each camera's view at the last look.
        held_back: Why the most urgent job that is due does not start; None where none is due.
        last_error: With which the latest job ended; None if it ended well.
        is_untidy: The store is to be tidied before the next job: this start, or the last job, may have left something.
        clears_rollbacks: That job was the operator's recalibration, and was committed.
        no_start_before_s: After a refused journal, or for ever where no more frames come.
        is_cap_reported: That too many jobs were due today.
        ahead_s: The wall clock's lead over the monotonic one when `memory` was last kept.
    """

    memory: Memory = field(default_factory=Memory)
    answered: frozenset[str] = frozenset()
    vain: Mapping[str, TaredError] = field(default_factory=dict)
    job: Job | None = None
    pending: Job | None = None
    compared: str = ""
    trial: EngineTrial | None = None
    unsaved: Unsaved | None = None
    model: ModelToTry | None = None
    needs_new_run: bool = False
    reference_is_new: bool = False
    troubles: Mapping[str, str] = field(default_factory=dict)
    held_back: Hindrance | None = None
    last_error: TaredError | None = None
    is_untidy: bool = True
    clears_rollbacks: bool = False
    no_start_before_s: float = 0.0
    is_cap_reported: bool = False
    ahead_s: float = 0.0

    def refusal(self, settings: str) -> Refusal | None:
        """Return the latest refusal, if its settings are those of now; the scene may be another one."""
        latest = self.memory.refusal
        return latest if latest is not None and latest.attempt.settings == settings else None

    @property
    def candidate(self) -> str | None:
        """Id of the engine that serves on probation; None while the engine in service does."""
        return self.trial.artefact if self.trial is not None and self.trial.serves else None
