"""Facts: what has happened, and how things are at that moment.

The executor gathers them. An *event* is one thing that has happened; `BoardFacts` shows the board beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from agent.common.errors import AgentError
    from agent.contract.commands import SwitchArgs
    from agent.core.actions import Action
    from agent.core.kinds import FleetCalibration, Requested
    from agent.core.state import Attempt
    from agent.monitoring.camera_monitor import CameraStates
    from agent.validation.verdict import Verdict
    from calibrate.errors import TaredError


@dataclass(frozen=True)
class Now:
    """The time of a decision. wall_s: Unix time."""

    monotonic_s: float
    wall_s: float


@dataclass(frozen=True)
class Offline:
    """Work that the owner has made offline, in the order in which it is tried.

    Args:
        setting, path: As in OfflineWork.
        attempt: Fingerprint of its content and of the settings of today; empty where it cannot be used.
    """

    setting: str
    path: str
    attempt: str


@dataclass(frozen=True)
class ProbationNow:
    """How the candidate has done. finished: it has answered enough. objection: what speaks against it by now."""

    finished: bool
    objection: AgentError | None


@dataclass(frozen=True)
class BoardFacts:
    """The board at the moment of a decision.

    Args:
        fresh: An id that no job has.
        cameras: What the observer has found.
        serving: Id of the artefact in service.
        is_degraded: The float reference serves.
        known: Artefacts of the known regimes.
        settings: `settings_id` of agent.jobs.fingerprints, as of now.
        raising: `raising_id` of the same.
        is_committing: The frame path has yet to close the previous engine.
        is_stuck: A candidate that was taken back still hangs.
        path_error: The error that has stopped the frame path.
        collected: Frames of the collection, and informative ones of those that judge.
        headroom: Why the board cannot afford the job's next step, empty where it can; an error if that has lasted for
            too long.
        paused_s: How long the child process has been paused.
        probation: None without a candidate.
        offline: Asked for only while the float reference serves.
        detects: The model's task finds objects.
    """

    fresh: str
    cameras: CameraStates
    serving: str
    is_degraded: bool = False
    known: Sequence[str] = ()
    settings: str = ""
    raising: str = ""
    is_committing: bool = False
    is_stuck: bool = False
    path_error: BaseException | None = None
    collected: tuple[int, int] = (0, 0)
    headroom: str | AgentError = ""
    paused_s: float = 0.0
    probation: ProbationNow | None = None
    offline: Sequence[Offline] = ()
    detects: bool = False


@dataclass(frozen=True)
class Started:
    """The daemon serves. rolled_back: candidates that were on probation when the previous process ended."""

    rolled_back: int


@dataclass(frozen=True)
class Tick:
    """Time has passed; the supervisor looks ten times a second."""


@dataclass(frozen=True)
class Asked:
    """The operator asks for a recalibration, or a fleet's calibration has come. command: its id."""

    command: str
    kind: Requested | FleetCalibration


@dataclass(frozen=True)
class AskedToCancel:
    """The operator cancels what is under way. delivered: a delivery was ended already, so something was."""

    command: str
    delivered: bool = False


@dataclass(frozen=True)
class AskedToGoBack:
    """The operator's rollback. previous: id of the artefact that served before; empty for none."""

    command: str
    previous: str


@dataclass(frozen=True)
class AskedToSwitch:
    """The operator wants the engine of another regime."""

    command: str
    args: SwitchArgs


@dataclass(frozen=True)
class ModelChanged:
    """The model's file holds other content; empty: that of the model in service again."""

    content: str


@dataclass(frozen=True)
class ModelDelivered:
    """A model has come by command."""

    content: str
    command: str


@dataclass(frozen=True)
class ReferenceWrong:
    """The audit has found that the float reference does not compute what ONNX Runtime does."""


@dataclass(frozen=True)
class SettingsChanged:
    """Settings, or the engine in service, have changed."""


@dataclass(frozen=True)
class FramesEnded:
    """No more frames will come, and a job has to make do with those there are."""


@dataclass(frozen=True)
class Stopping:
    """The daemon ends. reason: for the journal."""

    reason: str


@dataclass(frozen=True)
class DecisionFailed:
    """The system has refused what a decision needed, which may have cost its state."""

    error: AgentError


@dataclass(frozen=True)
class Begun:
    """The job is journaled."""

    job: str


@dataclass(frozen=True)
class HandedOver:
    """A child process has the job's frames. attempt, max_loss: as in Job."""

    job: str
    attempt: Attempt | None
    max_loss: float | None


@dataclass(frozen=True)
class ChildAdvanced:
    """percent: of the whole job."""

    job: str
    step: str
    percent: int


@dataclass(frozen=True)
class ChildEnded:
    """With a candidate, or with an error. verdict: on the candidate, or on the first one that was refused."""

    job: str
    artefact: str
    verdict: Verdict | None = None
    error: TaredError | None = None


@dataclass(frozen=True)
class Loaded:
    """The job's engine can serve.

    Args:
        artefact: Its id.
        lowers: It leaves fewer layers float than the engine in service.
    """

    job: str
    artefact: str
    lowers: bool = False


@dataclass(frozen=True)
class CandidateServes:
    """The engine has answered its first frame, of capture time `ts`. skipped: frames that nobody took before it."""

    job: str
    ts: float
    skipped: int


@dataclass(frozen=True)
class CandidateKept:
    """The frame path goes on with the candidate alone."""

    job: str


@dataclass(frozen=True)
class MadeCurrent:
    """`current` leads to the job's engine."""

    job: str
    artefact: str


@dataclass(frozen=True)
class CandidateLeft:
    """The previous engine serves again, from the frame of capture time `ts` on; None: no more frames came.

    waited: A frame waited for the candidate's answer then.
    """

    job: str
    error: AgentError
    ts: float | None = None
    waited: bool = False


@dataclass(frozen=True)
class CandidateGone:
    """A job was to end with this error, but the frame path has gone back to the previous engine already."""

    job: str
    error: AgentError


@dataclass(frozen=True)
class TrialEnded:
    """The frames have ended while the candidate was on trial."""

    job: str


@dataclass(frozen=True)
class Failed:
    """An action has failed; those that were to follow it were not carried out."""

    action: Action
    error: TaredError


Event: TypeAlias = (
    Started
    | Tick
    | Asked
    | AskedToCancel
    | AskedToGoBack
    | AskedToSwitch
    | ModelChanged
    | ModelDelivered
    | ReferenceWrong
    | SettingsChanged
    | FramesEnded
    | Stopping
    | DecisionFailed
    | Begun
    | HandedOver
    | ChildAdvanced
    | ChildEnded
    | Loaded
    | CandidateServes
    | CandidateKept
    | MadeCurrent
    | CandidateLeft
    | CandidateGone
    | TrialEnded
    | Failed
)
