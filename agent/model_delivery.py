"""A model on its way to the board: fetched or received, verified, and put where the daemon looks for a new one."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path

from agent.commands import Report
from agent.errors import AgentError, CommandError
from agent.releases import Releases
from agent.requests import MODEL_CHUNK_BYTES, MODEL_CHUNKS_ASKED, RECEIVING, ModelArgs

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_TIMEOUT_S = 30.0  # of a server, for each answer
_SILENCE_S = 120.0  # of a sender of chunks
_ASK_AGAIN_S = 2.0

Post = Callable[[Callable[[], None]], None]  # runs a function in the supervisor's thread


class ModelDelivery:
    """At most one at a time; called in the supervisor's thread. What has come of a file stays in `folder`, and is gone
    on with when the same model is sent again; another model's is removed.

    destination: the file that `ModelWatch` watches. watched: whether one does. reserve_bytes: what must stay free.
    """

    def __init__(
        self, folder: Path, destination: Path, watched: bool, reserve_bytes: int, releases: Releases, post: Post
    ) -> None:
        self._folder = folder
        self._destination = destination
        self._watched = watched
        self._reserve_bytes = reserve_bytes
        self._releases = releases
        self._post = post
        self._receiving: _Receiving | None = None
        self._busy = False

    def begin(self, args: ModelArgs, report: Report, now: float) -> None:
        """Have this model brought here; now: Unix time in seconds. Raises CommandError, AgentError for one that may not
        come, or cannot."""
        if self._busy:
            raise CommandError("command.busy", "a model on its way", "none", "wait for its end, then send it again")
        if not self._watched:
            found = "a source that is no live camera, or a model that was not read from a file"
            raise CommandError("command.model", found, "a daemon that takes up a new model", "restart it instead")
        release = self._releases.check(args, now)
        part = self._folder / f"{args.sha256}.part"
        try:
            self._make_room(part, args.size)
        except OSError as error:
            raise _refused(f"{self._folder}: {error.strerror}", "a writable state directory") from error
        delivery = _Delivery(part, args, report, self._post)

        def finish() -> None:
            """Runs in a thread of its own: hashing a large file takes long."""
            delivery.verify()
            if release is not None:
                self._releases.take_up(*release)
            _install(part, self._destination)

        self._busy = True
        if args.url is not None:
            delivery.run(lambda: delivery.fetch(args.url or ""), finish, self._ended)
        else:
            self._receiving = _Receiving(delivery, lambda: delivery.run(lambda: None, finish, self._ended), self._ended)

    def receive(self, topic: str, payload: bytes) -> None:
        """A chunk, as it came on model/{sha256}/{n}; what nobody waits for is ignored."""
        if self._receiving is not None:
            self._receiving.take(topic, payload)

    def tick(self) -> None:
        if self._receiving is not None:
            self._receiving.tick()

    def _ended(self) -> None:
        self._busy, self._receiving = False, None

    def _make_room(self, part: Path, size: int) -> None:
        """Raises OSError, AgentError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in self._folder.iterdir():
            if other != part:
                other.unlink()
        missing = size - (part.stat().st_size if part.exists() else 0)
        free = shutil.disk_usage(self._folder).free
        if free - missing < self._reserve_bytes:
            expected = f"{missing} bytes more than store.reserve_bytes, {self._reserve_bytes}"
            raise _refused(f"{free} bytes free in {self._folder}", expected)


class _Delivery:
    """One file, from its first byte to its place."""

    def __init__(self, part: Path, args: ModelArgs, report: Report, post: Post) -> None:
        self.part = part
        self.args = args
        self.report = report
        self._post = post

    @property
    def size(self) -> int:
        """How much of it is there."""
        return self.part.stat().st_size if self.part.exists() else 0

    def run(self, bring: Callable[[], None], finish: Callable[[], None], ended: Callable[[], None]) -> None:
        """In a thread; its end is told in the supervisor's."""

        def work() -> None:
            error: AgentError | None = None
            try:
                bring()
                finish()
            except AgentError as refusal:
                error = refusal
            except (OSError, HTTPException, ValueError) as refusal:
                error = _refused(f"{type(refusal).__name__}: {refusal}", "a file that can be fetched and written")
            self._post(lambda: self._end(error, ended))

        threading.Thread(target=work, name="model-delivery", daemon=True).start()

    def fetch(self, url: str) -> None:
        """What is still missing, or all of it where the server cannot say it from there on. Raises OSError, AgentError,
        HTTPException, ValueError."""
        begun = self.size
        if begun == self.args.size:
            return
        headers = {"Range": f"bytes={begun}-"} if begun else {}
        with _opener().open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S) as answer:
            goes_on = begun and answer.status == 206
            with self.part.open("ab" if goes_on else "wb") as file:
                size, told = begun if goes_on else 0, -1
                while block := answer.read(_BLOCK_BYTES):
                    size += len(block)
                    if size > self.args.size:
                        file.truncate(0)
                        raise _refused(f"more than {self.args.size} bytes", "the file that was named")
                    file.write(block)
                    told = self._tell(size, told)

    def verify(self) -> None:
        """Raises OSError, AgentError for what is not the file that was named; nothing of it is kept then."""
        digest, size = hashlib.sha256(), self.size
        if size < self.args.size:
            raise _refused(f"{size} of {self.args.size} bytes", "the whole file")
        with self.part.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        if size != self.args.size or digest.hexdigest() != self.args.sha256:
            self.part.unlink()
            raise _refused(f"a file of SHA-256 {digest.hexdigest()[:12]}", self.args.sha256[:12])

    def _tell(self, size: int, told: int) -> int:
        percent = 100 * size // self.args.size
        if percent // 10 > told // 10:
            self._post(lambda: self.report.progress("FETCHING", percent))
            return percent
        return told

    def _end(self, error: AgentError | None, ended: Callable[[], None]) -> None:
        ended()
        if error is not None:
            self.report.fail(error)
        else:
            self.report.succeed({"sha256": self.args.sha256, "state": "in place, to be tried by a job"})


class _Receiving:
    """Chunks in their order; what is asked for next is told again while nothing comes."""

    def __init__(self, delivery: _Delivery, complete: Callable[[], None], ended: Callable[[], None]) -> None:
        self._delivery = delivery
        self._complete = complete
        self._ended = ended
        self._heard_s = self._asked_s = time.monotonic()
        self._next = delivery.size // MODEL_CHUNK_BYTES
        self._asked = 0  # the chunk that was asked for last
        self._done = False
        if delivery.size > self._next * MODEL_CHUNK_BYTES:
            os.truncate(delivery.part, self._next * MODEL_CHUNK_BYTES)
        self._ask()
        self._look()

    def take(self, topic: str, payload: bytes) -> None:
        wanted = f"model/{self._delivery.args.sha256}/{self._next}"
        left = self._delivery.args.size - self._next * MODEL_CHUNK_BYTES
        if self._done or not topic.endswith(f"/{wanted}") or len(payload) != min(left, MODEL_CHUNK_BYTES):
            return
        try:
            with self._delivery.part.open("ab") as file:
                file.write(payload)
        except OSError as error:
            self._fail(_refused(f"{self._delivery.part}: {error.strerror}", "room for it"))
            return
        self._next += 1
        self._heard_s = time.monotonic()
        if self._next - self._asked >= MODEL_CHUNKS_ASKED:
            self._ask()
        self._look()

    def tick(self) -> None:
        if self._done:
            return
        now_s = time.monotonic()
        if now_s - self._heard_s > _SILENCE_S:
            self._fail(_refused(f"no chunk for {_SILENCE_S:.0f} s", f"chunk {self._next}"))
        elif now_s - max(self._asked_s, self._heard_s) > _ASK_AGAIN_S:
            self._ask()

    def _look(self) -> None:
        if self._delivery.size >= self._delivery.args.size:
            self._done = True
            self._complete()

    def _ask(self) -> None:
        self._asked_s, self._asked = time.monotonic(), self._next
        percent = 100.0 * self._delivery.size / self._delivery.args.size
        self._delivery.report.progress(RECEIVING, round(percent, 1), {"next": self._next})

    def _fail(self, error: AgentError) -> None:
        self._done = True
        self._ended()
        self._delivery.report.fail(error)


def _install(part: Path, destination: Path) -> None:
    """In the place of the file that is served, all of it at once. Raises AgentError."""
    beside = destination.with_name(f".{destination.name}.{os.getpid()}.new")
    try:
        for killed in destination.parent.glob(f".{destination.name}.*.new"):  # at this very place
            killed.unlink()
        shutil.copyfile(part, beside)  # the state directory may be another disk
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(destination)
        part.unlink()
    except OSError as error:
        beside.unlink(missing_ok=True)
        remedy = "let the service write there, as with a model in its state directory"
        raise AgentError("command.model", f"{destination}: {error.strerror}", "a place for it", remedy) from error


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


def _refused(found: str, expected: str) -> AgentError:
    return AgentError("command.model", found, expected, "send it again under a new id: it goes on where it ended")
