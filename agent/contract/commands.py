"""Define what is sent to a device: commands with arguments and results, desired settings, releases, labels.

Frozen types shared with the fleet, like agent/contract/messages.py; no sockets, no clocks. `OPS` is the one table of
commands: boards, rollouts, pages, the command line and the reference read it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializeAsAny,
    field_validator,
    model_validator,
)

from agent.common.errors import CommandError
from agent.common.schema import Strict
from agent.contract.board_status import BoardStatus
from agent.contract.messages import Document
from agent.contract.topics import check_name

MAX_LABELLED_BOXES = 1000  # in a frame; more do not fit a payload
MAX_VALUES = 64  # in a `set`
RECEIVING = "RECEIVING"  # the step in which a device requests chunks, from `next` of its result on
MODEL_CHUNKS_REQUESTED = 8  # at a time
MODEL_CHUNK_BYTES = 32 * 1024  # each but the last one of a file
MAX_MODEL_BYTES = 2**31 - 1  # the limit of an ONNX file
HISTOGRAM_CHUNK_BYTES = 32 * 1024  # each but the last one of an upload
MAX_HISTOGRAM_CHUNKS = 512

CommandStatus = Literal["ACCEPTED", "IN_PROGRESS", "SUCCEEDED", "FAILED", "REJECTED", "EXPIRED"]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]  # share of the picture's width or height
_Corner = Annotated[list[_Share], Field(min_length=2, max_length=2)]
Masks = Annotated[list[Annotated[list[_Corner], Field(min_length=3, max_length=64)]], Field(max_length=16)]
Name = Annotated[str, AfterValidator(check_name)]
ClassLabel = Annotated[int, Field(ge=0, lt=2**31)] | Annotated[str, Field(max_length=256)]
Pixel = Annotated[float, Field(ge=-1e6, le=1e6)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Version = Annotated[int, Field(ge=1, lt=2**53)]  # beyond, JSON's numbers are not exact


def _split(classes: object) -> object:
    return [each.strip() for each in classes.split(",")] if isinstance(classes, str) else classes


def _parse_json(value: object) -> object:
    """Return the value of a text that is JSON; other values as they are.

    Raises ValueError for text that is no JSON, which pydantic reports.
    """
    try:
        return json.loads(value) if isinstance(value, str) else value
    except RecursionError:
        raise ValueError("lists inside each other, but not that deep") from None


class RunLengths(Document):
    """A mask in COCO's run-length encoding.

    Args:
        size: Height and width.
        counts: Lengths of runs by columns, the first outside the mask; or COCO's compressed text of them.
    """

    size: list[Annotated[int, Field(gt=0, le=1 << 16)]] = Field(min_length=2, max_length=2)
    counts: list[Annotated[int, Field(ge=0, lt=2**32)]] | str


class LabelledBox(Document):
    """An object in a frame: its box, or what else the model's task finds. All places are in frame pixels.

    Args:
        class_: Its class, by id or name.
        box: x1, y1, x2, y2 of a detector's object.
        outline: Polygons x1, y1, x2, y2, ..., or a mask, of instance or semantic segmentation.
        keypoints: x, y and a visibility of 0, 1 or 2 for each key point of a pose.
        corners: x, y of the four corners of an oriented box.
    """

    class_: ClassLabel = Field(alias="class")
    box: Annotated[list[Pixel], Field(min_length=4, max_length=4)] | None = None
    outline: Annotated[list[list[Pixel]], Field(max_length=100)] | RunLengths | None = None
    keypoints: Annotated[list[Pixel], Field(min_length=3, max_length=3000)] | None = None
    corners: Annotated[list[list[Pixel]], Field(min_length=4, max_length=4)] | None = None

    @field_validator("box")
    @classmethod
    def _first_corner_first(cls, box: list[float] | None) -> list[float] | None:
        if box is not None and (box[0] > box[2] or box[1] > box[3]):
            raise ValueError("x1 y1 x2 y2 with x1 <= x2 and y1 <= y2")
        return box

    @model_validator(mode="after")
    def _is_somewhere(self) -> LabelledBox:
        if self.box is None and self.outline is None and self.keypoints is None and self.corners is None:
            raise ValueError("box, outline, keypoints or corners")
        return self


class Labels(Document):
    """The true content of one frame: a class, by id or name, or all of its objects.

    The frame is identified by its number since the daemon's start, from 0 (in a recording, the recording's own number),
    or by its capture time.

    Args:
        camera: Name of the camera.
        frame: Number of the frame.
        ts: Capture time in seconds: Unix time for cameras, media time for files.
        labels: A class, by id or name, of a classifier; else all objects of the frame, none of them missing.
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
    """`status`: report what the device is doing."""


class RecalibrateArgs(Strict):
    """`recalibrate`: build and swap in an engine that is calibrated on current frames.

    Args:
        frames: Number of calibration frames.
        method: Method that chooses the thresholds.
        max_loss: Largest loss against the reference that the new engine may have.

    The device chooses arguments that are absent. Result, once the job has ended: `artefact` and `fidelity`.
    """

    model_config = ConfigDict(strict=True)

    frames: int | None = Field(default=None, ge=1, le=10_000)
    method: str | None = Field(default=None, min_length=1, max_length=64)
    max_loss: float | None = Field(default=None, ge=0.0, le=1.0)


class RollbackArgs(Strict):
    """`rollback`: return to the previous engine.

    Result: `artefact`, the id of the engine that serves.
    """


class CancelArgs(Strict):
    """`cancel`: end the running job, or roll back a candidate on probation."""


class SwitchArgs(Strict):
    """`switch`: serve the engine of another regime. Result: `artefact`.

    Args:
        regime: Id of its artefact, which `status` lists in `regime_artefacts`.
    """

    regime: Name

    def check(self, serving: str, regimes: Collection[str]) -> None:
        """Check the regime. Raises CommandError (`command.switch`) if it serves, or is not among those known."""
        if self.regime == serving:
            raise CommandError("command.switch", "the regime in service", "another one", "ask for the status first")
        if self.regime not in regimes:
            known = ", ".join(regimes) or "a known regime; none is known yet"
            raise CommandError("command.switch", f"no regime '{self.regime}'", known, "ask for the status first")


class PolicyArgs(Strict):
    """`policy`: limit what results, preview and snapshots show while one engine answers.

    With `artefact` alone it reports the policy.

    A command states the whole policy, which replaces the previous one. Result: `artefact` and `policy`.

    Args:
        artefact: Id of a regime, or of the engine in service.
        score_threshold: Answers of a lower score are left out; at or above the model spec's own.
        classes: Names or numbers of the classes of interest; as text, separated by commas.
        masks: Polygons of corners [x, y] as shares of the whole picture, as camera.masks; of several cameras, by name.
            Boxes whose centre lies in one are left out. As text, JSON.
        like: Take over the policy of this artefact.
        clear: Remove the policy.
    """

    artefact: Name
    score_threshold: float | None = Field(default=None, ge=0.0, le=1.0, allow_inf_nan=False)
    classes: Annotated[list[ClassLabel], BeforeValidator(_split), Field(min_length=1, max_length=1000)] | None = None
    masks: Annotated[Masks | dict[str, Masks], BeforeValidator(_parse_json)] | None = None
    like: Name | None = None
    clear: bool = False

    @property
    def sets(self) -> bool:
        """True if a policy is stated."""
        return not (self.score_threshold is None and self.classes is None and self.masks is None)

    @model_validator(mode="after")
    def _one_of_three(self) -> PolicyArgs:
        if self.sets + (self.like is not None) + self.clear > 1:
            raise ValueError("score_threshold, classes and masks, or like, or clear")
        return self


class SetArgs(Strict):
    """`set`: change keys of config.yaml at run time, such as `recalibration.max_loss`.

    A null restores the value in config.yaml. The command's version has to exceed the version of the previous `set`.
    Result: `version` and `values`, as in `reported`.

    Args:
        values: By the key's path, such as `recalibration.max_loss`.
    """

    values: dict[Name, JsonValue] = Field(min_length=1, max_length=MAX_VALUES)


class LogLevelArgs(Strict):
    """`log_level`: change the log level until the next start. Result: `level`.

    Args:
        level: The new level.
    """

    level: Literal["debug", "info", "warning", "error"]


class RestartArgs(Strict):
    """`restart`: end the process; the service manager starts another."""


class SnapshotArgs(Strict):
    """`snapshot`: publish the newest frame of a camera as a JPEG, on the topic `snapshot`.

    Result: `camera`, `frame`, `ts` (capture time in seconds), `width`, `height` and `bytes`.

    Args:
        camera: Name of the camera; the first one by default.
        annotated: Draw the engine's results.
    """

    camera: str | None = Field(default=None, max_length=256)
    annotated: bool = False


class FileArgs(Strict):
    """A file for the board: downloaded from `url`, or else sent in chunks on the topics model/{sha256}/{n}.

    `what` is the kind of file, which is also the op that delivers it.

    Args:
        sha256: SHA-256 of the file, in hex.
        size: Size of the file in bytes.
        url: Address that the board downloads the file from; null: it is sent in chunks.
    """

    what: ClassVar[str]

    sha256: Sha256
    size: int = Field(ge=1, le=MAX_MODEL_BYTES)
    url: str | None = Field(default=None, min_length=1, max_length=2048, pattern=r"^https?://[!-~]+$")


class ModelArgs(FileArgs):
    """`model`: serve this model file instead of the present one.

    Result, once the job has ended: `artefact` and `fidelity`.

    Args:
        release: A Release that a release key has signed.
        accept: The owner accepts that its answers differ from today's by more than recalibration.max_loss.
    """

    what: ClassVar[str] = "model"

    release: dict[str, JsonValue] | None = None
    accept: bool = False


class CalibrationArgs(FileArgs):
    """`calibration`: build a candidate with the scales of this file, which a fleet has merged.

    Result, once the job has ended: `artefact` and `fidelity`.
    """

    what: ClassVar[str] = "calibration"

    size: int = Field(ge=1, le=MAX_HISTOGRAM_CHUNKS * HISTOGRAM_CHUNK_BYTES)


class HistogramsArgs(Strict):
    """`histograms`: publish the histograms of the calibration in service, in chunks, on histograms/{upload}/{n}.

    Result: `upload` (its name in the topics), `sha256`, `total` (chunks) and `bytes`.

    Args:
        upload: SHA-256 of the upload whose chunks are missing; null: all of today's are sent.
        missing: Numbers of the missing chunks; if the upload has another hash by now, all are sent.
    """

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


@dataclass(frozen=True)
class Op:
    """A command, as far as it is known before a board carries it out.

    An operator gives each. One with the argument `release` needs a release key's permission, too.

    Args:
        args: Type of its arguments; its docstring describes the op and the result.
        example: Arguments as they are sent.
        changes: Whether it changes anything. One that does not may be carried out twice.
        versioned: Its version has to exceed the one before.
        permission: Key of config.yaml by which the board's owner permits it; empty: none is needed.
        is_job: It takes a while, and ends in another engine.
        rollout: Its name in a rollout; empty: no rollout sends it.
        button: Arguments that its button on a board's page asks for; None: it has no button.
        result: Type of its result, where that is a document; else the docstring of `args` lists the keys.
    """

    args: type[Strict]
    example: Mapping[str, JsonValue]
    changes: bool = True
    versioned: bool = False
    permission: str = ""
    is_job: bool = False
    rollout: str = ""
    button: tuple[str, ...] | None = None
    result: type[Document] | None = None


# In examples.
_ID = "8c04be17a95d2f63"
_FILE: Mapping[str, JsonValue] = {"sha256": "5b1d3c4e" * 8, "size": 81234}

OPS: Mapping[str, Op] = {
    "status": Op(StatusArgs, {}, changes=False, result=BoardStatus),
    "recalibrate": Op(RecalibrateArgs, {"frames": 256}, is_job=True, rollout="recalibrate", button=()),
    "rollback": Op(RollbackArgs, {}, button=()),
    "cancel": Op(CancelArgs, {}, button=()),
    "switch": Op(SwitchArgs, {"regime": _ID}, rollout="regime", button=("regime",)),
    "policy": Op(PolicyArgs, {"artefact": _ID, "score_threshold": 0.45, "classes": ["person", "car"]}),
    "set": Op(SetArgs, {"values": {"recalibration.max_loss": 0.05}}, versioned=True, rollout="policy"),
    "log_level": Op(LogLevelArgs, {"level": "debug"}),
    "restart": Op(RestartArgs, {}),
    "snapshot": Op(SnapshotArgs, {"annotated": True}, permission="privacy.snapshot", button=("camera",)),
    "model": Op(ModelArgs, {**_FILE, "url": "https://models.example/m.onnx"}, is_job=True, rollout="model"),
    "histograms": Op(HistogramsArgs, {}, permission="privacy.histograms"),
    "calibration": Op(CalibrationArgs, _FILE, is_job=True, rollout="calibration"),
}


class Command(Document):
    """A command of an operator.

    Args:
        id: Identifies the command; a repeated one is not carried out again.
        op: Name of the operation.
        args: The op's arguments.
        issued: Unix time in seconds at which it was written.
        expires: Unix time in seconds from which it is refused.
        version: Orders commands that set a state: see the op.
        to: `fleet/device`; required in a signed command.
        signature: Ed25519 signature of the canonical JSON (RFC 8785) of the document without `signature`, in base64;
            absent from unsigned commands.
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
    """Why a command failed, or was not carried out.

    Args:
        code: Code of the error.
        message: The error in a sentence: found, expected, remedy.
    """

    code: str
    message: str


class Desired(Strict):
    """The retained document `desired`: all values that `set` could set. Keys that are absent are as in config.yaml.

    It lacks the required fields of a command, and other fields are refused, so that neither is taken for the other.

    Args:
        version: Increases from document to document; `set` shares the counter.
        values: By the key's path, such as `recalibration.max_loss`.
        to: `fleet/device`; required in a signed document.
        expires: Unix time in seconds from which it is refused.
        signature: Ed25519 signature of the canonical JSON (RFC 8785) of the document without `signature`, in base64.
    """

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    version: Version
    values: dict[Name, JsonValue] = Field(max_length=MAX_VALUES)
    to: str | None = None
    expires: float | None = None
    signature: str | None = None


class Reported(Document):
    """The retained document `reported`: the settings in force.

    Args:
        version: Version that was applied last; 0 for none.
        values: Values in force, by the key's path; keys that are absent are as in config.yaml.
        error: Why the newest `desired` was refused; absent if it was not.
    """

    version: int
    values: dict[str, JsonValue]
    error: Failure | None = None


class Release(Strict):
    """A release key's permission to run one model file, on the boards of a product, or on boards without a product.

    Args:
        kind: `release`
        sha256: SHA-256 of the model file, in hex.
        size: Size of the model file in bytes.
        version: Increases from release to release.
        issued: Unix time in seconds at which it was written.
        expires: Unix time in seconds from which the board refuses it.
        name: Name for people.
        product: Product of the boards that may run it; absent for boards without a product.
        signature: Ed25519 signature, by a release key, of the canonical JSON (RFC 8785) of the document without
            `signature`, in base64.
    """

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
    """The progress or the end of a command.

    Args:
        id: Id of the command.
        status: SUCCEEDED, FAILED, REJECTED and EXPIRED are final.
        step: Step of the job, or of a delivery.
        percent: Progress of the step.
        error: Why the command failed or was refused.
        result: Result of the command, as the op describes it.
    """

    id: Name
    status: CommandStatus
    step: str | None = None
    percent: float | None = Field(default=None, ge=0.0, le=100.0)
    error: Failure | None = None
    result: dict[str, JsonValue] | None = None

    @property
    def final(self) -> bool:
        """True if no further result follows."""
        return self.status not in ("ACCEPTED", "IN_PROGRESS")
