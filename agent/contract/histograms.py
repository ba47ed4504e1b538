"""Encode the histograms of a calibration as bytes: from a board to the fleet, and merged ones back to boards.

The format: "tHU1", the length of the facts (4 bytes), the facts as JSON; then for each tensor the lengths of its name
and histogram (2 and 4 bytes), the name, and the bytes of `calibrate.histogram.to_bytes`. Numbers are little-endian. It
holds no frame, no time, and no name of a camera. An `Upload` sends these bytes in chunks.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field, JsonValue

from agent.contract.commands import HISTOGRAM_CHUNK_BYTES, MAX_HISTOGRAM_CHUNKS, Sha256
from agent.contract.messages import Document
from agent.contract.wire import MessageError
from calibrate.errors import CalibrationError
from calibrate.histogram import AbsHistogram, from_bytes, to_bytes

MAX_UPLOAD_BYTES = MAX_HISTOGRAM_CHUNKS * HISTOGRAM_CHUNK_BYTES  # 16 MiB; a thousand tensors take about two
MAX_COUNTS_BYTES = 256 << 20  # all histograms together: eight thousand tensors of 4096 bins
MAX_FACTS_BYTES = 4 << 20
_MAGIC = b"tHU1"
_LENGTH = struct.Struct("<I")
_HEAD = len(_MAGIC) + _LENGTH.size
_NAME_DIGITS = 16  # digits of an upload's hash in its topics
_MOST_HEAD_BYTES = 512  # longest head of a chunk
_RECORD = struct.Struct("<HI")  # lengths of the tensor's name and of its histogram

Digest = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-f]+$")]


class Facts(Document):
    """The origin of histograms. Histograms that differ in `model`, `observed` or `preprocessing` do not merge.

    The facts are part of the upload, because the names of thousands of tensors do not fit a message.

    Args:
        model: Hash of the FP32 master graph.
        observed: Hash of the divisions by which a plan's repairs have changed the contents of its tensors.
        method: Method that chooses the thresholds.
        frames: Number of frames counted.
        preprocessing: How frames become the model's input.
        shared: Groups of tensors that get one amax.
        merged: Present if the histograms are merged: from how many boards.
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
    """Encode histograms; equal facts and histograms give equal bytes.

    Args:
        facts: Their origin.
        histograms: By the name of the tensor.

    >>> from calibrate.histogram import abs_histogram
    >>> import numpy as np
    >>> facts = Facts(model="0" * 64, observed="0" * 64, method="entropy", frames=1)
    >>> content = write_upload(facts, {"conv1": abs_histogram(np.float32([0.5, 3.0]))})
    >>> read_facts(content) == facts, [(name, histogram.total) for name, histogram in read_upload(content)]
    (True, [('conv1', 2)])
    """
    head = facts.to_json()
    parts = [_MAGIC, _LENGTH.pack(len(head)), head]
    for tensor, histogram in histograms.items():
        name, content = tensor.encode(), to_bytes(histogram)
        parts += (_RECORD.pack(len(name), len(content)), name, content)
    return b"".join(parts)


def read_facts(content: bytes) -> Facts:
    """Decode the facts that `write_upload` wrote, without the histograms.

    Raises MessageError:
        histograms.unreadable  other bytes than of an upload, or truncated ones
        message.*              facts that are no document, as `Document.from_json`
    """
    return Facts.from_json(content[_HEAD : _head_end(content)])


def read_upload(content: bytes) -> Iterator[tuple[str, AbsHistogram]]:
    """Decode the histograms by tensor, one after the other: together they take many times as much memory.

    Raises MessageError (`histograms.unreadable`), also for a damaged histogram, and for a name that comes twice.
    """
    at, names, expanded_bytes = _head_end(content), set[str](), 0
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
        if expanded_bytes > MAX_COUNTS_BYTES:  # empty bins take no bytes in an upload
            raise _unreadable(f"counts of more than {MAX_COUNTS_BYTES} bytes")
        names.add(name)
        yield name, histogram
    if not names:
        raise _unreadable("no tensor")


def _head_end(content: bytes) -> int:
    """Return where the facts end and the tensors begin. Raises MessageError."""
    if not content.startswith(_MAGIC) or len(content) < _HEAD:
        raise _unreadable(f"bytes that begin with {content[: len(_MAGIC)]!r}")
    end = _HEAD + int(_LENGTH.unpack_from(content, len(_MAGIC))[0])
    if end > len(content):
        raise _unreadable(f"{len(content)} bytes")
    return end


def _unreadable(found: str) -> MessageError:
    return MessageError("histograms.unreadable", found[:200], "histograms as tared writes them", "have them sent again")


class ChunkHead(Document):
    """The first line of a chunk; the bytes of the chunk follow it.

    Args:
        sha256: SHA-256 of the whole upload, in hex.
        total: Number of its chunks.
    """

    sha256: Sha256
    total: int = Field(ge=1, le=MAX_HISTOGRAM_CHUNKS)


@dataclass(frozen=True)
class Upload:
    """Hold all bytes that are sent; their hash identifies them.

    Args:
        content: The bytes of `write_upload`.
    """

    content: bytes

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the content, in hex."""
        return hashlib.sha256(self.content).hexdigest()

    @property
    def total(self) -> int:
        """The number of chunks."""
        return -(-len(self.content) // HISTOGRAM_CHUNK_BYTES)

    @property
    def name(self) -> str:
        """The start of the hash, which is part of the topics."""
        return upload_name(self.sha256)

    def chunk(self, number: int) -> bytes:
        """Return the payload of a chunk: a line of JSON, then bytes of the content.

        Args:
            number: From 0 to `total` - 1.
        """
        at = number * HISTOGRAM_CHUNK_BYTES
        head = ChunkHead(sha256=self.sha256, total=self.total).to_json()
        return head + b"\n" + self.content[at : at + HISTOGRAM_CHUNK_BYTES]


def upload_name(sha256: str) -> str:
    """Return the start of an upload's SHA-256, which is part of its topics."""
    return sha256[:_NAME_DIGITS]


def read_chunk(name: str, number: str, payload: bytes) -> tuple[ChunkHead, int, bytes]:
    """Parse a payload on histograms/{name}/{number}.

    Args:
        name: A level of the topic: the start of the upload's hash.
        number: A level of the topic: the number of the chunk, in decimal.
        payload: The message.

    Returns:
        The head of its upload, its number, and its bytes.

    Raises MessageError:
        histograms.chunk  a payload that is no chunk, or not the one that the topic names
        message.*         a head that is no document, as `Document.from_json`
    """
    head, separator, piece = payload.partition(b"\n")
    if not separator or len(head) > _MOST_HEAD_BYTES:
        raise _refused("no line of JSON at its begin")
    chunk_head = ChunkHead.from_json(head)
    if name != upload_name(chunk_head.sha256) or not number.isascii() or not number.isdecimal() or len(number) > 4:
        raise _refused(f"{name[:32]!a}/{number[:32]!a} for a chunk of {chunk_head.sha256[:_NAME_DIGITS]}")
    place, last = int(number), chunk_head.total - 1
    full = len(piece) == HISTOGRAM_CHUNK_BYTES
    if place > last or not (full or (place == last and 0 < len(piece) < HISTOGRAM_CHUNK_BYTES)):
        raise _refused(f"chunk {place} of {chunk_head.total} with {len(piece)} bytes")
    return chunk_head, place, piece


def _refused(found: str) -> MessageError:
    return MessageError("histograms.chunk", found, "a chunk of an upload of histograms", "correct the sender")
