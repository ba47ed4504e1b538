"""A file that is brought to the board by a command, from its first byte until it is handed over."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agent.errors import AgentError, CommandError
from agent.job import CANCELLED
from agent.receiving import TROUBLE, Chunks, Fetch, Incoming, Post
from agent.requests import FileArgs
from agent.staged_model import check_room
from engines.staging import remove

log = logging.getLogger(__name__)


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


class Arrivals:
    """Of one kind, at most one file at a time; what has come of it stays in `folder`, and is gone on with when the same
    is sent again; another's is removed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._delivery: Delivery | None = None

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


class Delivery:
    """One file, until it has been handed over or has failed. What was put together from pieces, of which somebody may
    have forged one, and is another file then, is begun anew once.

    hand_over: called in the supervisor's thread with what was staged.
    """

    def __init__(
        self, incoming: Incoming, staged: Staged, reserve_bytes: int, post: Post, hand_over: Callable[[], None]
    ) -> None:
        """Raises OSError, AgentError."""
        self.incoming = incoming
        self.over = False
        self._staged = staged
        self._reserve_bytes = reserve_bytes
        self._post = post
        self._hand_over = hand_over
        self._anew = False
        self._source: Fetch | Chunks | None = None  # None: it is being verified
        self._begin()

    def take(self, topic: str, payload: bytes) -> None:
        if isinstance(self._source, Chunks):
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
