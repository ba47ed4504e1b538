"""Listen on a Unix socket of the daemon's own: a stale one is replaced, another daemon's is left alone."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path


class UnixListener:
    """A listening socket that does not block, and its file."""

    def __init__(self, path: Path, mode: int, backlog: int) -> None:
        """mode: permissions of the file. Raises OSError, also where somebody serves the path already."""
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(path)
        self._path = path
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.socket.bind(str(path))
            path.chmod(mode)  # nobody can connect before it listens
            self.socket.listen(backlog)
            self.socket.setblocking(False)
            self._inode = path.stat().st_ino
        except OSError:
            self.socket.close()
            raise

    def close(self) -> None:
        """Remove the file, unless it is another one by now, and stop listening."""
        with suppress(OSError):
            if self._path.lstat().st_ino == self._inode:
                self._path.unlink()
        self.socket.close()


def _remove_stale(path: Path) -> None:
    """Remove the socket of a daemon that was killed. Raises OSError (EADDRINUSE, EEXIST) for anything else there."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise FileExistsError(errno.EEXIST, "not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            with suppress(BlockingIOError):
                probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        else:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
