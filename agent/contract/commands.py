"""What is asked of a device: commands with their arguments and results, and labels, as frozen types.

Pure, as `agent.contract.messages`, and shared with the fleet like that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from agent.common.schema import Strict
from agent.contract.messages import Document
from agent.contract.topics import check_name

MAX_LABELLED_BOXES = 1000  # of a frame; more do not fit a payload
MAX_VALUES = 64  # of a `set`
RECEIVING = "RECEIVING"  # the step at which a device asks for chunks, from `next` of its result on
MODEL_CHUNKS_REQUESTED = 8  # at a time
MODEL_CHUNK_BYTES = 32 * 1024  # each but the last one of a file
MAX_MODEL_BYTES = 2**31 - 1  # what an ONNX file can have
HISTOGRAM_CHUNK_BYTES = 32 * 1024  # each but the last one of an upload
MAX_HISTOGRAM_CHUNKS = 512

CommandStatus = Literal["ACCEPTED", "IN_PROGRESS", "SUCCEEDED", "FAILED", "REJECTED", "EXPIRED"]
Name = Annotated[str, AfterValidator(check_name)]
ClassLabel = Annotated[int, Field(ge=0, lt=2**31)] | Annotated[str, Field(max_length=256)]
Pixel = Annotated[float, Field(ge=-1e6, le=1e6)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[int, Field(ge=1, lt=2**53)]  # beyond, JSON's numbers are not exact


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
    """`recalibrate` from `frames` frames with thresholds by `method`, for an engine that loses at most `max_loss`;
    absent ones are the device's choice."""

    model_config = ConfigDict(strict=True)

    frames: int | None = Field(default=None, ge=1, le=10_000)
    method: str | None = Field(default=None, min_length=1, max_length=64)
    max_loss: float | None = Field(default=None, ge=0.0, le=1.0)


class RollbackArgs(Strict):
    """`rollback`: back to the previous engine."""


class CancelArgs(Strict):
    """`cancel`: end the running job, or take a candidate on probation back."""


class SwitchArgs(Strict):
    """`switch`: to the engine of another regime, by its artefact's id, of which `status` tells."""

    regime: Name


class SetArgs(Strict):
    """`set`: keys of config.yaml that change at run time, as `recalibration.max_loss`, to these values; null: to what
    config.yaml says. The command's version has to exceed the one that was set before."""

    values: dict[Name, JsonValue] = Field(min_length=1, max_length=MAX_VALUES)


class LogLevelArgs(Strict):
    """`log_level`, until the next start."""

    level: Literal["debug", "info", "warning", "error"]


class RestartArgs(Strict):
    """`restart`: the process ends, and the service manager starts another."""


class SnapshotArgs(Strict):
    """`snapshot`: the newest frame of a camera, of the first one unless it is named, as a JPEG on the topic of that
    name; annotated with what the engine found on it, if so wanted."""

    camera: str | None = Field(default=None, max_length=256)
    annotated: bool = False


class FileArgs(Strict):
    """A file for the board: fetched from `url`, or else sent on the topics model/{sha256}/{n} in chunks. what: it is,
    in a word, and the op that brings it."""

    what: ClassVar[str]

    sha256: Sha256
    size: int = Field(ge=1, le=MAX_MODEL_BYTES)
    url: str | None = Field(default=None, min_length=1, max_length=2048, pattern=r"^https?://[!-~]+$")


class ModelArgs(FileArgs):
    """`model`: this file in the place of the one that is served. release: what a holder of a release key says of it."""

    what: ClassVar[str] = "model"

    release: dict[str, JsonValue] | None = None


class CalibrationArgs(FileArgs):
    """`calibration`: a candidate with the scales of this file, which a fleet has merged."""

    what: ClassVar[str] = "calibration"

    size: int = Field(ge=1, le=MAX_HISTOGRAM_CHUNKS * HISTOGRAM_CHUNK_BYTES)


class HistogramsArgs(Strict):
    """`histograms`: those of the calibration in service, on the topics histograms/{upload}/{n} in chunks. missing: only
    these, where it would be the upload of this hash once more."""

    model_config = ConfigDict(strict=True)

    upload: Sha256 | None = None
    missing: list[Annotated[int, Field(ge=0, lt=MAX_HISTOGRAM_CHUNKS)]] | None = Field(
        default=None, min_length=1, max_length=MAX_HISTOGRAM_CHUNKS
    )

    @model_validator(mode="after")
    def _names_what_is_missing_of_what(self) -> HistogramsArgs:
        if (self.upload is None) != (self.missing is None):
            raise ValueError("upload and missing, or neither")
        return self


OPS: Mapping[str, type[Strict]] = {
    "status": StatusArgs,
    "recalibrate": RecalibrateArgs,
    "rollback": RollbackArgs,
    "cancel": CancelArgs,
    "switch": SwitchArgs,
    "set": SetArgs,
    "log_level": LogLevelArgs,
    "restart": RestartArgs,
    "snapshot": SnapshotArgs,
    "model": ModelArgs,
    "histograms": HistogramsArgs,
    "calibration": CalibrationArgs,
}
READ_ONLY_OPS = frozenset({"status"})  # ops that change nothing, and may be carried out twice


class Command(Document):
    """What an operator wants done; `issued` and `expires` are Unix times in seconds.

    `to` is `fleet/device`, which a signed command has to name. `signature` is looked at before there is a Command: it
    is of the document, whatever else that holds. `version` orders what sets a state: see the op.
    """

    id: Name
    op: str
    args: SerializeAsAny[Strict]
    issued: float
    expires: float
    version: Version
    to: str | None = None
    signature: str | None = None


class Failure(Document):
    """Why a command failed, or was not carried out at all."""

    code: str
    message: str


class Desired(Strict):
    """The retained document `desired`: what `set` sets, all of it; a key that is left out is as config.yaml has it.

    It has no field of a command's that is required, and none beyond these, so that neither passes for the other.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    version: Version
    values: dict[Name, JsonValue] = Field(max_length=MAX_VALUES)
    to: str | None = None
    expires: float | None = None
    signature: str | None = None


class Reported(Document):
    """The retained document `reported`: the version that was applied last, 0 for none, and what holds now."""

    version: int
    values: dict[str, JsonValue]
    error: Failure | None = None


class Release(Strict):
    """What a release key says may run: one content of a model's file, on the boards of a product, or on those of none;
    versions rise, times are Unix seconds."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    kind: Literal["release"]
    sha256: Sha256
    size: int = Field(ge=1, le=MAX_MODEL_BYTES)
    version: Version
    issued: float
    expires: float
    name: str | None = Field(default=None, max_length=256)
    product: str | None = Field(default=None, max_length=256)
    signature: str | None = None


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
