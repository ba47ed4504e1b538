"""The command `calibration`: a merged calibration on its way to the board, until a job tries it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agent.commands import Report
from agent.delivery import Arrivals, Delivery
from agent.errors import AgentError
from agent.histogram_upload import Facts, read_facts, read_upload
from agent.model import Model
from agent.receiving import Incoming, Post, refused
from agent.requests import CalibrationArgs


@dataclass(frozen=True)
class StagedCalibration:
    """A merged calibration that has come: checked against the model, and left where it is until a job has copied it.

    model: under the plan in service.
    """

    path: Path
    model: Model
    report: Report

    def stage(self, reserve_bytes: int) -> None:  # noqa: ARG002  (it takes no room: it stays where it came)
        """Raises AgentError (`calibration.model` for another model's, or another plan's; `histograms.unreadable`,
        `calibration.own` for one that no fleet has merged)."""
        facts = self.facts()
        if facts.merged is None:
            found, remedy = "the histograms of one board", "merge them with 'tared fleet merge'"
            raise AgentError("calibration.own", found, "a merged calibration", remedy)
        here = self.model.sha256, self.model.observed_id
        if (facts.model, facts.observed) != here:
            found = f"a calibration of model {facts.model[:12]}, repairs {facts.observed[:12]}"
            remedy = "merge the histograms of boards with this model and plan"
            raise AgentError("calibration.model", found, f"of {here[0][:12]}, repairs {here[1]}", remedy)
        for _ in read_upload(self.path.read_bytes()):
            pass

    def facts(self) -> Facts:
        """Raises MessageError, OSError."""
        return read_facts(self.path.read_bytes())

    def discard(self) -> None:
        """The next delivery removes it, or is spared the transfer."""


class CalibrationDelivery(Arrivals):
    """Called in the supervisor's thread. model: as it serves now. try_out: hears of what is whole and fits, and takes
    over the command."""

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int,
        model: Callable[[], Model],
        post: Post,
        try_out: Callable[[StagedCalibration], None],
    ) -> None:
        super().__init__(folder)
        self._reserve_bytes = reserve_bytes
        self._model = model
        self._post = post
        self._try_out = try_out

    def on_calibration(self, args: CalibrationArgs, report: Report) -> None:
        """Have it brought here. Raises CommandError, AgentError."""
        self.check_idle()
        try:
            part = self.part(args, self._reserve_bytes)
            staged = StagedCalibration(part, self._model(), report)
            incoming = Incoming(part, args, report)
            self._delivery = Delivery(incoming, staged, self._reserve_bytes, self._post, lambda: self._try_out(staged))
        except OSError as error:
            raise refused(args.what, f"{error.filename}: {error.strerror}", "a folder to write in") from error
