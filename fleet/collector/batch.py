"""What boards sent, read: many messages at once, each as what its topic says it is, or refused with the reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
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
from agent.mqtt.bulk_receive import Arrival
from fleet.devices.devices import is_late_will
from fleet.devices.identities import Name
from fleet.devices.records import Refused
from fleet.devices.reports import Gap, Report, Stream
from fleet.untrusted import printable

NUMBERED, STATES, RESULTS = ("telemetry", "event"), ("status", "birth"), ("cmd/+/result",)

_READABLE = "fleet.identity", "fleet.retained"  # refused, though not for what they say
_NOT_SPENT = (*_READABLE, NEWER_SCHEMA)  # that number is still to come, or is there; else it is known to be lost
_UNREADABLE = "unreadable"  # the kind of what came, and could not be stored
_HEAD_BYTES = 400  # in which a board writes the number
_MOST_KIND = 64  # characters
_MOST_KNOWN = 100_000  # topics
_LONGEST_TOPIC_BYTES = len("tared/v1///cmd//result") + 3 * MAX_NAME_BYTES
_NAMES = b'"device"', b'"fleet"'  # keys of documents that say whose they are; the contract's do not


class _Head(TypedDict):
    """Of telemetry, what the collector itself needs; the rest is for whoever looks at it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)  # type: ignore[misc]  # pydantic's way

    epoch: Epoch
    seq: Number
    ts: float
    schema_version: NotRequired[Annotated[int, Field(ge=1, le=SCHEMA_VERSION)]]


_quick = TypeAdapter(_Head).validator.validate_json


@dataclass
class Batch:
    """arrivals: who has told of a state, and is to hear how far it is; heard: who has told anything of itself just now,
    and not some time ago to a broker that has kept it. births: as `Devices.told_birth` takes them. results: with the
    documents, as they came."""

    entries: list[Report | Gap] = field(default_factory=list)
    came_online: set[Name] = field(default_factory=set)
    seen: set[Name] = field(default_factory=set)
    statuses: dict[Name, Status] = field(default_factory=dict)
    births: dict[Name, tuple[Birth | None, str]] = field(default_factory=dict)
    results: list[tuple[Name, CommandResult, str]] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)


@dataclass(frozen=True)
class Part:
    """Of the devices, those whose names' CRC-32 leaves `number - 1` when divided by `of`."""

    number: int = 1
    of: int = 1

    def contains(self, fleet: str, device: str) -> bool:
        return crc32(f"{fleet}/{device}".encode()) % self.of == self.number - 1


WHOLE = Part()


class Reader:
    """Reads what belongs to one part of all devices."""

    def __init__(self, part: Part = WHOLE) -> None:
        self._part = part
        self._known: dict[bytes, tuple[str, str, str] | None] = {}

    def read(self, arrivals: Iterable[Arrival]) -> Batch:
        """All of it, in its order. Names are those of the topic, whatever a document says."""
        batch, streams = Batch(), dict[tuple[bytes, int], Stream]()
        news = batch.entries
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
                news.append(Report(stream, head["seq"], path, head["ts"], payload.decode()))
            else:
                _take(batch, fleet, device, path, payload, retained)
        return batch

    def _place(self, topic: bytes, payload: bytes, batch: Batch) -> tuple[str, str, str] | None:
        """Fleet, device, and what it is about; None for what is not ours, or nobody's."""
        text = topic[: _LONGEST_TOPIC_BYTES + 1].decode(errors="replace")
        levels = text.split("/")
        fleet, device = levels[2:4] if len(levels) >= 5 else ("", "")
        try:
            Topics(fleet, device)  # a broker lets anybody publish under any name
            place = (fleet, device, "/".join(levels[4:])) if self._part.contains(fleet, device) else None
        except AgentError as error:
            batch.refused.append(_refused(fleet, device, text, payload, error))
            return None
        if len(topic) <= _LONGEST_TOPIC_BYTES:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            self._known[topic] = place
        return place


def parse_numbered(fleet: str, device: str, path: str, payload: bytes) -> Report | Gap:
    """A document of `telemetry` or `event`. Raises AgentError for one that is none."""
    if path == "telemetry":
        sample = Telemetry.from_json(payload)
        return Report(Stream(fleet, device, sample.epoch), sample.seq, path, sample.ts, payload.decode())
    document = read_object(payload)
    if "seq" not in document and "from" in document:
        gap = Dropped.from_json(payload)
        return Gap(Stream(fleet, device, gap.epoch), gap.first, gap.last, _kind(gap.kind), gap.n)
    event = Event.from_json(payload)
    return Report(Stream(fleet, device, event.epoch), event.seq, _kind(event.kind), event.ts, payload.decode())


def gap_for_unreadable(fleet: str, device: str, payload: bytes) -> list[Gap]:
    """What is known of a document that cannot be read, if its number can be: it will not be any better when it comes
    again, and must not hold up all that comes after it."""
    found = [re.search(rb'"%s"\s*:\s*(\d{1,18})\b' % name, payload[:_HEAD_BYTES]) for name in (b"epoch", b"seq")]
    epoch, seq = (int(match[1]) if match else 0 for match in found)
    return [Gap(Stream(fleet, device, epoch), seq, seq, _UNREADABLE, 1)] if epoch and seq else []


def _head(payload: bytes) -> _Head | None:
    """Of telemetry about which nothing is unusual: the JSON is read once, and not in Python, which takes a tenth of the
    time. None: look at it thoroughly."""
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
        head: _Head = _quick(payload)
    except ValidationError:
        return None
    return head


def _take(batch: Batch, fleet: str, device: str, path: str, payload: bytes, retained: bool) -> None:
    name = fleet, device
    try:
        if path in STATES:
            _take_state(batch, name, path, payload)
            if payload and not retained:
                batch.seen.add(name)
        elif retained:  # by no board of ours; what a board has sent, and is not told of, it sends again
            raise MessageError("fleet.retained", f"{path} that was kept", "what is sent now", "clear it at the broker")
        elif path in NUMBERED:
            batch.entries.append(parse_numbered(fleet, device, path, payload))
            _check_names(fleet, device, payload)
        else:
            result = CommandResult.from_json(payload)
            if path != f"cmd/{result.id}/result":
                raise MessageError("fleet.identity", f"id {result.id!a}", path, "correct the sender")
            batch.results.append((name, result, payload.decode()))
            batch.seen.add(name)
    except AgentError as error:
        batch.refused.append(_refused(fleet, device, path, payload, error))
        if path in NUMBERED and error.code not in _NOT_SPENT:
            batch.entries.extend(gap_for_unreadable(fleet, device, payload))


def _take_state(batch: Batch, name: Name, path: str, payload: bytes) -> None:
    """Raises MessageError. An empty payload clears what a broker has kept, and says nothing."""
    if path == "status":
        batch.came_online.add(name)
    if not payload:
        return
    if path == "birth":
        _take_birth(batch, name, payload)
        return
    status, before = Status.from_json(payload), batch.statuses.get(name)
    if before is None or not is_late_will(status, printable(before.session), before.ts):
        batch.statuses[name] = status


def _take_birth(batch: Batch, name: Name, payload: bytes) -> None:
    """Of one in a newer schema its number is all that is believed. Raises MessageError."""
    try:
        batch.births[name] = Birth.from_json(payload), payload.decode()
    except MessageError as error:
        if error.code != NEWER_SCHEMA:
            raise
        batch.refused.append(_refused(*name, "birth", payload, error))
        version = read_object(payload)["schema_version"]
        batch.births[name] = None, json.dumps({"schema_version": version})


def _check_names(fleet: str, device: str, payload: bytes) -> None:
    """Raises MessageError (`fleet.identity`) for a document that says it is of another device than its topic does."""
    if not any(name in payload for name in _NAMES):
        return
    document = read_object(payload)
    told = document.get("fleet", fleet), document.get("device", device)
    if told != (fleet, device):
        remedy = "correct the sender; give the broker an ACL, that each board may publish under its own name alone"
        raise MessageError("fleet.identity", f"a document of {told!a}"[:200], f"of {fleet}/{device}", remedy)


def _kind(text: str) -> str:
    """Raises MessageError for one that no event has: it is a word, in any database."""
    if text != printable(text, _MOST_KIND):
        found = f"kind {text[:_MOST_KIND]!a}"
        raise MessageError("message.invalid", found, f"a word of at most {_MOST_KIND} characters", "correct the sender")
    return text


def _refused(fleet: str, device: str, path: str, payload: bytes, error: AgentError) -> Refused:
    return Refused(fleet, device, path, error.code, str(error), payload)
