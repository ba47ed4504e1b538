"""The command `model`: a model on its way to the board, from the first byte until a job tries it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from agent.commands import Report
from agent.errors import AgentError, CommandError
from agent.job import CANCELLED
from agent.receiving import TROUBLE, Chunks, Fetch, Incoming, Post, refusal_of, refused
from agent.releases import Releases
from agent.requests import ModelArgs
from agent.staged_model import StagedModel, check_room
from engines.staging import remove

log = logging.getLogger(__name__)

TryOut = Callable[[StagedModel], None]  # takes over the command: what becomes of the trial is its result


class ModelDelivery:
    """At most one at a time; called in the supervisor's thread. What has come of a file stays in `folder`, and is gone
    on with when the same model is sent again; another model's is removed.

    destination: the file that is served. watched: whether another one would be taken up. reserve_bytes: what must stay
    free, here and there. try_out: hears of a model that is whole, and tries it before it is put in its place.
    """

    def __init__(
        self,
        folder: Path,
        destination: Path,
        watched: bool,
        reserve_bytes: int,
        releases: Releases,
        post: Post,
        try_out: TryOut,
    ) -> None:
        self._folder = folder
        self._destination = destination
        self._watched = watched
        self._reserve_bytes = reserve_bytes
        self._releases = releases
        self._post = post
        self._try_out = try_out
        self._delivery: _Delivery | None = None

    def begin(self, args: ModelArgs, report: Report, now: float) -> None:
        """Have this model brought here; now: Unix time in seconds. Raises CommandError, AgentError for one that may not
        come, or cannot."""
        if self._delivery is not None and not self._delivery.incoming.report.latest.final:
            raise CommandError("command.busy", "a model on its way", "none", "wait for its end, then send it again")
        if not self._watched:
            found = "a source that is no live camera, or a model that was not read from a file"
            raise CommandError("command.model", found, "a daemon that takes up a new model", "restart it instead")
        release = self._releases.check(args, now)
        part = self._folder / f"{args.sha256}.part"

        def take_up() -> None:
            if release is not None:
                self._releases.take_up(*release)

        try:
            self._make_room(part, args.size)
            incoming = Incoming(part, args, report)
            staged = StagedModel(part, self._destination, report, take_up)
            self._delivery = _Delivery(incoming, staged, self._reserve_bytes, self._post, self._try_out)
        except OSError as error:
            raise refused(f"{error.filename or self._folder}: {error.strerror}", "folders to write in") from error

    def receive(self, topic: str, payload: bytes) -> None:
        """A chunk, as it came on model/{sha256}/{n}; what nobody waits for is ignored."""
        if self._delivery is not None:
            self._delivery.take(topic, payload)

    def tick(self) -> None:
        if self._delivery is not None:
            self._delivery.tick()

    def end(self, reason: str) -> bool:
        """End what is on its way; False where nothing is, or a job has it already."""
        if self._delivery is None or self._delivery.over:
            return False
        remedy = "send it again under a new id: it goes on where it ended"
        self._delivery.fail(AgentError(CANCELLED, reason, "a delivery that is left to end", remedy))
        return True

    def _make_room(self, part: Path, size: int) -> None:
        """Raises OSError, AgentError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for other in list(self._folder.iterdir()):
            gone = not os.path.lexists(other)  # with the one before: the half of a removal that was cut short
            if not gone and (other != part or other.is_symlink() or not other.is_file()):
                remove(other)
        check_room(self._folder, size - (part.stat().st_size if part.exists() else 0), self._reserve_bytes)
        beside = self._destination.parent
        if beside.stat().st_dev != self._folder.stat().st_dev:  # on one disk it is the same file under two names
            check_room(beside, size, self._reserve_bytes)


class _Delivery:
    """One file, until it has been handed over or has failed. What was put together from pieces, of which somebody may
    have forged one, and is another file then, is begun anew once."""

    def __init__(
        self, incoming: Incoming, staged: StagedModel, reserve_bytes: int, post: Post, try_out: TryOut
    ) -> None:
        """Raises OSError, AgentError."""
        self.incoming = incoming
        self.over = False
        self._staged = staged
        self._reserve_bytes = reserve_bytes
        self._post = post
        self._try_out = try_out
        self._anew = False
        self._source: Fetch | Chunks | None = None  # None: it is being verified
        self._begin()

    def take(self, topic: str, payload: bytes) -> None:
        if isinstance(self._source, Chunks):
            try:
                self._source.take(topic, payload)
                self._look()
            except TROUBLE as error:
                self.fail(refusal_of(error))

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
            self._source = Chunks(self.incoming)
            self._look()
            return
        self._source = fetch = Fetch(self.incoming, self._tell)
        self._work(lambda: fetch.bring(url), self._verify)

    def _look(self) -> None:
        if isinstance(self._source, Chunks) and self._source.complete:
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
            self._try_out(self._staged)
            self.over = True
        elif self.incoming.pieced and not self._anew:
            log.warning("model=%s state=another file, begun anew", self.incoming.args.sha256[:12])
            self._anew = True
            self._begin()
        else:
            raise refused("a file of another SHA-256", self.incoming.args.sha256[:12])

    def _work(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        """then: in the supervisor's thread, unless the delivery has ended meanwhile."""

        def run() -> None:
            try:
                work()
            except TROUBLE as error:
                refusal = refusal_of(error)
                self._post(lambda: self.fail(refusal))
            else:
                self._post(lambda: self._goes_on(then))

        threading.Thread(target=run, name="model-delivery", daemon=True).start()

    def _goes_on(self, then: Callable[[], None]) -> None:
        if self.over:
            self._staged.discard()
            return
        try:
            then()
        except TROUBLE as error:
            self.fail(refusal_of(error))

    def _tell(self, percent: int) -> None:
        self._post(lambda: self.incoming.report.progress("FETCHING", percent))
