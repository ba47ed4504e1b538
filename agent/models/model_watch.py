"""Watch the model's file on the disk, and report new content once it has been written to its end."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

log = logging.getLogger(__package__)

# Seconds between two polls. A file that is the same at two polls is not being written any more.
POLL_S = 2.0
_CHUNK_BYTES = 1 << 20

Stamp = tuple[tuple[str, int, int, int], ...]


def content_of(path: Path) -> str:
    """Return the SHA-256 over the model's file and the external tensor files that it names. Raises OSError."""
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


class ModelWatch(threading.Thread):
    """A thread that polls the model's file.

    It calls `on_change(content)` in that thread once for each new content. An empty string says that the file holds the
    served content again.
    """

    def __init__(self, path: Path, serving: str, on_change: Callable[[str], None], poll_s: float = POLL_S) -> None:
        """Watch `path` from `start` on. serving: the content that is served, as `content_of` returns it."""
        super().__init__(name="model-watch", daemon=True)
        self._path = path
        self._serving = self._reported = serving
        self._on_change = on_change
        self._poll_s = poll_s
        self._files = [path]
        self._last_stamp: Stamp = ()  # at the last poll
        self._read_stamp: Stamp = ()  # of the content that was read last
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the thread; waits for the file that it is just reading."""
        self._ended.set()
        if self.is_alive():
            self.join()

    def run(self) -> None:
        while not self._ended.wait(self._poll_s):
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


def _stamp(files: Sequence[Path]) -> Stamp:
    """Return names, inodes, sizes and times, one of which changes with the content. Raises OSError."""
    stats = ((file.name, file.stat()) for file in files)
    return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _files(path: Path) -> list[Path]:
    """Return the model's file and the external tensor files that it names. Raises OSError."""
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception:  # whatever protobuf raises for a file that is no model: then there are no other files
        return [path]
    names = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    external = (path.parent / name for name in sorted(names))
    return [path, *(file for file in external if file.is_file())]
