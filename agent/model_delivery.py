"""The command `model`: a model on its way to the board, from the first byte until a job tries it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agent.commands import Report
from agent.delivery import Arrivals, Delivery
from agent.errors import CommandError
from agent.receiving import Incoming, Post, refused
from agent.releases import Releases
from agent.requests import ModelArgs
from agent.staged_model import StagedModel, check_room

TryOut = Callable[[StagedModel], None]  # takes over the command: what becomes of the trial is its result


class ModelDelivery(Arrivals):
    """Called in the supervisor's thread.

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
        super().__init__(folder)
        self._destination = destination
        self._watched = watched
        self._reserve_bytes = reserve_bytes
        self._releases = releases
        self._post = post
        self._try_out = try_out

    def begin(self, args: ModelArgs, report: Report, now: float) -> None:
        """Have this model brought here; now: Unix time in seconds. Raises CommandError, AgentError for one that may not
        come, or cannot."""
        self.check_idle()
        if not self._watched:
            found = "a source that is no live camera, or a model that was not read from a file"
            raise CommandError("command.model", found, "a daemon that takes up a new model", "restart it instead")
        release = self._releases.check(args, now)

        def take_up() -> None:
            if release is not None:
                self._releases.take_up(*release)

        try:
            part = self.part(args, self._reserve_bytes)
            beside = self._destination.parent
            if beside.stat().st_dev != part.parent.stat().st_dev:  # on one disk it is the same file under two names
                check_room(beside, args.size, self._reserve_bytes, args.what)
            incoming = Incoming(part, args, report)
            staged = StagedModel(part, self._destination, report, take_up)
            self._delivery = Delivery(incoming, staged, self._reserve_bytes, self._post, lambda: self._try_out(staged))
        except OSError as error:
            found = f"{error.filename or self._destination}: {error.strerror}"
            raise refused(args.what, found, "folders to write in") from error
