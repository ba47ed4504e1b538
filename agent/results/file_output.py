"""Append results to a file as JSON lines: whole lines, whatever the disk and the log rotation do."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from contextlib import suppress
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.results.writer import Output, ResultLine

_PERIOD_S = 1.0  # a line is in the file after so long at most
_CHUNK_BYTES = 64 * 1024  # so much is written at once, without waiting for the period
_KEPT_BYTES = 2**20  # while the disk refuses
_LINE_START = b'{"frame": '  # by which our lines are recognised


class ResultsFile(Output):
    """Append lines; those that the disk refuses are tried again once a second, and the oldest are lost beyond 1 MiB.

    When the file is renamed or removed, as log rotation does, a new one of the name is started. Half a line that a
    crash or a full disk has left at the end is cut off before anything follows it. One thread at a time.
    """

    name = "file"

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        self.dropped: int = 0
        self._path, self._clock = path, clock
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._file: int | None = None
        self._due_s = 0.0

    def add(self, line: ResultLine) -> None:
        """Keep the line, and write it with others."""
        self._lines.append(line.encoded)
        self._bytes += len(line.encoded)
        if self.trouble is None and self._bytes >= _CHUNK_BYTES:
            self.flush()
        while self._bytes > _KEPT_BYTES and len(self._lines) > 1:
            self._bytes -= len(self._lines.popleft())
            self.dropped += 1

    def tick(self) -> float:
        """Write the lines that are due. Return the seconds until the next call."""
        if self._clock.monotonic_s() >= self._due_s:
            self.flush()
        return max(0.0, self._due_s - self._clock.monotonic_s())

    def flush(self) -> None:
        """Write all lines, or put the error into `trouble`."""
        self._due_s = self._clock.monotonic_s() + _PERIOD_S
        if not self._lines:
            return
        try:
            self._write()
        except OSError as error:
            remedy = "free some space, or set results.file to a path that the daemon may write"
            found = f"{self._path}: {error.strerror}"
            self.trouble = self.trouble or AgentError("results.write", found, "a writable file with room", remedy)
            self._close()
        else:
            self.trouble = None

    def close(self) -> None:
        """Write all lines; those that the disk still refuses are lost."""
        self.flush()
        self.dropped += len(self._lines)
        self._lines.clear()
        self._close()

    def _write(self) -> None:
        file = self._file = self._open()
        waiting = b"".join(self._lines)
        written = os.write(file, waiting)
        while self._lines and len(self._lines[0]) <= written:
            written -= len(self._lines[0])
            self._bytes -= len(self._lines.popleft())
        if self._lines:
            _mend(file)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open(self) -> int:
        """Return the file of that name, which may be another one than before. Raises OSError."""
        if self._file is not None:
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file), os.stat(self._path)):
                    return self._file
            self._close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # O_NONBLOCK: a pipe of that name, which is refused below, must not be waited for.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
        file = os.open(self._path, flags, 0o640)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
            _mend(file)
        except OSError:
            os.close(file)
            raise
        return file

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _mend(file: int) -> None:
    """Cut off half a line of ours at the end; half a line of another program gets its newline. Raises OSError."""
    end = os.fstat(file).st_size
    while end > 0:  # find where the last newline ends
        start = max(0, end - _CHUNK_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    tail = os.pread(file, len(_LINE_START), end)
    if tail and _LINE_START.startswith(tail):
        os.ftruncate(file, end)
    elif tail:
        os.write(file, b"\n")
