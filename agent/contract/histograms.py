"""The histograms of a calibration as one content of bytes: from a board to the fleet, and merged ones back to boards.

It begins with what they are of, a JSON object; tensor after tensor follows with its name and what
`calibrate.histogram.to_bytes` makes of it. No frame is in it, no time, no name of a camera. Pure, and shared with the
fleet like `agent.contract.messages`.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from agent.contract.commands import HISTOGRAM_CHUNK_BYTES, MAX_HISTOGRAM_CHUNKS, Sha256
from agent.contract.messages import Document
from agent.contract.wire import MessageError
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, from_bytes, to_bytes

MAX_UPLOAD_BYTES = MAX_HISTOGRAM_CHUNKS * HISTOGRAM_CHUNK_BYTES  # 16 MiB; a thousand tensors take about two
MAX_COUNTS_BYTES = 256 << 20  # of all histograms together: eight thousand tensors of 4096 bins
MAX_FACTS_BYTES = 4 << 20
_MAGIC = b"tHU1"
_LENGTH = struct.Struct("<I")
_RECORD = struct.Struct("<HI")  # bytes of the tensor's name, and of its histogram
_UNREADABLE = "histograms.unreadable"

Digest = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-f]+$")]


class Facts(Document):
    """What histograms are of. Those that differ in `model`, `observed` or `preprocessing` do not merge. They go in
    chunks, with the histograms: the names of thousands of tensors are more than a message has room for.

    model: hash of the FP32 master graph. observed: of the divisions by which a plan's repairs have changed what its
    tensors hold. frames: so many went in. shared: tensors that get one amax. merged: of how many boards they are, where
    they are no board's own.
    """

    most_bytes: ClassVar[int] = MAX_FACTS_BYTES

    model: Digest
    observed: Digest
    method: str = Field(min_length=1, max_length=64)
    frames: int = Field(ge=1, lt=2**40)
    preprocessing: dict[str, JsonValue] = Field(default_factory=dict)
    shared: list[list[str]] = Field(default_factory=list)
    merged: dict[str, JsonValue] | None = None


def write_upload(facts: Facts, histograms: Mapping[str, AbsHistogram]) -> bytes:
    """Equal histograms of equal facts are equal bytes."""
    head = facts.to_json()
    parts = [_MAGIC, _LENGTH.pack(len(head)), head]
    for tensor, histogram in histograms.items():
        name, content = tensor.encode(), to_bytes(histogram)
        parts += (_RECORD.pack(len(name), len(content)), name, content)
    return b"".join(parts)


def read_facts(content: bytes) -> Facts:
    """Raises MessageError."""
    return Facts.from_json(content[_begin(content) - _length(content) : _begin(content)])


def read_upload(content: bytes) -> Iterator[tuple[str, AbsHistogram]]:
    """The histograms by tensor, one after the other: all of them together take many times as much memory.

    Raises MessageError (`histograms.unreadable`), also for a histogram that is damaged, and a name that comes twice.
    """
    at, names, expanded_bytes = _begin(content), set[str](), 0
    while at < len(content):
        try:
            name_bytes, size = _RECORD.unpack_from(content, at)
            at += _RECORD.size
            name = content[at : at + name_bytes].decode()
            at += name_bytes
            histogram = from_bytes(content[at : at + size])
        except (struct.error, UnicodeDecodeError, CalibrationError) as error:
            raise _unreadable(str(error)) from error
        at += size
        if name in names:
            raise _unreadable("one tensor twice")
        expanded_bytes += histogram.counts.nbytes
        if expanded_bytes > MAX_COUNTS_BYTES:  # empty bins weigh nothing on their way
            raise _unreadable(f"counts of more than {MAX_COUNTS_BYTES} bytes")
        names.add(name)
        yield name, histogram
    if not names:
        raise _unreadable("no tensor")


def _begin(content: bytes) -> int:
    """Where the tensors begin. Raises MessageError."""
    begin = len(_MAGIC) + _LENGTH.size + _length(content)
    if begin > len(content):
        raise _unreadable(f"{len(content)} bytes")
    return begin


def _length(content: bytes) -> int:
    if not content.startswith(_MAGIC) or len(content) < len(_MAGIC) + _LENGTH.size:
        raise _unreadable(f"bytes that begin with {content[: len(_MAGIC)]!r}")
    return int(_LENGTH.unpack_from(content, len(_MAGIC))[0])


def _unreadable(found: str) -> MessageError:
    return MessageError(_UNREADABLE, found[:200], "histograms as tared writes them", "have them sent again")


_NAME_DIGITS = 16
_MOST_HEAD_BYTES = 512


class ChunkHead(Document):
    """Of which upload a chunk is. total: chunks in it."""

    sha256: Sha256
    total: int = Field(ge=1, le=MAX_HISTOGRAM_CHUNKS)


@dataclass(frozen=True)
class Upload:
    """What is sent, all of it, with the hash that it is told by."""

    content: bytes
    sha256: str

    @classmethod
    def from_content(cls, content: bytes) -> Upload:
        return cls(content, hashlib.sha256(content).hexdigest())

    @property
    def total(self) -> int:
        """The number of chunks."""
        return -(-len(self.content) // HISTOGRAM_CHUNK_BYTES)

    @property
    def name(self) -> str:
        """As topics have it."""
        return upload_name(self.sha256)

    def chunk(self, number: int) -> bytes:
        """The payload of one, from 0 on."""
        at = number * HISTOGRAM_CHUNK_BYTES
        head = ChunkHead(sha256=self.sha256, total=self.total).to_json()
        return head + b"\n" + self.content[at : at + HISTOGRAM_CHUNK_BYTES]


def upload_name(sha256: str) -> str:
    return sha256[:_NAME_DIGITS]


def read_chunk(name: str, number: str, payload: bytes) -> tuple[ChunkHead, int, bytes]:
    """Of which upload a payload on histograms/{name}/{number} is, its number there, and its piece.

    Raises MessageError: `histograms.chunk`, and as `Document.from_json`.
    """
    head, separator, piece = payload.partition(b"\n")
    if not separator or len(head) > _MOST_HEAD_BYTES:
        raise _refused("no line of JSON at its begin")
    found = ChunkHead.from_json(head)
    if name != upload_name(found.sha256) or not number.isascii() or not number.isdecimal() or len(number) > 4:
        raise _refused(f"{name[:32]!a}/{number[:32]!a} for a chunk of {found.sha256[:_NAME_DIGITS]}")
    place, last = int(number), found.total - 1
    full = len(piece) == HISTOGRAM_CHUNK_BYTES
    if place > last or not (full or (place == last and 0 < len(piece) < HISTOGRAM_CHUNK_BYTES)):
        raise _refused(f"chunk {place} of {found.total} with {len(piece)} bytes")
    return found, place, piece


def _refused(found: str) -> MessageError:
    return MessageError("histograms.chunk", found, "a chunk of an upload of histograms", "correct the sender")
