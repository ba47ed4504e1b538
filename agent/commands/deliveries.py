"""The command `calibration`: a merged calibration on its way to the board, until a job tries it."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.commands.dispatcher import CommandProgress
from agent.commands.file_transfer import FileReceiver, PartialFile, Transfer, check_room, refused
from agent.commands.releases import Releases
from agent.common.errors import AgentError, CommandError
from agent.common.main_thread import RunInMainThread
from agent.contract.commands import CalibrationArgs, ModelArgs
from agent.contract.histograms import Facts, read_facts, read_upload
from agent.models.model import Model
from agent.models.model_watch import content_of
from engines.store.files import remove, sync_folder


@dataclass(frozen=True)
class StagedCalibration:
    """A merged calibration that has come: checked against the model, and left where it is until a job has copied it.

    model: under the plan in service.
    """

    path: Path
    model: Model
    report: CommandProgress

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


class CalibrationDelivery(FileReceiver):
    """Called in the supervisor's thread. model: as it serves now. try_out: hears of what is whole and fits, and takes
    over the command."""

    def __init__(
        self,
        folder: Path,
        reserve_bytes: int,
        model: Callable[[], Model],
        post: RunInMainThread,
        try_out: Callable[[StagedCalibration], None],
    ) -> None:
        super().__init__(folder)
        self._reserve_bytes = reserve_bytes
        self._model = model
        self._post = post
        self._try_out = try_out

    def on_calibration(self, args: CalibrationArgs, report: CommandProgress) -> None:
        """Have it brought here. Raises CommandError, AgentError."""
        self.check_idle()
        try:
            part = self.part(args, self._reserve_bytes)
            staged = StagedCalibration(part, self._model(), report)
            incoming = PartialFile(part, args, report)
            self._delivery = Transfer(incoming, staged, self._reserve_bytes, self._post, lambda: self._try_out(staged))
        except OSError as error:
            raise refused(args.what, f"{error.filename}: {error.strerror}", "a folder to write in") from error


_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)  # another disk, or one without hard links


class StagedModel:
    """In a folder of its own beside `destination`, under the very name that it would have there.

    part: the file as it was received; it stays until the model is in its place, so that what says nothing of the model
    costs no second transfer. report: of the command that brought it. take_up: called before it is put in its place.
    """

    def __init__(self, part: Path, destination: Path, report: CommandProgress, take_up: Callable[[], None]) -> None:
        self.report = report
        self.content = ""  # as `content_of` has it, once it is staged
        self._part = part
        self._destination = destination
        self._folder = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.{os.getpid()}.new")
        self._take_up = take_up

    @property
    def file(self) -> Path:
        return self._folder / self._destination.name

    def stage(self, reserve_bytes: int) -> None:
        """Lay it down, on the disk. Raises AgentError where there is no place for it, or no room but the reserve."""
        try:
            for killed in self._destination.parent.glob(f".{self._destination.name}.*.new"):  # at this very place
                remove(killed)
            self._folder.mkdir()
            try:
                os.link(self._part, self.file)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                check_room(self._destination.parent, self._part.stat().st_size, reserve_bytes, "model")
                shutil.copyfile(self._part, self.file)
            with self.file.open("rb") as file:
                os.fsync(file.fileno())
            self.content = content_of(self.file)
        except OSError as error:
            self.discard()
            raise self._refused(error) from error
        except AgentError:
            self.discard()
            raise

    def install(self) -> None:
        """In the place of the file that is served, all of it at once. Raises AgentError; that file is there then."""
        self._take_up()
        try:
            if self._destination.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder")
            self._part.unlink(missing_ok=True)  # first: what goes on with it later must not write into what serves
            self.file.replace(self._destination)
            sync_folder(self._destination.parent)
        except OSError as error:
            raise self._refused(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """What has served stays in its place."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def forget(self) -> None:
        """As `discard`, for a model that no board of this kind can serve: it need not be kept to be gone on with."""
        self.discard()
        with suppress(OSError):  # the next delivery removes it
            self._part.unlink(missing_ok=True)

    def _refused(self, error: OSError) -> AgentError:
        found, remedy = (
            f"{self._destination}: {error.strerror}",
            "let the service write there, as in its state directory",
        )
        return AgentError("command.model", found, "a place for it", remedy)


TryOut = Callable[[StagedModel], None]  # takes over the command: what becomes of the trial is its result


class ModelDelivery(FileReceiver):
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
        post: RunInMainThread,
        try_out: TryOut,
    ) -> None:
        super().__init__(folder)
        self._destination = destination
        self._watched = watched
        self._reserve_bytes = reserve_bytes
        self._releases = releases
        self._post = post
        self._try_out = try_out

    def begin(self, args: ModelArgs, report: CommandProgress, now: float) -> None:
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
            incoming = PartialFile(part, args, report)
            staged = StagedModel(part, self._destination, report, take_up)
            self._delivery = Transfer(incoming, staged, self._reserve_bytes, self._post, lambda: self._try_out(staged))
        except OSError as error:
            found = f"{error.filename or self._destination}: {error.strerror}"
            raise refused(args.what, found, "folders to write in") from error
