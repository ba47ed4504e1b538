"""Define the documents that devices publish, as frozen types shared with the fleet; no sockets, no clocks.

Compatibility:

1. A reader ignores fields that it does not know, so that devices and fleet need not be updated in one instant. A
   command's `args` are the exception: an unknown argument requests something that this agent would not do, so it is
   refused by name.
2. A change that readers must understand raises `schema_version`. A birth states the version of its board; any document
   may state its own. A document of a newer schema is refused. In every schema the key is a whole number.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from agent.contract.wire import MAX_PAYLOAD_BYTES, MessageError, describe_errors, read_object

SCHEMA_VERSION = 1
NEWER_SCHEMA = "message.schema"  # error code of a document that this tared is too old for
_EVENT_FIELDS = frozenset({"epoch", "seq", "ts", "kind"})
_MOST_SCHEMA = 2**31

DeviceState = Literal["online", "degraded", "stopping", "offline"]
Epoch = Annotated[int, Field(ge=0, lt=2**63)]  # what SQLite holds, and most languages
Number = Annotated[int, Field(ge=1, lt=2**63)]
DocumentT = TypeVar("DocumentT", bound="Document")


class Document(BaseModel):
    """A JSON object on the wire: frozen, exact types, finite numbers. Fields that are None are left out."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
    most_bytes: ClassVar[int] = MAX_PAYLOAD_BYTES

    def to_json(self) -> bytes:
        """Return the document as it goes on the wire, in UTF-8."""
        return self.model_dump_json(exclude_none=True, by_alias=True).encode()

    @classmethod
    def from_json(cls: type[DocumentT], payload: bytes) -> DocumentT:
        """Parse a document.

        Raises MessageError:
            message.too_large, .too_deep, .malformed, .not_object   as `read_object`
            message.invalid                                         a field is missing or wrong
            message.schema (NEWER_SCHEMA)                           the document has a newer schema
        """
        document = read_object(payload, cls.most_bytes)
        _check_schema(document)
        try:
            return cls.model_validate(cls._fields(document))
        except ValidationError as error:
            expected = f"the fields of a {cls.__name__}"
            raise MessageError("message.invalid", describe_errors(error), expected, "correct the sender") from None

    @staticmethod
    def _fields(document: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of this type from an object on the wire; overridden where they differ."""
        return document


class Status(Document):
    """The state of a device; retained, and also the last will that it leaves with the broker.

    Args:
        state: `online` while an INT8 engine serves, `degraded` while the float reference does; `offline` in the will.
        session: New with every connection, so that the late will of a lost connection is not taken for the present
            one's.
        boot_id: New with every boot of the machine: it distinguishes a restart of the board from one of the daemon.
        ts: Unix time in seconds; in a will, of the start of the connection.
        reason: Why the device is degraded, or why a job that is due does not start, in a sentence with the remedy.
    """

    state: DeviceState
    session: str
    boot_id: str
    ts: float
    reason: str | None = None


class Birth(Document):
    """A device's hardware and software, and the engine that serves; retained.

    `commands` lists the ids of the keys whose commands count. Its key `unsigned` is set if unsigned commands count,
    although the broker is on another machine.

    Args:
        schema_version: Version of the documents that the board writes and reads.
        agent_version: Version of tared on the board.
        hardware: The board's model, architecture and the like.
        runtimes: Version of each inference runtime, by name.
        commands: Ids of the keys whose commands count, and whether unsigned commands do.
        model: Name of the model.
        engine: Id of the artefact in service.
        calibration: Id of its calibration.
        precision: Precision of the engine: int8, fp16 or fp32.
        int8_macs_share: The share of the engine's multiply-accumulates that are INT8, 0 to 1.
        regimes: Ids of the engines that are kept for a light, which `switch` takes.
        policies: Policy of each engine that has one, by the engine's id; of masks their number.
    """

    schema_version: int = SCHEMA_VERSION
    agent_version: str
    hardware: dict[str, JsonValue] = {}
    runtimes: dict[str, str] = {}
    commands: dict[str, JsonValue] = {}
    model: str | None = None
    engine: str | None = None
    calibration: str | None = None
    precision: str | None = None
    int8_macs_share: float | None = None
    regimes: list[str] = []
    policies: dict[str, JsonValue] = {}


class Latency(Document):
    """Percentiles in milliseconds.

    Args:
        p50: The median.
        p99: The 99th percentile.
    """

    p50: float
    p99: float


class FidelityReport(Document):
    """The estimated fidelity, its confidence interval, and the number of frames behind it.

    Args:
        estimate: The mean, 0 to 1.
        low: Lower bound, with 95 % confidence.
        high: Upper bound, with 95 % confidence.
        n: Frames behind the estimate, without the empty ones. 0: nothing is known yet, and the estimate means nothing.
        empty: Further frames, on which neither engine found anything.
    """

    estimate: float
    low: float
    high: float
    n: int
    empty: int = 0


class Observing(Document):
    """The cost of observing.

    Args:
        share: Observation time as a share of inference time since the start; 0.02 is one fiftieth.
        debt_s: Seconds that were spent ahead, and are owed.
        state_bytes: Memory for histograms, and for results that labels may still come for.
        audited: Frames on which the reference was compared with ONNX Runtime; absent where it is ONNX Runtime itself.
    """

    share: float
    debt_s: float
    state_bytes: int
    audited: int | None = None


class Accuracy(FidelityReport):
    """How often the engine in service is right, by labels. `empty` counts frames rightly found without an object."""


class Bounds(Document):
    """A figure with its 95 % interval, which holds at all times at once.

    Args:
        estimate: The figure, 0 to 1.
        low: Lower bound.
        high: Upper bound.
        n: Frames behind it. 0: nothing is known yet, and the figure means nothing.
    """

    estimate: float
    low: float
    high: float
    n: int


class LabelledAccuracy(Document):
    """By labels of frames that were drawn at random: of the engine in service, over all cameras.

    Args:
        labels: Drawn frames with a label, whichever engine answered them.
        waiting: Drawn frames without one.
        skipped: Frames of which nobody could say what they show.
        doubt: Why these labels are no random sample, in words; accuracy and what follows are then absent.
        accuracy: Accuracy of the served answers; absent without labels of this engine.
        reference: Accuracy of the float reference's answers to the same frames.
        int8_loss: Accuracy of the reference minus accuracy of the served answers.
    """

    labels: int
    waiting: int
    skipped: int
    doubt: str | None = None
    accuracy: Bounds | None = None
    reference: Bounds | None = None
    int8_loss: Bounds | None = None


class CameraTelemetry(Document):
    """One camera since the previous telemetry.

    Args:
        fps: Frames served per second.
        up: Whether the camera delivers: it has delivered a frame and was not lost since; a recording, until its end.
        lost: The code of the error for which the camera is away; absent while it is there, or not opened yet.
        dropped: Frames dropped, by cause.
        latency_ms: From a frame's arrival to its result.
        published_ms: From a frame's arrival until every output has received its result.
        drift: `state` (calm, warning or alarm); `e_value`, the evidence for drift; `gain_db`, the predicted gain of a
            recalibration over the known regime that fits best, in dB; `serving_db`, the same over the engine in
            service; `clipping_share`, the share of the noise that comes from values beyond the calibrated range, 0 to
            1; `gain`, the fidelity that a recalibration is expected to gain (estimate, low, high, n), or null;
            `tolerance_db`, the gain from which an alarm is raised. Empty while nothing is known.
        fidelity: Of the observed frames on which something was found, since the swap or the last change of drift. Its
            interval holds at all times simultaneously.
        fidelity_hour: Of the observed frames on which something was found in the last hour of capture time, whichever
            engine served. Its interval holds for an hour that is chosen beforehand.
        accuracy: Since the swap, on labelled frames.
        accuracy_lower_bound_if_reference_accuracy_holds: The configured `reference_accuracy` minus the largest
            difference from the reference that `fidelity` allows. It is as true as that accuracy is for this scene.
        observer: Why nothing is observed now: "preparing", or the code of an error. Then drift, fidelity and what
            follows from them are unknown, and absent.
        observing: The cost of observing.
    """

    fps: float
    up: bool | None = None
    lost: str | None = None
    dropped: dict[str, int] = {}
    latency_ms: Latency
    published_ms: Latency | None = None
    drift: dict[str, JsonValue] = {}
    fidelity: FidelityReport | None = None
    fidelity_hour: FidelityReport | None = None
    accuracy: Accuracy | None = None
    accuracy_lower_bound_if_reference_accuracy_holds: float | None = None
    observer: str | None = None
    observing: Observing | None = None


class Telemetry(Document):
    """A periodic sample. `(epoch, seq)` numbers the telemetry and events of a device together, without gaps.

    Args:
        epoch: Number of the daemon's start; it increases from start to start.
        seq: Number of the row in its epoch, from 1.
        ts: Unix time of the sample in seconds.
        cameras: By name.
        health: What the board can read: `rss_bytes` (memory of the process), `memory_available_bytes`, `load_1min`,
            `temperature_NAME_c` of each chip that has sensors, `power_mode` and `power_w` of a Jetson, `throttling`
            (whether heat slows the board down). Also `mqtt_dropped` (messages dropped from full queues or
            a full outbox), `results_dropped` (lines lost, by output), `preview` (`address`, `viewers`, `error`), and
            `commands_unsigned` (true if unsigned commands count, although the broker is on another machine).
        degraded: Why the float reference serves, in a sentence with the remedy.
        held_back: The same for a job that is due, and does not start or go on.
        held_back_code: The reason for programs: a configuration key, or an error code.
        labelled_accuracy: What labels of drawn frames come to; absent without any.
    """

    epoch: Epoch
    seq: Number
    ts: float
    cameras: dict[str, CameraTelemetry]
    health: dict[str, JsonValue] = {}
    degraded: str | None = None
    held_back: str | None = None
    held_back_code: str | None = None
    labelled_accuracy: LabelledAccuracy | None = None


class Event(Document):
    """Something that happened.

    On the wire, the keys of `detail` stand next to the other fields, so it must not have the same keys. Capture times
    in the detail have other names than `ts`.

    Args:
        epoch: Number of the daemon's start.
        seq: Number of the row in its epoch, from 1.
        ts: Unix time of the event in seconds.
        kind: Kind of the event.
        detail: Further fields, next to these on the wire; they depend on the kind.
    """

    epoch: Epoch
    seq: Number
    ts: float
    kind: str
    detail: dict[str, JsonValue] = {}

    @field_validator("detail")
    @classmethod
    def _has_names_of_its_own(cls, detail: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if shared := sorted(_EVENT_FIELDS & detail.keys()):
            raise ValueError(f"{', '.join(shared)} is the name of another field: rename it in the detail")
        return detail

    @model_serializer
    def _flat(self) -> dict[str, JsonValue]:
        return {"epoch": self.epoch, "seq": self.seq, "ts": self.ts, "kind": self.kind, **self.detail}

    @staticmethod
    def _fields(document: dict[str, Any]) -> dict[str, Any]:
        known = {name: document.pop(name) for name in _EVENT_FIELDS & document.keys()}
        return {**known, "detail": document}


class Dropped(Document):
    """Numbers of an epoch, `from` to `to`, that will not come.

    Each kind that the range had has a message of its own. The kind `forgotten` stands for rows that only a broker has
    acknowledged, before there was a collector.

    Args:
        epoch: Number of the daemon's start.
        first: First number of the range.
        last: Last number of the range.
        kind: `telemetry`, or the kind of the events.
        n: Rows of this kind in the range.
    """

    epoch: Epoch
    first: Number = Field(alias="from")
    last: Number = Field(alias="to")
    kind: str
    n: Number

    @model_validator(mode="after")
    def _is_a_range(self) -> Dropped:
        if not (self.first <= self.last and self.n <= self.last - self.first + 1):
            raise ValueError("from <= to, and n of them")
        return self


class Ack(Document):
    """A collector's acknowledgement: every row of the epoch up to `upto` is durably stored, or known not to come.

    Args:
        epoch: Number of the daemon's start.
        upto: Number of the last such row.
    """

    epoch: Epoch
    upto: Annotated[int, Field(ge=0, lt=2**63)]


def _check_schema(document: dict[str, Any]) -> None:
    """Raise MessageError for a newer schema, and for a version that is no whole number."""
    schema_version = document.get("schema_version", SCHEMA_VERSION)
    if type(schema_version) is not int or not 1 <= schema_version < _MOST_SCHEMA:
        found = f"schema_version {schema_version!a}"[:200]
        raise MessageError("message.invalid", found, "a whole number from 1", "correct the sender")
    if schema_version > SCHEMA_VERSION:
        expected = f"schema {SCHEMA_VERSION}, which is all that this tared knows"
        raise MessageError(NEWER_SCHEMA, f"a document of schema {schema_version}", expected, "update this tared")
