"""A file as it comes: fetched from a server, or received in chunks, and verified."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Protocol

from agent.commands.dispatcher import CANCELLED, CommandProgress
from agent.common.errors import AgentError, CommandError
from agent.common.main_thread import RunInMainThread
from agent.contract.commands import MODEL_CHUNK_BYTES, MODEL_CHUNKS_ASKED, RECEIVING, FileArgs
from engines.store.files import remove

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30.0  # of a server, for each answer
_SILENCE_S = 120.0  # of a sender of chunks
_ASK_AGAIN_S = 2.0
_PERIOD_S = 60.0  # in which a server has to send _LEAST_BYTES, or all that is left
_LEAST_BYTES = 256 << 10
_MOST_S = 6 * 3600.0  # for all of it


class PartialFile:
    """The file that is being received, what is there of it at `part`. A thread may write it until `close`, which waits
    for no server: after it nothing is written any more."""

    def __init__(self, part: Path, args: FileArgs, report: CommandProgress) -> None:
        """Raises OSError."""
        self.part = part
        self.args = args
        self.report = report
        self.size = part.stat().st_size if part.exists() else 0
        self.pieced = False  # put together from several answers, of which one may have been forged
        self._lock = threading.Lock()
        self._closed = False
        if self.size > args.size:
            self._truncate(0)

    def append(self, content: bytes) -> None:
        """Raises OSError, and AgentError where it would be too long, or is not wanted any more."""
        with self._lock:
            self._check_open()
            if self.size + len(content) > self.args.size:
                self._truncate(0)
                raise self.refused(f"more than {self.args.size} bytes", "the file that was named")
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
        """Whether it is the file that was named; nothing of another one is kept. Raises OSError, AgentError."""
        if self.size < self.args.size:
            raise self.refused(f"{self.size} of {self.args.size} bytes", "the whole file")
        digest = hashlib.sha256()
        with self.part.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                self._check_open()
        if digest.hexdigest() == self.args.sha256:
            return True
        self.truncate(0)
        return False

    def refused(self, found: str, expected: str) -> AgentError:
        """What to tell its sender."""
        return refused(self.args.what, found, expected)

    def refusal_of(self, error: Exception) -> AgentError:
        """The same of what a disk or a server raises."""
        if isinstance(error, AgentError):
            return error
        return self.refused(f"{type(error).__name__}: {error}", "a file that can be fetched and written")

    def _truncate(self, size: int) -> None:
        with self.part.open("ab") as file:
            file.truncate(size)
        self.size = size

    def _check_open(self) -> None:
        if self._closed:
            raise self.refused("a delivery that was ended", "one that goes on")


class HttpDownload:
    """From a server, in a thread of its own. tell: takes the percent that are there."""

    def __init__(self, incoming: PartialFile, tell: Callable[[int], None]) -> None:
        self._incoming = incoming
        self._tell = tell
        self._begun_s = self._period_s = time.monotonic()
        self._received = self._before = 0  # bytes, by now and by the begin of the period

    def bring(self, url: str) -> None:
        """What is still missing, or all of it where the server cannot say it from there on. Raises OSError, AgentError,
        HTTPException, ValueError."""
        incoming = self._incoming
        begun, told = incoming.size, -1
        incoming.pieced = bool(begun)
        if begun == incoming.args.size:
            return
        headers = {"Range": f"bytes={begun}-"} if begun else {}
        with _opener().open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
            if not begun or answer.status != 206:
                incoming.truncate(0)
            while block := answer.read1(_BLOCK_BYTES):
                incoming.append(block)
                self._received += len(block)
                percent = 100 * incoming.size // incoming.args.size
                if percent // 10 > told // 10:
                    told = percent
                    self._tell(percent)

    def tick(self) -> None:
        """Raises AgentError for a server that is too slow: it must not occupy the board for ever."""
        now_s, size = time.monotonic(), self._incoming.size
        if now_s - self._begun_s > _MOST_S:
            raise self._incoming.refused(f"{size} bytes in {_MOST_S / 3600:.0f} h", f"all {self._incoming.args.size}")
        if now_s - self._period_s > _PERIOD_S:
            come = self._received - self._before
            if come < _LEAST_BYTES and size < self._incoming.args.size:
                raise self._incoming.refused(f"{come} bytes in {_PERIOD_S:.0f} s", f"at least {_LEAST_BYTES}")
            self._period_s, self._before = now_s, self._before + come


class ChunkReceiver:
    """In their order; what is asked for next is told again while nothing comes."""

    def __init__(self, incoming: PartialFile) -> None:
        """Raises OSError, AgentError."""
        self._incoming = incoming
        self._begun_s = self._heard_s = self._asked_s = time.monotonic()
        self._next = incoming.size // MODEL_CHUNK_BYTES
        self._asked = 0  # the chunk that was asked for last
        incoming.pieced = True
        if 0 < incoming.size < incoming.args.size:
            incoming.truncate(self._next * MODEL_CHUNK_BYTES)
        if not self.complete:
            self._ask()

    @property
    def complete(self) -> bool:
        return self._incoming.size >= self._incoming.args.size

    def take(self, topic: str, payload: bytes) -> None:
        """Raises OSError, AgentError."""
        wanted = f"model/{self._incoming.args.sha256}/{self._next}"
        left = self._incoming.args.size - self._next * MODEL_CHUNK_BYTES
        if self.complete or not topic.endswith(f"/{wanted}") or len(payload) != min(left, MODEL_CHUNK_BYTES):
            return
        self._incoming.append(payload)
        self._next += 1
        self._heard_s = time.monotonic()
        if self._next - self._asked >= MODEL_CHUNKS_ASKED:
            self._ask()

    def tick(self) -> None:
        """Raises AgentError for a sender who is silent, or has taken too long."""
        now_s = time.monotonic()
        if now_s - self._heard_s > _SILENCE_S:
            raise self._incoming.refused(f"no chunk for {_SILENCE_S:.0f} s", f"chunk {self._next}")
        if now_s - self._begun_s > _MOST_S:
            raise self._incoming.refused(f"{self._next} chunks in {_MOST_S / 3600:.0f} h", "all of them")
        if now_s - max(self._asked_s, self._heard_s) > _ASK_AGAIN_S:
            self._ask()

    def _ask(self) -> None:
        self._asked_s, self._asked = time.monotonic(), self._next
        percent = 100.0 * self._incoming.size / self._incoming.args.size
        self._incoming.report.progress(RECEIVING, round(percent, 1), {"next": self._next})


def refused(what: str, found: str, expected: str) -> AgentError:
    """what: of FileArgs."""
    return AgentError(f"command.{what}", found, expected, "send it again under a new id: it goes on where it ended")


TROUBLE = (AgentError, OSError, HTTPException, ValueError)  # what may come up while a file is received


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and HTTPS alone: a redirect must not lead to a file of this board."""
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


def check_room(folder: Path, more_bytes: int, reserve_bytes: int, what: str) -> None:
    """Raises OSError, and AgentError where so much more would leave less than the reserve. what: of FileArgs."""
    free = shutil.disk_usage(folder).free
    if free - more_bytes < reserve_bytes:
        expected = f"{more_bytes} bytes more than store.reserve_bytes, {reserve_bytes}"
        raise AgentError(f"command.{what}", f"{free} bytes free in {folder}", expected, "free some, then send it again")


log = logging.getLogger(__package__)


class Staged(Protocol):
    """What is made of a file once it has come."""

    def stage(self, reserve_bytes: int) -> None:
        """In a thread of its own. Raises AgentError for what cannot be used, or has no room but the reserve."""

    def discard(self) -> None:
        """The delivery has ended meanwhile."""


class Deliverer(Protocol):
    """Takes files of a kind; called in the supervisor's thread."""

    def receive(self, topic: str, payload: bytes) -> None:
        """A chunk, as it came on model/{sha256}/{n}; what nobody waits for is ignored."""

    def tick(self) -> None: ...

    def end(self, reason: str) -> bool:
        """End what is on its way; False where nothing is, or a job has it already."""


class Deliverers:
    """Those of all kinds, as one."""

    def __init__(self, each: Sequence[Deliverer]) -> None:
        self._each = each

    def receive(self, topic: str, payload: bytes) -> None:
        for one in self._each:
            one.receive(topic, payload)

    def tick(self) -> None:
        for one in self._each:
            one.tick()

    def end(self, reason: str) -> bool:
        ended = [one.end(reason) for one in self._each]
        return any(ended)


class FileReceiver:
    """Of one kind, at most one file at a time; what has come of it stays in `folder`, and is gone on with when the same
    is sent again; another's is removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._delivery: Transfer | None = None

    def check_idle(self) -> None:
        """Raises CommandError."""
        if self._delivery is not None and not self._delivery.incoming.report.latest.final:
            raise CommandError("command.busy", "a file on its way", "none", "wait for its end, then send it again")

    def part(self, args: FileArgs, reserve_bytes: int) -> Path:
        """Where the file is put together, in a folder that has room for it. Raises OSError, AgentError."""
        part = self._folder / f"{args.sha256}.part"
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in list(self._folder.iterdir()):
            gone = not os.path.lexists(other)  # with the one before: the half of a removal that was cut short
            if not gone and (other != part or other.is_symlink() or not other.is_file()):
                remove(other)
        missing = args.size - (part.stat().st_size if part.exists() else 0)
        check_room(self._folder, missing, reserve_bytes, args.what)
        return part

    def receive(self, topic: str, payload: bytes) -> None:
        if self._delivery is not None:
            self._delivery.take(topic, payload)

    def tick(self) -> None:
        if self._delivery is not None:
            self._delivery.tick()

    def end(self, reason: str) -> bool:
        if self._delivery is None or self._delivery.over:
            return False
        remedy = "send it again under a new id: it goes on where it ended"
        self._delivery.fail(AgentError(CANCELLED, reason, "a delivery that is left to end", remedy))
        return True


class Transfer:
    """One file, until it has been handed over or has failed. What was put together from pieces, of which somebody may
    have forged one, and is another file then, is begun anew once.

    hand_over: called in the supervisor's thread with what was staged.
    """

    def __init__(
        self,
        incoming: PartialFile,
        staged: Staged,
        reserve_bytes: int,
        post: RunInMainThread,
        hand_over: Callable[[], None],
    ) -> None:
        """Raises OSError, AgentError."""
        self.incoming = incoming
        self.over = False
        self._staged = staged
        self._reserve_bytes = reserve_bytes
        self._post = post
        self._hand_over = hand_over
        self._anew = False
        self._source: HttpDownload | ChunkReceiver | None = None  # None: it is being verified
        self._begin()

    def take(self, topic: str, payload: bytes) -> None:
        if isinstance(self._source, ChunkReceiver):
            try:
                self._source.take(topic, payload)
                self._look()
            except TROUBLE as error:
                self.fail(self.incoming.refusal_of(error))

    def tick(self) -> None:
        if self._source is not None:
            try:
                self._source.tick()
            except AgentError as error:
                self.fail(error)

    def fail(self, error: AgentError) -> None:
        """Also while a server is still being waited for, in a thread that nobody hears any more."""
        if not self.over:
            self.over, self._source = True, None
            self.incoming.close()
            self.incoming.report.fail(error)

    def _begin(self) -> None:
        """Raises OSError, AgentError."""
        url = self.incoming.args.url
        if url is None:
            self._source = ChunkReceiver(self.incoming)
            self._look()
            return
        self._source = fetch = HttpDownload(self.incoming, self._tell)
        self._work(lambda: fetch.bring(url), self._verify)

    def _look(self) -> None:
        if isinstance(self._source, ChunkReceiver) and self._source.complete:
            self._verify()

    def _verify(self) -> None:
        """In a thread of its own: hashing a large file, or copying it to another disk, takes long."""
        self._source = None
        verified: list[bool] = []

        def verify() -> None:
            verified.append(self.incoming.verify())
            if verified[0]:
                self._staged.stage(self._reserve_bytes)

        self._work(verify, lambda: self._verified(verified[0]))

    def _verified(self, right: bool) -> None:
        """Raises OSError, AgentError."""
        if right:
            self._hand_over()
            self.over = True
        elif self.incoming.pieced and not self._anew:
            log.warning("delivery=%s state=another file, begun anew", self.incoming.args.sha256[:12])
            self._anew = True
            self._begin()
        else:
            raise self.incoming.refused("a file of another SHA-256", self.incoming.args.sha256[:12])

    def _work(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """then: in the supervisor's thread, unless the delivery has ended meanwhile."""

        def run() -> None:
            try:
                work()
            except TROUBLE as error:
                refusal = self.incoming.refusal_of(error)
                self._post(lambda: self.fail(refusal))
            else:
                self._post(lambda: self._goes_on(then))

        threading.Thread(target=run, name="delivery", daemon=True).start()

    def _goes_on(self, then: Callable[[], None]) -> None:
        if self.over:
            self._staged.discard()
            return
        try:
            then()
        except TROUBLE as error:
            self.fail(self.incoming.refusal_of(error))

    def _tell(self, percent: int) -> None:
        self._post(lambda: self.incoming.report.progress("FETCHING", percent))
