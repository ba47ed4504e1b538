"""Bring a file to the board, from a server or in chunks over MQTT, and verify it.

`PartialFile` is the file on the disk, as far as it has come. `HttpDownload` fills it from a server, `ChunkReceiver`
from the messages of an operator; both resume where an earlier transfer ended. deliveries.py decides which files may
come, and what becomes of them.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from agent.commands.dispatcher import CommandProgress
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.contract.commands import MODEL_CHUNK_BYTES, MODEL_CHUNKS_REQUESTED, RECEIVING, FileArgs

TRANSFER_ERRORS = (AgentError, OSError, HTTPException, ValueError)  # all that a transfer may raise

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30.0  # for each answer of a server
_SILENCE_S = 120.0  # without a chunk: the sender is given up
_ASK_AGAIN_S = 2.0
_PERIOD_S = 60.0  # in which a server has to send _LEAST_BYTES, or all that is left
_LEAST_BYTES = 256 << 10
_MOST_S = 6 * 3600.0  # for the whole file


class PartialFile:
    """The file at `part` that is being received.

    One thread may write it until `close`, which waits for no server. Nothing is written after that.
    """

    def __init__(self, part: Path, args: FileArgs, progress: CommandProgress) -> None:
        """Raises OSError."""
        self.part = part
        self.args = args
        self.progress = progress
        self.size = part.stat().st_size if part.exists() else 0
        self.is_pieced = False  # put together from several answers, one of which may have been forged
        self._lock = threading.Lock()
        self._closed = False
        if self.size > args.size:
            self._truncate(0)

    def append(self, content: bytes) -> None:
        """Raises OSError, and AgentError if the file would become too long or is closed."""
        with self._lock:
            self._check_open()
            if self.size + len(content) > self.args.size:
                self._truncate(0)
                raise self.error(f"more than {self.args.size} bytes", "the file that was named")
            with self.part.open("ab") as file:
                file.write(content)
            self.size += len(content)

    def truncate(self, size: int) -> None:
        """Raises OSError, AgentError."""
        with self._lock:
            self._check_open()
            self._truncate(size)

    def close(self) -> None:
        with self._lock:
            self._closed = True

    def verify(self) -> bool:
        """Return whether the content has the requested SHA-256; if not, empty the file. Raises OSError, AgentError."""
        if self.size < self.args.size:
            raise self.error(f"{self.size} of {self.args.size} bytes", "the whole file")
        digest = hashlib.sha256()
        with self.part.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                self._check_open()
        if digest.hexdigest() == self.args.sha256:
            return True
        self.truncate(0)
        return False

    def error(self, found: str, expected: str) -> AgentError:
        return transfer_error(self.args.what, found, expected)

    def as_agent_error(self, error: Exception) -> AgentError:
        """Return the error for the sender that stands for what a disk or a server raised."""
        if isinstance(error, AgentError):
            return error
        return self.error(f"{type(error).__name__}: {error}", "a server that answers, and a folder with room")

    def _truncate(self, size: int) -> None:
        with self.part.open("ab") as file:
            file.truncate(size)
        self.size = size

    def _check_open(self) -> None:
        if self._closed:
            raise self.error("a delivery that was ended", "a delivery under way")


class HttpDownload:
    """Download one file from a server. `run` is for a thread of its own, `tick` for the supervisor's."""

    def __init__(self, partial: PartialFile, on_percent: Callable[[int], None], clock: Clock = SYSTEM_CLOCK) -> None:
        """on_percent: receives the percentage of the file that is there, about every 10 %; called in `run`'s thread."""
        self._partial = partial
        self._on_percent = on_percent
        self._clock = clock
        self._started_s = self._period_s = self._clock.monotonic_s()
        self._received = self._received_before = 0  # bytes, by now and by the start of the period

    def run(self, url: str) -> None:
        """Fetch the missing rest, or all of it if the server does not support ranges.

        Raises OSError, AgentError, HTTPException, ValueError.
        """
        partial = self._partial
        start, reported = partial.size, -1
        partial.is_pieced = bool(start)
        if start == partial.args.size:
            return
        headers = {"Range": f"bytes={start}-"} if start else {}
        with _opener().open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
            if not start or answer.status != 206:
                partial.truncate(0)
            while block := answer.read1(_BLOCK_BYTES):
                partial.append(block)
                self._received += len(block)
                percent = 100 * partial.size // partial.args.size
                if percent // 10 > reported // 10:
                    reported = percent
                    self._on_percent(percent)

    def tick(self) -> None:
        """Raises AgentError for a server that is too slow: it must not occupy the board for ever."""
        now_s, size, expected = self._clock.monotonic_s(), self._partial.size, self._partial.args.size
        if now_s - self._started_s > _MOST_S:
            raise self._partial.error(f"{size} bytes in {_MOST_S / 3600:.0f} h", f"all {expected}")
        if now_s - self._period_s > _PERIOD_S:
            received = self._received - self._received_before
            if received < _LEAST_BYTES and size < expected:
                raise self._partial.error(f"{received} bytes in {_PERIOD_S:.0f} s", f"at least {_LEAST_BYTES}")
            self._period_s, self._received_before = now_s, self._received_before + received


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for HTTP and HTTPS alone: a redirect must not lead to a file of this board."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener


class ChunkReceiver:
    """Receive one file in chunks, in their order. The next chunk is requested again while none arrives."""

    def __init__(self, partial: PartialFile, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises OSError, AgentError."""
        self._partial = partial
        self._clock = clock
        self._started_s = self._received_s = self._requested_s = self._clock.monotonic_s()
        self._next = partial.size // MODEL_CHUNK_BYTES
        self._requested = 0  # the chunk that was requested last
        partial.is_pieced = True
        if 0 < partial.size < partial.args.size:
            partial.truncate(self._next * MODEL_CHUNK_BYTES)
        if not self.is_complete:
            self._request()

    @property
    def is_complete(self) -> bool:
        return self._partial.size >= self._partial.args.size

    def receive(self, topic: str, payload: bytes) -> None:
        """Append the chunk if it is the next one; ignore all others. Raises OSError, AgentError."""
        left = self._partial.args.size - self._next * MODEL_CHUNK_BYTES
        is_next = topic.endswith(f"/model/{self._partial.args.sha256}/{self._next}")
        if self.is_complete or not is_next or len(payload) != min(left, MODEL_CHUNK_BYTES):
            return
        self._partial.append(payload)
        self._next += 1
        self._received_s = self._clock.monotonic_s()
        if self._next - self._requested >= MODEL_CHUNKS_REQUESTED:
            self._request()

    def tick(self) -> None:
        """Raises AgentError for a sender that is silent, or has taken too long."""
        now_s = self._clock.monotonic_s()
        if now_s - self._received_s > _SILENCE_S:
            raise self._partial.error(f"no chunk for {_SILENCE_S:.0f} s", f"chunk {self._next}")
        if now_s - self._started_s > _MOST_S:
            raise self._partial.error(f"{self._next} chunks in {_MOST_S / 3600:.0f} h", "all of them")
        if now_s - max(self._requested_s, self._received_s) > _ASK_AGAIN_S:
            self._request()

    def _request(self) -> None:
        self._requested_s, self._requested = self._clock.monotonic_s(), self._next
        percent = 100.0 * self._partial.size / self._partial.args.size
        self._partial.progress.update(RECEIVING, round(percent, 1), {"next": self._next})


def transfer_error(what: str, found: str, expected: str) -> AgentError:
    """what: as in FileArgs; it is part of the error's code."""
    remedy = "send the command again under a new id: the transfer continues where it ended"
    return AgentError(f"command.{what}", found, expected, remedy)


def check_room(folder: Path, more_bytes: int, reserve_bytes: int, what: str) -> None:
    """Check that `more_bytes` leave the reserve free. Raises OSError, AgentError. what: as in FileArgs."""
    free = shutil.disk_usage(folder).free
    if free - more_bytes < reserve_bytes:
        found = f"{free} bytes free in {folder}"
        expected = f"{more_bytes} bytes more than store.reserve_bytes, {reserve_bytes}"
        raise AgentError(f"command.{what}", found, expected, "free some space, then send the command again")
