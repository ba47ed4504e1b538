"""Receive the files of the commands `model` and `calibration`, and hand them over to be tried.

A `FileReceiver` asks its admission, `ModelAdmission` or `calibration_admission`, whether a file may come. A `Transfer`
brings it, verifies it in a thread of its own, and lets `StagedModel` or `StagedCalibration` make it ready. The receiver
of the staged file then takes over the command: the result of the trial is the result of the command.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from agent.commands.authority import Releases
from agent.commands.dispatcher import CANCELLED, CommandProgress
from agent.commands.file_transfer import (
    TRANSFER_ERRORS,
    ChunkReceiver,
    HttpDownload,
    PartialFile,
    check_room,
    transfer_error,
)
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, CommandError
from agent.common.main_thread import RunInMainThread
from agent.contract.commands import CalibrationArgs, FileArgs, ModelArgs
from agent.contract.histograms import Facts, read_facts, read_upload
from agent.models.model import Model
from agent.models.model_watch import content_of
from engines.store.files import remove, sync_folder

log = logging.getLogger(__package__)

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)  # another disk, or one without hard links

T = TypeVar("T")


@dataclass(frozen=True)
class StagedCalibration:
    """A received calibration, checked against the model. It stays where it is until a job has copied it.

    model: the served model, under its plan.
    """

    path: Path
    model: Model
    progress: CommandProgress

    def stage(self, reserve_bytes: int) -> None:  # noqa: ARG002  (it takes no room: it stays where it came)
        """Check the file; for a thread of its own.

        Raises AgentError:
            calibration.model       a calibration of another model or another plan
            calibration.own         a calibration that no fleet has merged
            histograms.unreadable   anything else
        """
        facts = self.facts()
        if facts.merged is None:
            found, remedy = "the histograms of one board", "merge them with 'tared fleet merge'"
            raise AgentError("calibration.own", found, "a merged calibration", remedy)
        here = self.model.sha256, self.model.observed_id
        if (facts.model, facts.observed) != here:
            found = f"a calibration of model {facts.model[:12]}, repairs {facts.observed[:12]}"
            expected = f"a calibration of model {here[0][:12]}, repairs {here[1]}"
            remedy = "merge the histograms of boards with this model and plan"
            raise AgentError("calibration.model", found, expected, remedy)
        for _ in read_upload(self.path.read_bytes()):
            pass

    def facts(self) -> Facts:
        """Raises MessageError, OSError."""
        return read_facts(self.path.read_bytes())

    def discard(self) -> None:
        """Keep the file: the next delivery removes it, or is spared the transfer."""


class StagedModel:
    """A received model in a folder next to `destination`, under the very name that it would have there.

    Args:
        part: The received file. It stays until the model is installed, so that a trial that says nothing about the
            model costs no second transfer.
        progress: Of the command that brought the model.
        on_install: Called before the model is put in its place; may raise AgentError.
        accepted: The owner accepts that it answers otherwise than the model that serves.
    """

    def __init__(
        self,
        part: Path,
        destination: Path,
        progress: CommandProgress,
        on_install: Callable[[], None],
        accepted: bool = False,
    ) -> None:
        self.progress = progress
        self.accepted = accepted
        self.content = ""  # as `content_of` has it, once it is staged
        self._part = part
        self._destination = destination
        self._folder = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.{os.getpid()}.new")
        self._on_install = on_install

    @property
    def file(self) -> Path:
        return self._folder / self._destination.name

    def stage(self, reserve_bytes: int) -> None:
        """Lay the model down on the destination's disk; for a thread of its own.

        Raises AgentError (`command.model`) if it cannot be written there, or would take from the reserve.
        """
        try:
            # A killed process left them.
            for leftover in self._destination.parent.glob(f".{self._destination.name}.*.new"):
                remove(leftover)
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
            raise self._error(error) from error
        except AgentError:
            self.discard()
            raise

    def install(self) -> None:
        """Replace the served file, atomically. Raises AgentError; the served file is unchanged then."""
        self._on_install()
        try:
            if self._destination.is_dir():
                raise IsADirectoryError(errno.EISDIR, "a folder")
            # First, since both are one file: a later delivery that resumes must not write into what serves.
            self._part.unlink(missing_ok=True)
            self.file.replace(self._destination)
            sync_folder(self._destination.parent)
        except OSError as error:
            raise self._error(error) from error
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the staged copy; the served file and the received one stay."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def forget(self) -> None:
        """Remove the received file too: no board of this kind can serve this model."""
        self.discard()
        with suppress(OSError):  # the next delivery removes it
            self._part.unlink(missing_ok=True)

    def _error(self, error: OSError) -> AgentError:
        found, expected = f"{self._destination}: {error.strerror}", "a place where the daemon may write"
        remedy = "give the service write permission there, as in its state directory"
        return AgentError("command.model", found, expected, remedy)


Staged = StagedModel | StagedCalibration
S = TypeVar("S", StagedModel, StagedCalibration)


@dataclass
class Transfer:
    """One file on its way, until it has been handed over or has failed.

    A file that was put together from pieces and has another SHA-256 is transferred once more, since somebody may have
    forged one of the pieces.

    hand_over: called in the supervisor's thread once the file is staged. Raises OSError, AgentError.
    """

    partial: PartialFile
    staged: Staged
    reserve_bytes: int
    run_in_main_thread: RunInMainThread
    hand_over: Callable[[], None]
    clock: Clock = SYSTEM_CLOCK
    is_finished: bool = field(default=False, init=False)
    _is_second_try: bool = field(default=False, init=False)
    _source: HttpDownload | ChunkReceiver | None = field(default=None, init=False)  # None: the file is being verified

    def __post_init__(self) -> None:
        self._start()

    def receive(self, topic: str, payload: bytes) -> None:
        """A chunk, as it arrived on model/{sha256}/{n}."""
        if isinstance(self._source, ChunkReceiver):
            try:
                self._source.receive(topic, payload)
                if self._source.is_complete:
                    self._verify()
            except TRANSFER_ERRORS as error:
                self.fail(self.partial.as_agent_error(error))

    def tick(self) -> None:
        if self._source is not None:
            try:
                self._source.tick()
            except AgentError as error:
                self.fail(error)

    def fail(self, error: AgentError) -> None:
        """End the transfer. A thread that still waits for a server is ignored from now on."""
        if not self.is_finished:
            self.is_finished, self._source = True, None
            self.partial.close()
            self.partial.progress.fail(error)

    def _start(self) -> None:
        """Raises OSError, AgentError."""

        def report_percent(percent: int) -> None:
            self.run_in_main_thread(lambda: self.partial.progress.update("FETCHING", percent))

        url = self.partial.args.url
        if url is None:
            self._source = chunks = ChunkReceiver(self.partial, self.clock)
            if chunks.is_complete:
                self._verify()
        else:
            self._source = download = HttpDownload(self.partial, report_percent, self.clock)
            self._run_in_thread(lambda: download.run(url), lambda _: self._verify())

    def _verify(self) -> None:
        """Verify and stage in a thread: hashing a large file, or copying it to another disk, takes long."""
        self._source = None

        def verify_and_stage() -> bool:
            is_right = self.partial.verify()
            if is_right:
                self.staged.stage(self.reserve_bytes)
            return is_right

        self._run_in_thread(verify_and_stage, self._on_verified)

    def _on_verified(self, is_right: bool) -> None:
        """Raises OSError, AgentError."""
        if is_right:
            self.hand_over()
            self.is_finished = True
        elif self.partial.is_pieced and not self._is_second_try:
            log.warning("delivery=%s state='another file, started again'", self.partial.args.sha256[:12])
            self._is_second_try = True
            self._start()
        else:
            raise self.partial.error("a file of another SHA-256", self.partial.args.sha256[:12])

    def _run_in_thread(self, work: Callable[[], T], then: Callable[[T], None]) -> None:
        """Run `work` in a thread, and `then` with its result in the supervisor's unless the transfer has ended."""

        def run() -> None:
            try:
                result = work()
            except TRANSFER_ERRORS as error:
                refusal = self.partial.as_agent_error(error)
                self.run_in_main_thread(lambda: self.fail(refusal))
            else:
                self.run_in_main_thread(lambda: go_on(result))

        def go_on(result: T) -> None:
            if self.is_finished:
                self.staged.discard()
                return
            try:
                then(result)
            except TRANSFER_ERRORS as error:
                self.fail(self.partial.as_agent_error(error))

        threading.Thread(target=run, name="delivery", daemon=True).start()


@dataclass
class FileReceiver(Generic[S]):
    """Carry out a command that brings a file, at most one at a time; called in the supervisor's thread.

    A partial file stays in `folder` and is resumed when the same file is sent again. Other files in it are removed.

    Args:
        reserve_bytes: Disk space that must stay free.
        admit: Decides on a command's arguments whether its file may come; raises CommandError or AgentError if not.
            Returns the function that makes the staged file from the path of the partial one.
        try_out: Receives a complete file, tries it, and takes over the command.
    """

    folder: Path
    reserve_bytes: int
    run_in_main_thread: RunInMainThread
    admit: Callable[[Any, CommandProgress], Callable[[Path], S]]
    try_out: Callable[[S], None]
    clock: Clock = SYSTEM_CLOCK
    _transfer: Transfer | None = field(default=None, init=False)

    def start(self, args: FileArgs, progress: CommandProgress) -> None:
        """Raises CommandError, AgentError for a file that may not come, or cannot."""
        if self._transfer is not None and not self._transfer.partial.progress.latest.final:
            remedy = "wait for its end, then send the command again"
            raise CommandError("command.busy", "a file transfer under way", "one file transfer at a time", remedy)
        stage = self.admit(args, progress)
        part = self.folder / f"{args.sha256}.part"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for other in list(self.folder.iterdir()):
                gone = not os.path.lexists(other)  # with the one before: the half of a removal that was cut short
                if not gone and (other != part or other.is_symlink() or not other.is_file()):
                    remove(other)
            missing = args.size - (part.stat().st_size if part.exists() else 0)
            check_room(self.folder, missing, self.reserve_bytes, args.what)
            staged, partial = stage(part), PartialFile(part, args, progress)
            self._transfer = Transfer(
                partial, staged, self.reserve_bytes, self.run_in_main_thread, lambda: self.try_out(staged), self.clock
            )
        except OSError as error:
            found = f"{error.filename or self.folder}: {error.strerror}"
            raise transfer_error(args.what, found, "a writable folder") from error

    def receive(self, topic: str, payload: bytes) -> None:
        """A chunk, as it arrived on model/{sha256}/{n}; ignored if no transfer waits for it."""
        if self._transfer is not None:
            self._transfer.receive(topic, payload)

    def tick(self) -> None:
        if self._transfer is not None:
            self._transfer.tick()

    def end(self, reason: str) -> bool:
        """End the running transfer; False if there is none, or a job has the file already."""
        if self._transfer is None or self._transfer.is_finished:
            return False
        remedy = "send the command again under a new id: the transfer continues where it ended"
        self._transfer.fail(AgentError(CANCELLED, reason, "the whole file", remedy))
        return True


def calibration_admission(
    model: Callable[[], Model],
) -> Callable[[CalibrationArgs, CommandProgress], Callable[[Path], StagedCalibration]]:
    """Return the `admit` of the command `calibration`: any file may come. model: returns the one that is observed."""
    return lambda _args, progress: lambda part: StagedCalibration(part, model(), progress)


@dataclass(frozen=True)
class ModelAdmission:
    """The `admit` of the command `model`.

    Args:
        destination: The file that is served.
        watched: Whether the daemon notices another file there, so that a delivered model would be taken up.
        reserve_bytes: Disk space that must stay free at `destination`, too.
    """

    destination: Path
    watched: bool
    reserve_bytes: int
    releases: Releases
    clock: Clock = SYSTEM_CLOCK

    def __call__(self, args: ModelArgs, progress: CommandProgress) -> Callable[[Path], StagedModel]:
        if not self.watched:
            found = "a source that is no live camera, or a model that was not read from a file"
            expected = "a live camera, and a model that was read from a file"
            raise CommandError("command.model", found, expected, "restart the daemon instead")
        release = self.releases.check(args, self.clock.wall_s())

        def record_release() -> None:
            if release is not None:
                self.releases.record(*release)

        def stage(part: Path) -> StagedModel:
            folder = self.destination.parent
            if folder.stat().st_dev != part.parent.stat().st_dev:  # on one disk it is the same file under two names
                check_room(folder, args.size, self.reserve_bytes, args.what)
            return StagedModel(part, self.destination, progress, record_release, args.accept)

        return stage
