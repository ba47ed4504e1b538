"""Send results as JSON lines over a Unix socket: every reader at its own pace, and nobody waits for one."""

from __future__ import annotations

import errno
import logging
import select
import socket
from contextlib import suppress
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, ConfigError
from agent.results.unix_listener import UnixListener
from agent.results.writer import Output, ResultLine

log = logging.getLogger(__package__)

MAX_READERS = 8
_POLL_S = 0.2  # for new readers; they are also admitted before each line, so that none misses it
_RETRY_S = 0.02  # to send the rest of a line
_END_S = 0.5  # for the rest of the last line
_MODE = 0o660  # owner and group
_REOPEN_S = 30.0  # until the next attempt, where the disk has refused the socket
_REFUSED = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE})


class _Reader:
    """A connection. Of what its buffer in the kernel has no room for, one line at most is kept."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._connection = connection
        self.rest = b""  # the end of a line whose beginning was sent

    @property
    def is_gone(self) -> bool:
        """True where nobody is there to read; a reader that has only closed its sending side is."""
        poll = select.poll()
        poll.register(self._connection, 0)
        return bool(poll.poll(0))

    def push(self, line: bytes) -> bool:
        """Send the rest of the previous line, then this one, which may be empty.

        Return False where the rest is in the way, and the line is lost. Raises OSError when the reader has gone.
        """
        if self.rest:
            self._send(self.rest)
        if self.rest:
            return not line
        self._send(line)
        return True

    def close(self) -> None:
        self._connection.close()

    def _send(self, content: bytes) -> None:
        sent = 0
        if content:
            with suppress(BlockingIOError):
                sent = self._connection.send(content, socket.MSG_NOSIGNAL)
        self.rest = content[sent:]


class ResultsSocket(Output):
    """Send every line to each of up to MAX_READERS; a slow reader loses whole lines, and only its own.

    `dropped` counts each line once for each reader that lost it. One thread at a time.
    """

    name = "socket"

    def __init__(self, path: Path, clock: Clock = SYSTEM_CLOCK) -> None:
        """Raises ConfigError (`results.socket`) for a path that is none of ours; a disk that refuses is `trouble`."""
        self.dropped: int = 0
        self._path, self._clock = path, clock
        self._readers: list[_Reader] = []
        self._listener: UnixListener | None = None
        self._open_at_s = 0.0
        self._open()

    def add(self, line: ResultLine) -> None:
        """Send the next line to every reader that is connected."""
        self._admit()
        self._push(line.encoded)

    def tick(self) -> float:
        """Admit new readers, and send the rest of lines. Return the seconds until the next call."""
        if self._listener is None and self._clock.monotonic_s() >= self._open_at_s:
            with suppress(ConfigError):  # as at the start: the disk has said no more than that it has no room
                self._open()
        self._admit()
        self.flush()
        return _RETRY_S if any(reader.rest for reader in self._readers) else _POLL_S

    def flush(self) -> None:
        """Send the rest of lines, as far as readers have room."""
        self._push(b"")

    def close(self) -> None:
        """Remove the socket file, unless it is another one by now."""
        if self._listener is not None:
            self._listener.close()
        ends_s = self._clock.monotonic_s() + _END_S
        while self._clock.monotonic_s() < ends_s and any(reader.rest for reader in self._readers):
            self._clock.sleep(_RETRY_S)
            self.flush()
        for reader in self._readers:
            reader.close()
        self._readers.clear()

    def _push(self, line: bytes) -> None:
        for reader in [*self._readers]:
            try:
                if not reader.push(line):
                    self.dropped += 1
            except OSError:  # noqa: PERF203  (only this reader has gone)
                self._remove(reader)

    def _open(self) -> None:
        """Listen, or put the disk's refusal into `trouble`. Raises ConfigError."""
        self._open_at_s = self._clock.monotonic_s() + _REOPEN_S
        try:
            self._listener = UnixListener(self._path, _MODE, MAX_READERS)
        except OSError as error:
            found = f"{self._path}: {error.strerror or error}"
            expected = "a path for a socket that the daemon owns"
            if error.errno not in _REFUSED:
                remedy = "choose another results.socket, or end the process that serves it"
                raise ConfigError("results.socket", found, expected, remedy) from None
            remedy = "make its disk writable; the next attempt follows by itself, and other outputs continue"
            self.trouble = AgentError("results.socket", found, expected, remedy)
        else:
            self.trouble = None

    def _admit(self) -> None:
        while self._listener is not None:
            try:
                connection, _ = self._listener.socket.accept()
            except OSError:  # nobody, or no descriptor to spare for them: they wait
                return
            if len(self._readers) >= MAX_READERS:  # a reader that has gone is noticed by a line alone
                for gone in [reader for reader in self._readers if reader.is_gone]:
                    self._remove(gone)
            if len(self._readers) < MAX_READERS:
                self._readers.append(_Reader(connection))
            else:
                log.warning("results=too_many_readers path=%s most=%d", self._path, MAX_READERS)
                connection.close()

    def _remove(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        reader.close()
