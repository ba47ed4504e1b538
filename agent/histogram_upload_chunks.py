"""An upload of histograms in pieces, as they go over MQTT: each says which upload it is of, and how many there are.

A payload is a JSON object on a line of its own, {"sha256": ..., "total": ...}, and then the piece's bytes. The hash is
of the upload; its first 16 digits name it in the topic. Shared with the fleet, as `agent.histogram_upload`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pydantic import Field

from agent.messages import Document
from agent.requests import HISTOGRAM_CHUNK_BYTES, MAX_HISTOGRAM_CHUNKS, Sha256
from agent.wire import MessageError

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
    def of(cls, content: bytes) -> Upload:
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
