"""Actions: what a decision asks for. A list of them is a chain, since each one presupposes those before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from pydantic import JsonValue

from agent.core.state import Job, JobState, Memory

if TYPE_CHECKING:
    from agent.common.errors import AgentError
    from agent.monitoring.drift import Regime
    from agent.validation.verdict import Verdict
    from calibrate.errors import TaredError


@dataclass(frozen=True)
class Remember:
    """Keep a memory on the disk. A disk that refuses is reported, and nothing is undone."""

    memory: Memory


@dataclass(frozen=True)
class Begin:
    """Journal a job that is REQUESTED. `Begun` follows."""

    job: Job


@dataclass(frozen=True)
class Join:
    """Journal the commands of the running job, to which one has come."""

    job: Job


@dataclass(frozen=True)
class Enter:
    """Report that the job is at a state and a percentage; where the state is new, it is journaled before.

    artefact: Id of the engine that is about to serve.
    """

    job: Job
    is_new: bool = True
    artefact: str = ""


@dataclass(frozen=True)
class End:
    """Journal and report that the job has ended, and answer its commands. A journal that refuses is only reported."""

    job: Job
    state: JobState
    error: TaredError | None = None
    result: Mapping[str, JsonValue] | None = None


@dataclass(frozen=True)
class Note:
    """Report something of a job that goes on, with the fields of the event `job`."""

    job: Job
    detail: Mapping[str, JsonValue]


@dataclass(frozen=True)
class ReportError:
    """Report an error that no job has ended with."""

    error: TaredError
    trigger: str = ""


@dataclass(frozen=True)
class AnswerCommand:
    """End a command: with an error, or well."""

    command: str
    error: TaredError | None = None


@dataclass(frozen=True)
class MakeRoom:
    """Free disk space for one more engine."""


@dataclass(frozen=True)
class Tidy:
    """Remove artefacts that nobody needs any more, and give free memory back."""


@dataclass(frozen=True)
class ForgetPolicies:
    """Remove the policies of artefacts that the store has no more."""


@dataclass(frozen=True)
class RestartCollection:
    """Collect frames from the start. hurried: for an operator who waits."""

    hurried: bool = False


@dataclass(frozen=True)
class CompareWithRefused:
    """Let each camera compare its scene with this one, from the start; None: with none."""

    scene: Regime | None


@dataclass(frozen=True)
class ReportSelection:
    """Report how the job's frames were chosen."""

    job: Job


@dataclass(frozen=True)
class HandOver:
    """Hand the job with the collected frames to a child process. `HandedOver` follows."""

    job: Job


@dataclass(frozen=True)
class PauseChild:
    """Stop the child process; it keeps its memory."""


@dataclass(frozen=True)
class ResumeChild:
    """Let the child process go on."""


@dataclass(frozen=True)
class EndChild:
    """End the child process, whatever it is doing, and remove what it leaves."""


@dataclass(frozen=True)
class Load:
    """Load an engine for the job; `Loaded` follows. artefact: the id of one in the store, or a new one's folder."""

    job: Job
    artefact: str


@dataclass(frozen=True)
class DropEngine:
    """Close an engine that is loaded, and was not tried."""


@dataclass(frozen=True)
class StartTrial:
    """Hand the loaded engine to the frame path. Later `CandidateServes`, `CandidateLeft` or `TrialEnded` come."""

    job: Job


@dataclass(frozen=True)
class Announce:
    """Report that the candidate serves, from the frame of capture time `ts` on, and watch its evidence from there."""

    job: Job
    ts: float | None
    skipped: int = 0


@dataclass(frozen=True)
class GoBack:
    """Let the frame path go back to the previous engine before the next frame.

    is_final: `CandidateGone` follows where the frame path has gone back already. Else its own event does.
    """

    job: Job
    error: AgentError
    is_final: bool = False


@dataclass(frozen=True)
class Keep:
    """Let the frame path go on with the candidate alone. `CandidateKept` follows, unless it has just gone back."""

    job: Job


@dataclass(frozen=True)
class Commit:
    """Count the swap as one that is kept."""

    job: Job


@dataclass(frozen=True)
class MakeCurrent:
    """Let `current` lead to the engine of this job, which serves, and report it. `MadeCurrent` follows."""

    job: Job
    artefact: str


@dataclass(frozen=True)
class BackInService:
    """The engine in service answers again, from the frame of capture time `ts` on: begin its evidence anew."""

    ts: float | None = None


@dataclass(frozen=True)
class ReportRollback:
    """Report a candidate that was taken out of service. ts, waited: as in CandidateLeft."""

    job: Job
    error: AgentError
    ts: float | None
    waited: bool


@dataclass(frozen=True)
class Reject:
    """Remove the job's candidate from the store; its verdict and the error are kept.

    rollback: As it was reported; None for one that was not tried, or not to its end.
    """

    job: Job
    artefact: str
    error: AgentError
    rollback: ReportRollback | None = None


@dataclass(frozen=True)
class ForgetRegime:
    """This artefact is no regime any more."""

    artefact: str


@dataclass(frozen=True)
class LearnGain:
    """Note what a recalibration has gained over the engine in service."""

    verdict: Verdict


@dataclass(frozen=True)
class ResetViews:
    """The cameras show what they are meant to show."""


@dataclass(frozen=True)
class AnswerMismatch:
    """Remember that a job replaces what the wrong reference has made."""


@dataclass(frozen=True)
class InstallModel:
    """Put the model that a command delivered in the place of the model's file."""

    command: str


@dataclass(frozen=True)
class DropModel:
    """Remove the staged copy of the model that a command delivered. for_good: the received file, too."""

    command: str
    for_good: bool = False


Action: TypeAlias = (
    Remember
    | Begin
    | Join
    | Enter
    | End
    | Note
    | ReportError
    | AnswerCommand
    | MakeRoom
    | Tidy
    | ForgetPolicies
    | RestartCollection
    | CompareWithRefused
    | ReportSelection
    | HandOver
    | PauseChild
    | ResumeChild
    | EndChild
    | Load
    | DropEngine
    | StartTrial
    | Announce
    | GoBack
    | Keep
    | Commit
    | MakeCurrent
    | BackInService
    | ReportRollback
    | Reject
    | ForgetRegime
    | LearnGain
    | ResetViews
    | AnswerMismatch
    | InstallModel
    | DropModel
)
