"""Read what boards sent: many messages at once, each as what its topic says it is, or refused with the reason.

`Reader.read` makes a `Batch` of the messages. Telemetry is by far the most of them, and takes a short way; everything
else is parsed by the contract's types. A message is attributed to the device of its topic, whatever its document says.
A numbered document that cannot be read becomes a gap, so that it does not hold up all later numbers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import Annotated
from zlib import crc32

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict  # pydantic asks for it before Python 3.12

from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.contract.messages import (
    NEWER_SCHEMA,
    SCHEMA_VERSION,
    Birth,
    Dropped,
    Epoch,
    Event,
    Number,
    Status,
    Telemetry,
)
from agent.contract.topics import MAX_NAME_BYTES, Topics
from agent.contract.wire import MAX_DEPTH, MAX_PAYLOAD_BYTES, MessageError, read_object
from agent.mqtt.receive_queue import Arrival
from fleet.devices.devices import Name, is_late_will
from fleet.devices.records import Refused
from fleet.devices.reports import Gap, Report, Stream
from fleet.untrusted import printable

NUMBERED, STATES, RESULTS = ("telemetry", "event"), ("status", "birth"), ("cmd/+/result",)

# Refused for other reasons than their content, or of a newer tared: such a number is stored already, or will come
# again. The number of any other refused document is known to be lost.
_NOT_LOST = ("fleet.identity", "fleet.retained", NEWER_SCHEMA)
_UNREADABLE = "unreadable"  # the kind of a gap for a document that could not be read
_HEAD_BYTES = 400  # in which a board writes the number
_MOST_KIND = 64  # characters
_MOST_KNOWN = 100_000  # topics
_LONGEST_TOPIC_BYTES = len("tared/v1///cmd//result") + 3 * MAX_NAME_BYTES
_NAMES = b'"device"', b'"fleet"'  # keys that name the sender; the contract's documents have none


class _Head(TypedDict):
    """The fields of telemetry that the collector needs."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)  # type: ignore[misc]  # pydantic's way

    epoch: Epoch
    seq: Number
    ts: float
    schema_version: NotRequired[Annotated[int, Field(ge=1, le=SCHEMA_VERSION)]]


_validate_head = TypeAdapter(_Head).validator.validate_json


@dataclass
class Batch:
    """The content of many messages.

    came_online: devices that sent a status, and therefore get an acknowledgement. seen: devices that sent anything of
    themselves just now; retained messages do not count. births: as `Devices.apply_births` has them. results: each with
    its document.
    """

    entries: list[Report | Gap] = field(default_factory=list)
    came_online: set[Name] = field(default_factory=set)
    seen: set[Name] = field(default_factory=set)
    statuses: dict[Name, Status] = field(default_factory=dict)
    births: dict[Name, tuple[Birth | None, str]] = field(default_factory=dict)
    results: list[tuple[Name, CommandResult, str]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)

    @property
    def names(self) -> list[Name]:
        """The devices that it is of, in the order in which they came as far as it is known."""
        reporting = dict.fromkeys((each.stream.fleet, each.stream.device) for each in self.entries)
        states = [*self.statuses, *self.births, *sorted(self.seen), *(name for name, _, _ in self.results)]
        return [*dict.fromkeys([*reporting, *states])]

    def without(self, names: Set[Name]) -> Batch:
        """Return what is of other devices."""
        return Batch(
            [each for each in self.entries if (each.stream.fleet, each.stream.device) not in names],
            self.came_online - names,
            self.seen - names,
            {name: status for name, status in self.statuses.items() if name not in names},
            {name: birth for name, birth in self.births.items() if name not in names},
            [each for each in self.results if each[0] not in names],
            self.refused,
        )


@dataclass(frozen=True)
class Part:
    """One of `count` parts of all devices: those whose name's CRC-32 modulo `count` is `number - 1`."""

    number: int = 1
    count: int = 1

    def contains(self, fleet: str, device: str) -> bool:
        return crc32(f"{fleet}/{device}".encode()) % self.count == self.number - 1


WHOLE = Part()


class Reader:
    """Read the messages of one part of all devices, and pass over the others."""

    def __init__(self, part: Part = WHOLE) -> None:
        self._part = part
        self._known: dict[bytes, tuple[str, str, str] | None] = {}

    def read(self, arrivals: Iterable[Arrival]) -> Batch:
        """Read all messages, in their order."""
        batch, streams = Batch(), dict[tuple[bytes, int], Stream]()
        entries = batch.entries
        for topic, payload, retained in arrivals:
            try:
                place = self._known[topic]
            except KeyError:
                place = self._place(topic, payload, batch)
            if place is None:
                continue
            fleet, device, path = place
            if path == "telemetry" and not retained and (head := _head(payload)) is not None:
                epoch = head["epoch"]
                stream = streams.get((topic, epoch))
                if stream is None:
                    stream = streams[topic, epoch] = Stream(fleet, device, epoch)
                entries.append(Report(stream, head["seq"], path, head["ts"], payload.decode()))
            else:
                _read_into(batch, (fleet, device), path, payload, retained)
        return batch

    def _place(self, topic: bytes, payload: bytes, batch: Batch) -> tuple[str, str, str] | None:
        """Return fleet, device and path of a topic; None for another part's, and for names that no board may have."""
        text = topic[: _LONGEST_TOPIC_BYTES + 1].decode(errors="replace")
        levels = text.split("/")
        fleet, device = levels[2:4] if len(levels) >= 5 else ("", "")
        try:
            Topics(fleet, device)  # a broker lets anybody publish under any name
            place = (fleet, device, "/".join(levels[4:])) if self._part.contains(fleet, device) else None
        except AgentError as error:
            batch.refused.append(Refused(fleet, device, text, error.code, str(error), payload))
            return None
        if len(topic) <= _LONGEST_TOPIC_BYTES:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[topic] = place
        return place


def _head(payload: bytes) -> _Head | None:
    """Return the fields of ordinary telemetry; None if it needs a thorough look.

    The JSON is read once and not in Python, which takes a tenth of the time.
    """
    if (
        len(payload) > MAX_PAYLOAD_BYTES
        or payload.count(b"{") + payload.count(b"[") > MAX_DEPTH
        or b"NaN" in payload
        or b"Infinity" in payload
        or _NAMES[0] in payload
        or _NAMES[1] in payload
    ):
        return None
    try:
        head: _Head = _validate_head(payload)
    except ValidationError:
        return None
    return head


def _read_into(batch: Batch, name: Name, path: str, payload: bytes, retained: bool) -> None:
    """Read one message thoroughly. What it says goes into the batch, or why it was refused."""
    try:
        if path in STATES:
            _read_state(batch, name, path, payload)
            if payload and not retained:
                batch.seen.add(name)
        elif retained:  # no board of ours retains these; what a board sent without being acknowledged, it sends again
            raise MessageError(
                "fleet.retained",
                f"{path} that the broker had retained",
                "a message that is not retained",
                "clear the retained message at the broker",
            )
        elif path in NUMBERED:
            batch.entries.append(parse_numbered(*name, path, payload))
            _check_names(*name, payload)
        else:
            result = CommandResult.from_json(payload)
            if path != f"cmd/{result.id}/result":
                raise MessageError("fleet.identity", f"id {result.id!a}", path, "correct the sender")
            batch.results.append((name, result, payload.decode()))
            batch.seen.add(name)
    except AgentError as error:
        batch.refused.append(Refused(*name, path, error.code, str(error), payload))
        if path in NUMBERED and error.code not in _NOT_LOST:
            batch.entries.extend(gap_for_unreadable(*name, payload))


def _read_state(batch: Batch, name: Name, path: str, payload: bytes) -> None:
    """Read a status or a birth. An empty payload clears a retained message, and says nothing. Raises MessageError.

    Of a birth in a newer schema, the version alone is believed.
    """
    if path == "status":
        batch.came_online.add(name)
    if not payload:
        return
    if path == "status":
        status, previous = Status.from_json(payload), batch.statuses.get(name)
        if previous is None or not is_late_will(status, printable(previous.session), previous.ts):
            batch.statuses[name] = status
        return
    try:
        batch.births[name] = Birth.from_json(payload), payload.decode()
    except MessageError as error:
        if error.code != NEWER_SCHEMA:
            raise
        batch.refused.append(Refused(*name, path, error.code, str(error), payload))
        batch.births[name] = None, json.dumps({"schema_version": read_object(payload)["schema_version"]})


def parse_numbered(fleet: str, device: str, path: str, payload: bytes) -> Report | Gap:
    """Parse a document of `telemetry` or `event`. Raises AgentError for anything else."""
    if path == "telemetry":
        sample = Telemetry.from_json(payload)
        return Report(Stream(fleet, device, sample.epoch), sample.seq, path, sample.ts, payload.decode())
    document = read_object(payload)
    if "seq" not in document and "from" in document:
        gap = Dropped.from_json(payload)
        return Gap(Stream(fleet, device, gap.epoch), gap.first, gap.last, _check_kind(gap.kind), gap.n)
    event = Event.from_json(payload)
    return Report(Stream(fleet, device, event.epoch), event.seq, _check_kind(event.kind), event.ts, payload.decode())


def gap_for_unreadable(fleet: str, device: str, payload: bytes) -> list[Gap]:
    """Return a gap in the place of an unreadable document, if its number can be found.

    The document would not be any better when it came again, and must not hold up all later numbers.
    """
    matches = [re.search(rb'"%s"\s*:\s*(\d{1,18})\b' % name, payload[:_HEAD_BYTES]) for name in (b"epoch", b"seq")]
    epoch, seq = (int(match[1]) if match else 0 for match in matches)
    return [Gap(Stream(fleet, device, epoch), seq, seq, _UNREADABLE, 1)] if epoch and seq else []


def _check_names(fleet: str, device: str, payload: bytes) -> None:
    """Raise MessageError (`fleet.identity`) if the document names another device than its topic does."""
    if not any(name in payload for name in _NAMES):
        return
    document = read_object(payload)
    named = document.get("fleet", fleet), document.get("device", device)
    if named != (fleet, device):
        remedy = "correct the sender; give the broker an ACL by which each board may publish under its own name alone"
        raise MessageError("fleet.identity", f"a document of {named!a}"[:200], f"of {fleet}/{device}", remedy)


def _check_kind(kind: str) -> str:
    """Return the kind of an event. Raises MessageError if it is not a short printable word, as databases need it."""
    if kind != printable(kind, _MOST_KIND):
        found = f"kind {kind[:_MOST_KIND]!a}"
        raise MessageError("message.invalid", found, f"a word of at most {_MOST_KIND} characters", "correct the sender")
    return kind
