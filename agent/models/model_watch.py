"""Watch the model's file on the disk, and report new content once it has been written to its end."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import FaultLog
from agent.models.external_data import ExternalNames, external_names_apart
from engines.store.files import open_regular

log = logging.getLogger(__package__)

# Seconds between two polls. A file that is the same at two polls is not being written any more.
POLL_S = 2.0
_CHUNK_BYTES = 1 << 20
_END_S = 2.0

Stamp = tuple[tuple[str, int, int, int], ...]


def content_of(path: Path, names: ExternalNames = external_names_apart) -> str:
    """Return the SHA-256 over the model's file and the external tensor files that it names. Raises OSError.

    names: returns the names of those; by default another process reads the file.
    """
    digest = hashlib.sha256()
    for file in _files(path, names):
        with open_regular(file) as opened:
            left = os.fstat(opened.fileno()).st_size  # a device may have no end
            digest.update(f"{file.name} {left}\n".encode())
            while left and (chunk := opened.read(min(left, _CHUNK_BYTES))):
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest()


class ModelWatch(threading.Thread):
    """A thread that polls the model's file.

    It calls `on_change(content)` in that thread once for each new content. An empty string says that the file holds the
    served content again.
    """

    def __init__(self, path: Path, serving: str, on_change: Callable[[str], None], clock: Clock = SYSTEM_CLOCK) -> None:
        """Watch `path` from `start` on. serving: the content that is served, as `content_of` returns it."""
        super().__init__(name="model-watch", daemon=True)
        self._path = path
        self._serving = self._reported = serving
        self._on_change = on_change
        self._clock = clock
        self._files = [path]
        self._last_stamp: Stamp = ()  # at the last poll
        self._read_stamp: Stamp = ()  # that of the content that was read last
        self._ended = threading.Event()
        self._faults = FaultLog(log)

    def stop(self) -> None:
        """End the thread; waits a little for the file that it is just reading, whose disk may hang."""
        self._ended.set()
        if self.is_alive():
            self.join(_END_S)

    def run(self) -> None:
        while not self._clock.wait(self._ended, POLL_S):
            self._poll()

    def _poll(self) -> None:
        try:
            stamp = _stamp(self._files)
            if stamp == self._last_stamp != self._read_stamp:
                content, self._read_stamp = content_of(self._path), stamp
                if content != self._reported and _stamp(self._files) == stamp:
                    self._reported = content
                    self._on_change(content if content != self._serving else "")
            elif stamp != self._last_stamp:
                self._files = _files(self._path)
            self._last_stamp = _stamp(self._files)
        except OSError as error:  # while it is exchanged it may not be there at all
            log.debug("model=%s error=%r", self._path, str(error))
            self._last_stamp = ()
        except Exception as error:  # the next poll may succeed
            self._faults.note("model watch", error)
            self._last_stamp = ()


def _stamp(files: Sequence[Path]) -> Stamp:
    """Return names, inodes, sizes and times, one of which changes with the content. Raises OSError."""
    stats = ((file.name, file.stat()) for file in files)
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files(path: Path, names: ExternalNames = external_names_apart) -> list[Path]:
    """Return the model's file and the external tensor files in its folder that it names. Raises OSError."""
    with open_regular(path):  # else nobody has to read it
        pass
    folder = path.parent.resolve()
    external = (folder / name for name in names(path))
    return [path, *(file for file in external if file.resolve().is_relative_to(folder) and file.is_file())]
