"""The kinds of job: what asks for each, and what it carries with it.

A recalibration collects frames, and its child process makes a candidate of them. For a new model the child builds the
float reference. Switch and rollback put an engine in service that has served before.

On the wire and in the journal a kind is its `Trigger`, with `Kind.request`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from pydantic import JsonValue


class Trigger(str, Enum):
    """What asks for a job, in the words of the wire."""

    FIRST_START = "first-start"
    ALARM = "alarm"
    PRECISION = "precision"
    SCHEDULE = "schedule"
    COMMAND = "command"
    MODEL = "model"  # another content of the model's file, or a delivered one
    RUNTIME = "runtime"  # a start found an engine that was built for another runtime
    SWITCH = "switch"
    ROLLBACK = "rollback"
    REFERENCE = "reference"  # the float reference was found wrong


@dataclass(frozen=True)
class Kind:
    """A kind of job.

    Attributes:
        trigger: What asks for it.
        is_own: The daemon starts it by itself: it counts for the limits, and a failure pauses the next.
        is_proven: Its engine has served before: the first answer is enough, and it stays in the store in any case.
        collects: It collects frames.
        calibrates: Its candidate follows from the frames and settings alone, so that a refusal holds until they change.
    """

    trigger: ClassVar[Trigger]
    is_own: ClassVar[bool] = False
    is_proven: ClassVar[bool] = False
    collects: ClassVar[bool] = True
    calibrates: ClassVar[bool] = False

    @property
    def request(self) -> dict[str, JsonValue]:
        """The request as the journal keeps it."""
        return {}


@dataclass(frozen=True)
class FirstStart(Kind):
    """The float reference serves: calibrate of the board's own frames."""

    trigger = Trigger.FIRST_START
    is_own = calibrates = True


@dataclass(frozen=True)
class OfflineStart(Kind):
    """The float reference serves: begin with what the owner has made offline.

    Args:
        setting, path: As in OfflineWork.
        attempt: Fingerprint of the work's content and of the settings of the candidate.
    """

    setting: str
    path: str
    attempt: str
    trigger = Trigger.FIRST_START
    is_own = True

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"offline": self.setting, "path": self.path, "attempt": self.attempt}


@dataclass(frozen=True)
class DriftAlarm(Kind):
    """The scene has left the calibration behind."""

    trigger = Trigger.ALARM
    is_own = calibrates = True


@dataclass(frozen=True)
class WrongReference(Kind):
    """The reference with which the last calibration was made was found wrong."""

    trigger = Trigger.REFERENCE
    is_own = calibrates = True


@dataclass(frozen=True)
class Scheduled(Kind):
    """A time of the owner's schedule. due: the time with its day, as `2026-01-31 03:00`."""

    due: str
    trigger = Trigger.SCHEDULE
    is_own = calibrates = True

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"due": self.due}


@dataclass(frozen=True)
class RaisedPrecision(Kind):
    """The engine in service loses too much although its scales fit the scene.

    Args:
        rung, fidelity: As in PrecisionRaise. Rung 0: none is left to try.
        artefact: The engine in service.
    """

    rung: int
    fidelity: float
    artefact: str
    trigger = Trigger.PRECISION
    is_own = True

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"rung": self.rung, "for": self.artefact}


@dataclass(frozen=True)
class Requested(Kind):
    """The operator's command `recalibrate`. None stands for what is configured.

    Args:
        frames: To collect.
        method: As in calibrate.threshold.
        max_loss: Largest accepted loss of fidelity.
    """

    frames: int | None = None
    method: str | None = None
    max_loss: float | None = None
    trigger = Trigger.COMMAND
    calibrates = True

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"op": "recalibrate", "frames": self.frames, "method": self.method, "max_loss": self.max_loss}


@dataclass(frozen=True)
class FleetCalibration(Kind):
    """A calibration that a fleet has merged. file: where it lies."""

    file: str
    name: str
    trigger = Trigger.COMMAND

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"op": "calibration", "file": self.name}


@dataclass(frozen=True)
class NewModel(Kind):
    """The model's file has other content, or a model was delivered. content: as `content_of` has it."""

    content: str
    trigger = Trigger.MODEL
    collects = False

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"content": self.content}


@dataclass(frozen=True)
class Rebuild(Kind):
    """A start builds an engine for the present runtime. instead_of: the artefact that `current` led to."""

    instead_of: str
    trigger = Trigger.RUNTIME
    collects = False

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"instead_of": self.instead_of}


@dataclass(frozen=True)
class Switch(Kind):
    """The engine of another regime. by_command: the operator asks for it."""

    artefact: str
    by_command: bool = False
    trigger = Trigger.SWITCH
    is_proven = True
    collects = False

    @property
    def request(self) -> dict[str, JsonValue]:
        return {**({"op": "switch"} if self.by_command else {}), "artefact": self.artefact}


@dataclass(frozen=True)
class OperatorRollback(Kind):
    """The operator goes back to the previous engine. lowers: it leaves fewer layers float than the present one."""

    artefact: str
    lowers: bool = False
    trigger = Trigger.ROLLBACK
    is_proven = True
    collects = False

    @property
    def request(self) -> dict[str, JsonValue]:
        return {"op": "rollback"}


@dataclass(frozen=True)
class Recall(OperatorRollback):
    """The operator goes back from a candidate on probation. artefact: the one in service, which serves again.

    It is a job beside the one that it ends: a restarted daemon, which receives the command again, does not go back a
    second time.
    """
