"""Write and remove files so that no reader, and no power cut, ever meets half of one.

`open_regular` and `read_regular` are for files that anybody may have put there: none hangs, and none fills the memory.

Everything is first written under a hidden name beside its place and then renamed: `.NAME.PID.new` is being written,
`.NAME.old` is being replaced, `.NAME.gone` is being removed. `sweep` finishes what a killed process left.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from engines.errors import EngineError

MOST_BYTES = 64 << 20  # size limit of files of settings or state; the largest take a few MiB


def open_regular(file: Path, flags: int = 0) -> BinaryIO:
    """Open a file for reading.

    Args:
        flags: Further flags of open(2), such as os.O_NOFOLLOW.

    Raises OSError for anything but a regular file: a pipe would block, a device never end.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(file))
    return os.fdopen(descriptor, "rb")


def read_regular(file: Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of a file.

    Bytes that are appended meanwhile do not count, nor those that a file of the kernel's has beyond its stated size.

    Args:
        most_bytes: The largest size that is read.

    Raises OSError for anything but a regular file, and for a longer one.
    """
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"more than {most_bytes} bytes", str(file))
        return opened.read(size)


def read_text(file: Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a file, with every line end as a newline.

    Args:
        most_bytes: The largest size that is read.

    Raises OSError as `read_regular` does, UnicodeDecodeError for a file that is not UTF-8.
    """
    text = read_regular(file, most_bytes).decode("utf-8")
    return text.replace("\r\n", "\n").replace("\r", "\n")  # as files opened as text have it


def why_unwritable(path: Path) -> str:
    """Return why no file can be written at `path`, whose missing folders are made; empty if it can."""
    folder = next(folder for folder in path.absolute().parents if folder.exists())
    if path.is_dir():
        return "a folder"
    return "" if folder.is_dir() and os.access(folder, os.W_OK) else f"{folder} takes no files"


def replace_files(contents: Mapping[Path, bytes], mode: int = 0o666) -> None:
    """Write files under their names, in order, once all are on the disk.

    Args:
        mode: Permissions, less those that the umask forbids.

    Raises OSError when the disk refuses, and leaves nothing half.
    """
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}.new") for path in contents}
    try:
        for path, content in contents.items():
            with open(partial[path], "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, written in partial.items():
            os.replace(written, path)
    finally:
        for written in partial.values():
            written.unlink(missing_ok=True)
    for folder in {path.parent for path in contents}:
        sync_folder(folder)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def staging(destination: Path, replacing: bool = False) -> Iterator[Path]:
    """Give the block a new folder to fill; it becomes `destination`, all on the disk, when the block ends well.

    Args:
        destination: The name of the finished folder.
        replacing: True: an existing `destination` gives way, but only when the block has ended well, and is restored if
            the folder cannot take its place. False: there must be none.

    Raises EngineError (`artefact.write`) when the disk refuses. A block that fails leaves nothing.
    """
    folder = destination.with_name(f".{destination.name}.{os.getpid()}.new")
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        yield folder
        for path in folder.rglob("*"):
            if path.is_dir():
                sync_folder(path)
            else:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        sync_folder(folder)
        if replacing:
            _exchange(folder, destination)
        else:
            folder.rename(destination)
        sync_folder(destination.parent)
    except OSError as error:
        raise EngineError(
            "artefact.write",
            f"{destination}: {error.strerror or error}",
            "a writable disk with room for the engine",
            "free some space or check the permissions; the current artefact stays current",
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, a link (but not its target), or a folder with all in it.

    A folder is first renamed to `.NAME.gone`: whatever happens, none under its own name is half there.

    Raises OSError when the disk refuses.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    gone = path.with_name(f".{path.name}.gone")
    if os.path.lexists(gone):  # left by a removal that was cut short
        shutil.rmtree(gone)
    path.rename(gone)
    sync_folder(path.parent)
    with suppress(FileNotFoundError):  # another process has just opened the store, and sweeps
        shutil.rmtree(gone)


def _exchange(folder: Path, destination: Path) -> None:
    """Put `folder` in place of `destination`.

    Between the two renames nothing has that name: after a crash there, `sweep` puts the former one back.
    """
    former = destination.with_name(f".{destination.name}.old")
    if not os.path.lexists(destination):
        folder.rename(destination)
        return
    if os.path.lexists(former):
        remove(former)
    destination.rename(former)
    try:
        folder.rename(destination)
    except OSError:
        former.rename(destination)
        raise
    with suppress(OSError):  # the next sweep removes it
        remove(former)


def sweep(folder: Path) -> None:
    """Remove what killed processes have half written or half removed, as far as the disk allows.

    A folder that was about to be replaced gets its name back if nothing took it.
    """
    try:
        hidden = [folder / name for name in os.listdir(folder) if name.startswith(".")]
    except OSError:  # it cannot be listed for want of a descriptor, or of rights: the next sweep may
        return
    for former in (path for path in hidden if path.suffix == ".old"):
        name = former.with_name(former.name[1 : -len(".old")])
        with suppress(OSError):
            if os.path.lexists(name):
                remove(former)
            else:
                former.rename(name)
    for left in (path for path in hidden if path.suffix == ".gone" or _is_abandoned(path)):
        shutil.rmtree(left, ignore_errors=True)


def _is_abandoned(staged: Path) -> bool:
    """Return True if the process that made a folder, and put its pid into the name, is gone."""
    named = re.search(r"\.(\d+)\.new$", staged.name)
    return named is not None and not Path("/proc", named[1]).exists()
