"""What a process has found so far, in a file that outlives it: after an interruption it goes on where it was."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from agent.errors import AgentError
from agent.state_file import parse_state, understood
from engines.files import replace_files

_SCHEMA = 1

T = TypeVar("T")


class Journal:
    """Values by key in one file of JSON lines, which lives until `finish`.

    identity: whatever the values follow from. A file of another identity, or none that can be read, is started anew. A
    power cut may tear the last line, or lose the last seconds, for not every line is forced to the disk: what follows
    the last good line is dropped, and found out again. code: of the AgentError that is raised where it cannot write.
    """

    def __init__(self, path: Path, identity: str, code: str = "plan.journal") -> None:
        self._path = path
        self._code = code
        self._values: dict[str, JsonValue] = {}
        self._header = _line({"schema": _SCHEMA, "identity": identity})
        try:
            kept = self._read(self._header) if path.exists() else 0
            with path.open("r+b" if kept else "wb") as file:
                if kept:
                    file.truncate(kept)
                else:
                    file.write(self._header)
        except OSError as error:
            raise self._refused(error) from error

    @property
    def size(self) -> int:
        """How many values are known."""
        return len(self._values)

    def get(self, key: str) -> JsonValue | None:
        """The newest value of a key; None where there is none."""
        return self._values.get(key)

    def put(self, key: str, value: JsonValue) -> None:
        """Append a value. Raises AgentError."""
        try:
            with self._path.open("ab") as file:
                file.write(_line([key, value]))
        except OSError as error:
            raise self._refused(error) from error
        self._values[key] = value

    def items(self) -> Iterator[tuple[str, JsonValue]]:
        """All keys with their newest values, in the order in which the keys came."""
        yield from self._values.items()

    def forget(self, key: str) -> None:
        """Drop a value; from the file with the next `shorten`."""
        self._values.pop(key, None)

    def remember(self, key: str, compute: Callable[[], T]) -> T:
        """The value of a key, computed where it is not known. It must be as JSON gives it back: lists, no tuples."""
        if key not in self._values:
            self.put(key, compute())  # type: ignore[arg-type]  # json.dumps refuses what is no JSON
        return self._values[key]  # type: ignore[return-value]  # what an earlier run computed by the same function

    def shorten(self) -> None:
        """Write the file anew, with the newest value of every key only: all or nothing. Raises AgentError."""
        lines = [_line([key, value]) for key, value in self._values.items()]
        try:
            replace_files({self._path: b"".join([self._header, *lines])})
        except OSError as error:
            raise self._refused(error) from error

    def finish(self) -> None:
        """Remove the file: the result that it led to is written. Raises AgentError."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            raise self._refused(error) from error

    def _read(self, header: bytes) -> int:
        """Take the values of a file that begins with `header`; how many of its bytes are good. Raises OSError."""
        first, *lines = self._path.read_bytes().splitlines(keepends=True) or [b""]
        if first != header:
            return 0
        kept = len(first)
        for line in lines:
            pair = understood(partial(_parse, line))
            if pair is None:
                break
            self._values.update([pair])
            kept += len(line)
        return kept

    def _refused(self, error: OSError) -> AgentError:
        remedy = f"make room there, or choose another place than {self._path.parent}"
        return AgentError(self._code, f"{self._path}: {error.strerror}", "a writable folder with room", remedy)


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _parse(line: bytes) -> tuple[str, JsonValue]:
    """What `_line` made of a key and a value. Raises ValueError, RecursionError for half of it, or anything else."""
    pair = parse_state(line)
    if not (line.endswith(b"\n") and isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise ValueError("no pair of a key and a value")
    return pair[0], pair[1]
