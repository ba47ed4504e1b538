"""Show a folder through FUSE; for the system's Python. `hanging_server.py SOURCE OPTIONS...`"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import fuse  # a package of the system's Python alone

fuse.fuse_python_api = (0, 2)
SOURCE = sys.argv[1]


class File:
    def __init__(self, path: str, flags: int, mode: int = 0o666) -> None:
        self.descriptor = os.open(SOURCE + path, flags, mode)

    def read(self, length: int, offset: int) -> bytes:
        return os.pread(self.descriptor, length, offset)

    def write(self, content: bytes, offset: int) -> int:
        return os.pwrite(self.descriptor, content, offset)

    def release(self, _flags: int) -> None:
        os.close(self.descriptor)

    def fsync(self, _data_only: int) -> None:
        os.fsync(self.descriptor)

    def ftruncate(self, length: int) -> None:
        os.ftruncate(self.descriptor, length)


class Folder(fuse.Fuse):  # type: ignore[misc]  # as above: mypy sees no class
    def __init__(self) -> None:
        super().__init__()
        self.file_class = File

    def getattr(self, path: str) -> os.stat_result:
        return os.lstat(SOURCE + path)

    def readdir(self, path: str, _offset: int) -> Iterator[object]:
        for name in (".", "..", *os.listdir(SOURCE + path)):
            yield fuse.Direntry(name)

    def readlink(self, path: str) -> str:
        return os.readlink(SOURCE + path)

    def symlink(self, target: str, path: str) -> None:
        os.symlink(target, SOURCE + path)

    def rename(self, path: str, other: str) -> None:
        os.rename(SOURCE + path, SOURCE + other)


def changing(change: Callable[..., None]) -> Callable[..., None]:
    def method(_: Folder, path: str, *arguments: int) -> None:
        change(SOURCE + path, *arguments)

    return method


for name in ("unlink", "mkdir", "rmdir", "chmod", "chown", "truncate", "utime"):
    setattr(Folder, name, changing(getattr(os, name)))
server = Folder()
server.parse(sys.argv[2:], errex=1)
server.main()
