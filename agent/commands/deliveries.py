"""A delivered model beside the file that is served: a job tries it there, and only what passed takes its place."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from agent.commands import Report
from agent.errors import AgentError
from agent.model_watch import content_of
from engines.files import sync_folder
from engines.staging import remove

_NO_LINK = (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK)  # another disk, or one without hard links


class StagedModel:
    """In a folder of its own beside `destination`, under the very name that it would have there.

    part: the file as it was received; it stays until the model is in its place, so that what says nothing of the model
    costs no second transfer. report: of the command that brought it. take_up: called before it is put in its place.
    """

    def __init__(self, part: Path, destination: Path, report: Report, take_up: Callable[[], None]) -> None:
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


def check_room(folder: Path, more_bytes: int, reserve_bytes: int, what: str) -> None:
    """Raises OSError, and AgentError where so much more would leave less than the reserve. what: of FileArgs."""
    free = shutil.disk_usage(folder).free
    if free - more_bytes < reserve_bytes:
        expected = f"{more_bytes} bytes more than store.reserve_bytes, {reserve_bytes}"
        raise AgentError(f"command.{what}", f"{free} bytes free in {folder}", expected, "free some, then send it again")
