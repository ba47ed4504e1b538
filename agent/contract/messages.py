"""The documents of the MQTT contract as frozen types, shared by the devices and the fleet.

Pure: no sockets, no clocks. Who reads a document ignores fields it does not know, so that devices and fleet
need not be updated in one instant. A command's `args` are the exception: an argument this agent does not
know asks for something it would not do, so it is refused by name.

What a reader cannot do without is a new `schema_version`. A birth tells that of its board; any document may tell its
own, and one of a newer schema is refused, whatever else it says. In every schema the key is a whole number.
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
NEWER_SCHEMA = "message.schema"  # the code of a document that this tared is too old for
_EVENT_FIELDS = frozenset({"epoch", "seq", "ts", "kind"})
_MOST_SCHEMA = 2**31

DeviceState = Literal["online", "degraded", "stopping", "offline"]
Epoch = Annotated[int, Field(ge=0, lt=2**63)]  # what SQLite holds, and most languages
Number = Annotated[int, Field(ge=1, lt=2**63)]
DocumentT = TypeVar("DocumentT", bound="Document")


class Document(BaseModel):
    """A JSON object on the wire: frozen, exact types, finite numbers; what is None stays off the wire."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
    most_bytes: ClassVar[int] = MAX_PAYLOAD_BYTES

    def to_json(self) -> bytes:
        return self.model_dump_json(exclude_none=True, by_alias=True).encode()

    @classmethod
    def from_json(cls: type[DocumentT], payload: bytes) -> DocumentT:
        """Read a document. Raises MessageError for anything that is not one, and for one of a newer schema
        (NEWER_SCHEMA)."""
        document = read_object(payload, cls.most_bytes)
        _check_schema(document)
        try:
            return cls.model_validate(cls._fields(document))
        except ValidationError as error:
            expected = f"the fields of a {cls.__name__}"
            raise MessageError("message.invalid", describe_errors(error), expected, "correct the sender") from None

    @staticmethod
    def _fields(document: dict[str, Any]) -> dict[str, Any]:
        """The fields of this type in an object from the wire, where they are named otherwise there."""
        return document


class Status(Document):
    """Whether a device is there; retained, and left with the broker as the last will.

    `session` is new with every connection, so that the late will of a lost connection is not mistaken for
    the present one's. `boot_id` tells a restarted board from a restarted agent. `ts` is Unix time in
    seconds; in a will, of the connection's beginning.
    """

    state: DeviceState
    session: str
    boot_id: str
    ts: float


class Birth(Document):
    """What a device is and what it runs; retained.

    `commands` tells by their ids whose keys count, and in `unsigned` whether unsigned commands do, though the broker is
    on another machine.
    """

    schema_version: int = SCHEMA_VERSION
    agent_version: str
    hardware: dict[str, JsonValue] = {}
    runtimes: dict[str, str] = {}
    commands: dict[str, JsonValue] = {}
    model: str | None = None
    engine: str | None = None
    calibration: str | None = None


class Latency(Document):
    """Percentiles in milliseconds."""

    p50: float
    p99: float


class FidelityReport(Document):
    """The estimated fidelity, its confidence interval, and the number of frames behind it.

    `empty` counts apart the frames on which neither engine found anything.
    """

    estimate: float
    low: float
    high: float
    n: int
    empty: int = 0


class Observing(Document):
    """What observing takes: `share` of inference since the start, 0.02 for one part in fifty; spent ahead, and owed.

    state_bytes: what is kept of what was seen, histograms and answers that labels may still come for.
    """

    share: float
    debt_s: float
    state_bytes: int


class Accuracy(FidelityReport):
    """How often the engine in service is right, by the labels that came; `empty` had no object, and none was found."""


class CameraTelemetry(Document):
    """One camera since the telemetry before: frame rate, drops by cause, latency, drift, fidelity, accuracy.

    `fidelity` is since the swap or the last change of drift; its interval holds at all times at once. `fidelity_hour`
    is over the last hour of capture time, whatever served; its interval holds for an hour chosen beforehand. `accuracy`
    is since the swap, of labelled frames. The lower bound is the owner's `reference_accuracy` less the most that the
    engine may differ from the reference by `fidelity`: it is as true as that accuracy is of the present scene.

    `latency_ms` is from a frame's arrival to its answer, `published_ms` until every output of results was handed it.

    `up` is whether the camera is there: it has given a frame and is not lost since; a recording, until its end. `lost`
    is the code of the error for which it is away, absent while it is there or has yet to be opened. Older agents tell
    neither.

    `observer` says why nothing is observed now, "preparing" or the code of an error; drift and fidelity, and what
    follows from them, are absent then, because nobody knows them.
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
    """A periodic sample. `(epoch, seq)` numbers telemetry and events of a device together, without gaps."""

    epoch: Epoch
    seq: Number
    ts: float
    cameras: dict[str, CameraTelemetry]
    health: dict[str, JsonValue] = {}


class Event(Document):
    """Something that happened: `kind` is alarm, drift, fidelity, view, regime, job, swap, commit, rollback, store,
    error, or camera, observer or results, which are back after an error; `detail` depends on it. With swap a candidate
    serves, on probation; commit, once it is current, or rollback is its end. A rollback with trigger rollback is the
    operator's, to an earlier engine.

    On the wire the detail stands flat beside the other fields, so it must have no key of theirs. `ts` is the
    Unix time of the event in seconds; what a detail says in capture time bears another name.
    """

    epoch: Epoch
    seq: Number
    ts: float
    kind: str
    detail: dict[str, JsonValue] = {}

    @field_validator("detail")
    @classmethod
    def _has_names_of_its_own(cls, detail: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted(_EVENT_FIELDS & detail.keys()):
            raise ValueError(f"{', '.join(taken)} is the name of another field: rename it in the detail")
        return detail

    @model_serializer
    def _flat(self) -> dict[str, JsonValue]:
        return {"epoch": self.epoch, "seq": self.seq, "ts": self.ts, "kind": self.kind, **self.detail}

    @staticmethod
    def _fields(document: dict[str, Any]) -> dict[str, Any]:
        known = {name: document.pop(name) for name in _EVENT_FIELDS & document.keys()}
        return {**known, "detail": document}


class Dropped(Document):
    """Numbers of an epoch, `from` to `to`, that will not come: `n` of them were of this kind, and a message for each
    other kind has the same range. The kind `forgotten` is of rows that only a broker had, before there was a collector.
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
    """A collector has stored every row of an epoch up to the number `upto`, or knows that it will not come."""

    epoch: Epoch
    upto: Annotated[int, Field(ge=0, lt=2**63)]


def _check_schema(document: dict[str, Any]) -> None:
    """Raises MessageError."""
    told = document.get("schema_version", SCHEMA_VERSION)
    if type(told) is not int or not 1 <= told < _MOST_SCHEMA:
        found = f"schema_version {told!a}"[:200]
        raise MessageError("message.invalid", found, "a whole number from 1", "correct the sender")
    if told > SCHEMA_VERSION:
        expected = f"schema {SCHEMA_VERSION}, which is all that this tared knows"
        raise MessageError(NEWER_SCHEMA, f"a document of schema {told}", expected, "update this tared")
