"""What another process left in the state directory: read with care, for a power cut or a full disk may have spoilt it.

Whatever it holds, a daemon starts: what cannot be understood is begun anew. Only what a newer tared wrote is refused,
and left alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue

from agent.common.errors import AgentError
from calibrate.errors import TaredError
from engines.store.files import replace_files

# What parsing, converting and restoring raise for what no tared has written.
_FOREIGN = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, TaredError)
_MOST_DEEP = 32  # containers inside each other: what is only just read could not be written again from a deeper call

T = TypeVar("T")


def parse_or_none(take: Callable[[], T]) -> T | None:
    """What `take` makes of a file; None where it meets what no tared has written."""
    try:
        return take()
    except _FOREIGN:
        return None


def parse_state(content: bytes) -> Any:
    """JSON as Python writes it, with infinity. Raises ValueError, RecursionError for anything else.

    So for an integer of more than 64 bits: nothing counts so far, and arithmetic with floats would raise later.
    """
    document = json.loads(content, parse_int=_integer)
    level = [document]
    for _ in range(_MOST_DEEP):
        containers = [node for node in level if isinstance(node, (dict, list))]
        if not containers:
            return document
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    raise ValueError(f"{_MOST_DEEP} containers inside each other")


def _integer(digits: str) -> int:
    value = int(digits)
    if abs(value) > sys.maxsize:
        raise ValueError("an integer of more than 64 bits")
    return value


class StateFile:
    """One JSON object of a schema of its own. A disk that refuses is told of once, and the process goes on."""

    def __init__(
        self,
        path: Path | None,
        schema: int,
        code: str,
        on_error: Callable[[AgentError], None],
        added: Mapping[int, Mapping[str, Any]] | None = None,
    ) -> None:
        """path: None keeps nothing. code: of the AgentError for a disk that refuses. added: by an older schema that is
        still read, what it did not have yet, with the values that stand for nothing."""
        self._path = path
        self._added = added or {}
        self._schema = schema
        self._code = code
        self._on_error = on_error
        self._told = False

    def read(self, take: Callable[[Mapping[str, Any]], T]) -> T | None:
        """What `take` makes of the object; None where there is none of this schema, or it cannot be understood.

        Raises AgentError (`NAME.schema`, beside the `NAME.write` of a disk that refuses) for one of a newer tared.
        """
        path = self._path
        if path is None:
            return None
        document: Any = parse_or_none(lambda: parse_state(path.read_bytes()))
        schema = document.get("schema") if isinstance(document, dict) else None
        if isinstance(schema, int) and schema > self._schema:
            raise AgentError(
                self._code.replace(".write", ".schema"),
                f"{path} of schema {schema}",
                f"schema {self._schema} or an older one",
                "run the tared that wrote it, or remove the file: it is begun anew",
            )
        return parse_or_none(lambda: take(self._of_today(document)))

    def write(self, document: Mapping[str, Any]) -> None:
        """Put an object in the place of the one before, all or nothing."""
        try:
            self.replace(document)
        except AgentError as error:
            if not self._told:
                self._told = True
                self._on_error(error)

    def replace(self, document: Mapping[str, Any]) -> None:
        """As `write`, for who cannot go on without. Raises AgentError (the code of this file) each time."""
        if self._path is None:
            return
        try:
            replace_files({self._path: (json.dumps({"schema": self._schema, **document}) + "\n").encode()})
        except OSError as error:
            found = f"{self._path}: {error.strerror}"
            raise AgentError(self._code, found, "a writable state directory", "make room there") from error

    def _of_today(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Raises what `parse_or_none` takes for what is of no schema that is still read."""
        schema = document["schema"]
        if schema in self._added:
            return {**document, **self._added[schema]}
        if schema != self._schema:
            raise ValueError(f"schema {schema!r}")
        return document


_SCHEMA = 1


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

    def get_or_compute(self, key: str, compute: Callable[[], T]) -> T:
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
            pair = parse_or_none(partial(_parse, line))
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
