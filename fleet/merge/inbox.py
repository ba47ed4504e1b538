"""Uploads as they come, chunk by chunk, into files; what is no upload is kept apart, and counted."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from pydantic import Field, JsonValue, ValidationError, model_validator

from agent.common.errors import AgentError
from agent.contract.commands import HISTOGRAM_CHUNK_BYTES, Sha256
from agent.contract.histograms import MAX_UPLOAD_BYTES, read_chunk, read_facts, read_upload
from agent.contract.messages import Document
from agent.contract.wire import MessageError, describe_errors

log = logging.getLogger(__package__)

_MOST_QUARANTINED = 100  # files; what more boards send wrong is counted only


class AnnouncedUpload(Document):
    """What a board has said that it sends: chunks in all, and bytes."""

    sha256: Sha256
    total: int
    size: int = Field(alias="bytes", ge=1, le=MAX_UPLOAD_BYTES)

    @model_validator(mode="after")
    def _has_the_chunks_of_its_size(self) -> AnnouncedUpload:
        if self.total != -(-self.size // HISTOGRAM_CHUNK_BYTES):
            raise ValueError("as many chunks as the bytes fill")
        return self

    @classmethod
    def from_result(cls, result: Mapping[str, JsonValue]) -> AnnouncedUpload:
        """Of a command's result. Raises MessageError (`histograms.announced`) for what no board would say."""
        try:
            return cls.model_validate(result)
        except ValidationError as error:
            expected = f"a hash, and at most {MAX_UPLOAD_BYTES} bytes"
            raise MessageError("histograms.announced", describe_errors(error), expected, "update the board") from None


@dataclass
class _IncomingUpload:
    """An upload of which some chunks are there."""

    announced: AnnouncedUpload
    part: Path
    have: set[int] = field(default_factory=set)


class UploadInbox:
    """Of each device one upload at a time, of the size that it has announced; in memory are the numbers of its chunks.

    `complete` has the files of those that are complete and can be read, by device. `counts`: chunks, refused (which were
    not asked for, or are none), quarantined (uploads whose bytes are not what was announced, or no histograms).
    folder: of the files; `quarantine` in it keeps the first hundred of those that were refused.
    """

    def __init__(self, folder: Path) -> None:
        """Raises AgentError (`merge.write`) for a folder that cannot be written in, as the methods do."""
        self.complete: dict[str, Path] = {}
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._coming: dict[str, _IncomingUpload] = {}
        self._arrived: dict[str, str] = {}  # the hash of each that is whole
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def expect(self, device: str, announced: AnnouncedUpload) -> None:
        """From now on chunks of this upload are taken; those that are there are kept where it is still the same."""
        known = self._coming.get(device)
        if known is None or known.announced != announced:
            part = self._path(device, "part")
            with _writing(part):
                part.unlink(missing_ok=True)
            self._coming[device] = _IncomingUpload(announced, part)

    def missing(self, device: str) -> tuple[str, list[int]] | None:
        """The hash of the upload that is coming, and what is missing of it; None where nothing is known of any."""
        known = self._coming.get(device)
        if known is None or not known.have:
            return None
        return known.announced.sha256, [each for each in range(known.announced.total) if each not in known.have]

    def receive_chunk(self, device: str, name: str, number: str, payload: bytes) -> bool:
        """A chunk as it came; whether the upload is complete with it. One that comes again is passed over.

        Raises MessageError for a chunk that is none, or that nobody waits for, and where the upload is none: it is in
        quarantine then, and may be asked for again.
        """
        try:
            head, place, piece = read_chunk(name, number, payload)
            if head.sha256 == self._arrived.get(device):
                return False
            coming = self._coming.get(device)
            if coming is None or (head.sha256, head.total) != (coming.announced.sha256, coming.announced.total):
                found = f"a chunk of {head.sha256[:16]}"
                raise MessageError("histograms.unasked", found, "one that was asked for", "correct the sender")
        except MessageError:
            self.counts["refused"] += 1
            raise
        self.counts["chunks"] += 1
        if place not in coming.have:
            with _writing(coming.part), coming.part.open("r+b" if coming.have else "wb") as file:
                file.seek(place * HISTOGRAM_CHUNK_BYTES)
                file.write(piece)
            coming.have.add(place)
        if len(coming.have) < coming.announced.total:
            return False
        del self._coming[device]
        with _writing(coming.part):
            self._check(device, coming)
            self.complete[device] = coming.part.replace(self._path(device, "upload"))
        self._arrived[device] = coming.announced.sha256
        return True

    def _check(self, device: str, coming: _IncomingUpload) -> None:
        """Raises MessageError for an upload that is none."""
        content = coming.part.read_bytes()
        try:
            if hashlib.sha256(content).hexdigest() != coming.announced.sha256:
                found, expected = "an upload of another SHA-256", coming.announced.sha256[:16]
                raise MessageError("histograms.sha256", found, expected, "it is asked for again")
            read_facts(content)
            for _ in read_upload(content):
                pass
        except MessageError as error:
            log.warning("merge=quarantined device=%r error=%r", device, str(error))
            self.counts["quarantined"] += 1
            quarantine = self._folder / "quarantine"
            if self.counts["quarantined"] > _MOST_QUARANTINED:
                coming.part.unlink()
            else:
                quarantine.mkdir(exist_ok=True)
                coming.part.replace(quarantine / self._path(device, coming.announced.sha256[:16]).name)
            raise

    def _path(self, device: str, suffix: str) -> Path:
        """A device may be called `..`, or as a folder is."""
        return self._folder / f"{quote(device, safe='')}.{suffix}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raises AgentError for what the disk says; of a file that is open it says no name."""
    try:
        yield
    except OSError as error:
        found, remedy = (
            f"{error.filename or path}: {error.strerror}",
            "make room, or choose a folder on a larger disk with --uploads",
        )
        raise AgentError("merge.write", found, "a folder for what boards send", remedy) from error
