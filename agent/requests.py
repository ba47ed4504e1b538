"""What is asked of a device: commands with their arguments and results, and labels, as frozen types.

Pure, as `agent.messages`, and shared with the fleet like that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from agent.messages import Document
from agent.schema import Strict
from agent.topics import check_name

MAX_LABELLED_BOXES = 1000  # of a frame; more do not fit a payload

CommandStatus = Literal["ACCEPTED", "IN_PROGRESS", "SUCCEEDED", "FAILED", "REJECTED", "EXPIRED"]
Name = Annotated[str, AfterValidator(check_name)]
ClassLabel = Annotated[int, Field(ge=0, lt=2**31)] | Annotated[str, Field(max_length=256)]
Pixel = Annotated[float, Field(ge=-1e6, le=1e6)]


class LabelledBox(Document):
    """An object: its class by id or name, its box x1 y1 x2 y2 in frame pixels."""

    class_: ClassLabel = Field(alias="class")
    box: list[Pixel] = Field(min_length=4, max_length=4)

    @field_validator("box")
    @classmethod
    def _first_corner_first(cls, box: list[float]) -> list[float]:
        if box[0] > box[2] or box[1] > box[3]:
            raise ValueError("x1 y1 x2 y2 with x1 <= x2 and y1 <= y2")
        return box


class Labels(Document):
    """What one frame of a camera truly shows: a class, by id or name, or all of its objects.

    The frame is named by its number since the daemon's start, from 0 (a recording's own number), or by its capture time
    `ts` in seconds: Unix time for cameras, media time for files.
    """

    camera: str = Field(max_length=256)
    frame: int | None = Field(default=None, ge=0, lt=2**63)
    ts: float | None = None
    labels: ClassLabel | Annotated[list[LabelledBox], Field(max_length=MAX_LABELLED_BOXES)]

    @model_validator(mode="after")
    def _names_one_frame(self) -> Labels:
        if (self.frame is None) == (self.ts is None):
            raise ValueError("frame or ts, one of the two")
        return self


class StatusArgs(Strict):
    """`status`: what the device is doing."""


class RecalibrateArgs(Strict):
    """`recalibrate` from `frames` frames with thresholds by `method`; absent ones are the device's choice."""

    model_config = ConfigDict(strict=True)

    frames: int | None = Field(default=None, ge=1, le=10_000)
    method: str | None = Field(default=None, min_length=1, max_length=64)


class RollbackArgs(Strict):
    """`rollback`: back to the previous engine."""


class CancelArgs(Strict):
    """`cancel`: end the running job, or take a candidate on probation back."""


OPS: Mapping[str, type[Strict]] = {
    "status": StatusArgs,
    "recalibrate": RecalibrateArgs,
    "rollback": RollbackArgs,
    "cancel": CancelArgs,
}


class Command(Document):
    """What an operator wants done; `issued` and `expires` are Unix times in seconds.

    `version` and `signature` travel unexamined here: they belong to whoever verifies signatures.
    """

    id: Name
    op: str
    args: SerializeAsAny[Strict]
    issued: float
    expires: float
    version: int = Field(ge=1)
    signature: str | None = None


class Failure(Document):
    """Why a command failed, or was not carried out at all."""

    code: str
    message: str


class CommandResult(Document):
    """How far a command has come; `percent` runs from 0 to 100."""

    id: Name
    status: CommandStatus
    step: str | None = None
    percent: float | None = Field(default=None, ge=0.0, le=100.0)
    error: Failure | None = None
    result: dict[str, JsonValue] | None = None

    @property
    def final(self) -> bool:
        """Whether no further result follows."""
        return self.status not in ("ACCEPTED", "IN_PROGRESS")
