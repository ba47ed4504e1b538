"""The model's file on the disk: a new one there is news once it has been written to its end."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
from onnx import TensorProto

log = logging.getLogger(__package__)

LOOK_S = 2.0  # between two looks; a file that is the same at two of them is not being written any more
_CHUNK_BYTES = 1 << 20

Stamp = tuple[tuple[str, int, int, int], ...]


def content_of(path: Path) -> str:
    """SHA-256 over the model's file and the tensors that lie in files beside it. Raises OSError."""
    digest = hashlib.sha256()
    for file in _files(path):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


class ModelWatch:
    """A thread that looks at the model's file, and calls on_change(content) there when it holds something else.

    serving: the content that is served. A content is told of once, until there is another; empty stands for `serving`.
    """

    def __init__(self, path: Path, serving: str, on_change: Callable[[str], None], look_s: float = LOOK_S) -> None:
        self._path = path
        self._serving = self._told = serving
        self._on_change = on_change
        self._look_s = look_s
        self._files = [path]
        self._before: Stamp = ()  # at the look before
        self._read: Stamp = ()  # of what was read last
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="model-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, at most after the file it is just reading."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        try:
            stamp = _stamp(self._files)
            if stamp == self._before != self._read:
                content, self._read = content_of(self._path), stamp
                if content != self._told and _stamp(self._files) == stamp:
                    self._told = content
                    self._on_change(content if content != self._serving else "")
            elif stamp != self._before:
                self._files = _files(self._path)
            self._before = _stamp(self._files)
        except OSError as error:  # while it is exchanged it may not be there at all
            log.debug("model=%s error=%r", self._path, str(error))
            self._before = ()


def _stamp(files: Sequence[Path]) -> Stamp:
    """What a change of the files would change. Raises OSError."""
    found = ((file.name, file.stat()) for file in files)
    return tuple((name, each.st_ino, each.st_size, each.st_mtime_ns) for name, each in found)


def _files(path: Path) -> list[Path]:
    """The model's file, and those beside it that it names. Raises OSError."""
    try:
        model = onnx.load(path, load_external_data=False)
    except OSError:
        raise
    except Exception:  # whatever protobuf raises for a file that is none: then that file is all there is
        return [path]
    names = {
        entry.value
        for tensor in model.graph.initializer
        if tensor.data_location == TensorProto.EXTERNAL
        for entry in tensor.external_data
        if entry.key == "location"
    }
    beside = (path.parent / name for name in sorted(names))
    return [path, *(file for file in beside if file.is_file())]
