"""Write uploads into files as they come, chunk by chunk; keep invalid ones apart, and count them."""

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

_MOST_QUARANTINED = 100  # files; further invalid uploads are only counted


class AnnouncedUpload(Document):
    """A board's announcement of an upload: the number of chunks, and of bytes."""

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
        """Read a command's result. Raises MessageError (`histograms.announced`) if it announces no upload."""
        try:
            return cls.model_validate(result)
        except ValidationError as error:
            expected = f"a hash, and at most {MAX_UPLOAD_BYTES} bytes"
            raise MessageError("histograms.announced", describe_errors(error), expected, "update the board") from None


@dataclass
class _IncomingUpload:
    """An upload of which some chunks are there; `have` has their numbers."""

    announced: AnnouncedUpload
    part: Path
    have: set[int] = field(default_factory=set)


class UploadInbox:
    """Receive one upload at a time of each device, of the announced size. Only the numbers of chunks are in memory.

    complete: files of the valid uploads, by device. counts: `chunks`; `refused`, chunks that were not requested or are
    invalid; `quarantined`, uploads whose bytes are not the announced ones, or are no histograms.
    """

    def __init__(self, folder: Path) -> None:
        """folder: for the files; its `quarantine` keeps the first hundred invalid uploads.

        The methods, too, raise AgentError: merge.write  the folder cannot be written
        """
        self.complete: dict[str, Path] = {}
        self.counts: Counter[str] = Counter()
        self._folder = folder
        self._incoming: dict[str, _IncomingUpload] = {}
        self._arrived: dict[str, str] = {}  # the hash of each complete upload
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def expect(self, device: str, announced: AnnouncedUpload) -> None:
        """Accept chunks of this upload from now on. Chunks that are there are kept if it is still the same upload."""
        known = self._incoming.get(device)
        if known is None or known.announced != announced:
            part = self._path(device, "part")
            with _writing(part):
                part.unlink(missing_ok=True)
            self._incoming[device] = _IncomingUpload(announced, part)

    def missing(self, device: str) -> tuple[str, list[int]] | None:
        """Return the hash and the missing chunks of the upload in progress; None if no chunk of it is there."""
        known = self._incoming.get(device)
        if known is None or not known.have:
            return None
        return known.announced.sha256, [each for each in range(known.announced.total) if each not in known.have]

    def receive_chunk(self, device: str, name: str, number: str, payload: bytes) -> bool:
        """Store a chunk, and return True if it completes a valid upload. A chunk that came already is ignored.

        Raises MessageError:
            histograms.unasked      nobody requested the chunk
            histograms.sha256       the complete upload has another hash; it is in quarantine
            histograms.unreadable   the complete upload is no histograms; it is in quarantine
            others                  as `read_chunk`
        """
        try:
            head, place, piece = read_chunk(name, number, payload)
            if head.sha256 == self._arrived.get(device):
                return False
            upload = self._incoming.get(device)
            if upload is None or (head.sha256, head.total) != (upload.announced.sha256, upload.announced.total):
                found = f"a chunk of {head.sha256[:16]}"
                raise MessageError(
                    "histograms.unasked", found, "a chunk of an upload that was requested", "correct the sender"
                )
        except MessageError:
            self.counts["refused"] += 1
            raise
        self.counts["chunks"] += 1
        if place not in upload.have:
            with _writing(upload.part), upload.part.open("r+b" if upload.have else "wb") as file:
                file.seek(place * HISTOGRAM_CHUNK_BYTES)
                file.write(piece)
            upload.have.add(place)
        if len(upload.have) < upload.announced.total:
            return False
        del self._incoming[device]
        with _writing(upload.part):
            self._check(device, upload)
            self.complete[device] = upload.part.replace(self._path(device, "upload"))
        self._arrived[device] = upload.announced.sha256
        return True

    def _check(self, device: str, upload: _IncomingUpload) -> None:
        """Raise MessageError for an invalid upload, and move it into quarantine."""
        content = upload.part.read_bytes()
        try:
            if hashlib.sha256(content).hexdigest() != upload.announced.sha256:
                found, expected = "an upload of another SHA-256", upload.announced.sha256[:16]
                raise MessageError("histograms.sha256", found, expected, "wait: the upload is requested again")
            read_facts(content)
            for _ in read_upload(content):
                pass
        except MessageError as error:
            log.warning("merge=quarantined device=%r error=%r", device, str(error))
            self.counts["quarantined"] += 1
            quarantine = self._folder / "quarantine"
            if self.counts["quarantined"] > _MOST_QUARANTINED:
                upload.part.unlink()
            else:
                quarantine.mkdir(exist_ok=True)
                upload.part.replace(quarantine / self._path(device, upload.announced.sha256[:16]).name)
            raise

    def _path(self, device: str, suffix: str) -> Path:
        """Return the path of a file of this device. A device may be called `..`, or like a folder."""
        return self._folder / f"{quote(device, safe='')}.{suffix}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Raise AgentError for errors of the disk. path: named if the error names no file, as for open ones."""
    try:
        yield
    except OSError as error:
        found = f"{error.filename or path}: {error.strerror}"
        remedy = "free some space, or choose a folder on a larger disk with --uploads"
        raise AgentError("merge.write", found, "a writable folder for the uploads of boards", remedy) from error
