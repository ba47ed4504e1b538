"""Read what a process kept for the next one, whatever has become of it: parsers, and Journal (JSON lines).

A power cut or a full disk may have spoilt a file, so all is read with care. State that cannot be understood is started
again from scratch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import JsonValue

from agent.common.errors import AgentError
from calibrate.errors import TaredError
from engines.store.files import read_regular, replace_files

# Exceptions that parsing, converting and restoring raise for content that no tared has written.
_FOREIGN = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError, TaredError)
# Containers inside each other. Without this limit a file could be read that is too deep to be written again from a
# deeper call.
_MOST_DEEP = 31
_JOURNAL_SCHEMA = 1

T = TypeVar("T")


def parse_or_none(parse: Callable[[], T]) -> T | None:
    """Return the result of `parse`; None where it meets content that no tared has written."""
    try:
        return parse()
    except _FOREIGN:
        return None


def parse_state(content: bytes) -> Any:
    """Parse JSON as Python writes it, with infinity. Raises ValueError, RecursionError for anything else.

    An integer of more than 64 bits is refused too: nothing counts that far, and arithmetic with floats would raise
    later.
    """
    document = json.loads(content, parse_int=_integer)
    if is_deeper(document, _MOST_DEEP):
        raise ValueError(f"more than {_MOST_DEEP} containers inside each other")
    return document


def is_deeper(document: object, most: int) -> bool:
    """Return whether a JSON document has more than `most` containers inside each other."""
    level = [document]
    for _ in range(most + 1):
        containers = [node for node in level if isinstance(node, (dict, list))]
        if not containers:
            return False
        level = [child for node in containers for child in (node.values() if isinstance(node, dict) else node)]
    return True


def _integer(digits: str) -> int:
    value = int(digits)
    if abs(value) > sys.maxsize:
        raise ValueError("an integer of more than 64 bits")
    return value


def finite(value: Any) -> float:
    """Return a finite number. Raises ValueError for anything else."""
    if not (isinstance(value, (int, float)) and abs(value) <= sys.float_info.max):
        raise ValueError(f"{value!r} in place of a number")
    return float(value)


def share(value: Any) -> float:
    """Return a number in [0, 1]. Raises ValueError for anything else."""
    if not 0.0 <= finite(value) <= 1.0:
        raise ValueError(f"{value!r} in place of a value in [0, 1]")
    return float(value)


def count(value: Any) -> int:
    """Return an integer that is not negative. Raises ValueError for anything else."""
    if not (isinstance(value, int) and 0 <= value <= sys.maxsize):
        raise ValueError(f"{value!r} in place of a count")
    return value


class Journal:
    """The newest `values` by key, in one file of JSON lines, which lives until `finish`.

    A value that is removed from `values` leaves the file with the next `shorten`.

    A power cut may tear the last line, or lose the last seconds, since not every line is forced to the disk. Lines from
    the first bad one on are dropped; their values have to be computed again.
    """

    def __init__(self, path: Path, identity: str, code: str = "plan.journal") -> None:
        """Open or start the file.

        Args:
            identity: A fingerprint of everything the values depend on. A file of another identity, or one that cannot
                be read, is started again from scratch.
            code: Code of the AgentError that is raised where the file cannot be written.
        """
        self._path = path
        self._code = code
        self.values: dict[str, JsonValue] = {}
        self._header = _line({"schema": _JOURNAL_SCHEMA, "identity": identity})
        with self._translating_errors():
            kept = self._load() if path.exists() else 0
            with path.open("r+b" if kept else "wb") as file:
                if kept:
                    file.truncate(kept)
                else:
                    file.write(self._header)

    def get(self, key: str) -> JsonValue | None:
        """Return the newest value of a key; None without one."""
        return self.values.get(key)

    def put(self, key: str, value: JsonValue) -> None:
        """Append a value. Raises AgentError."""
        with self._translating_errors(), self._path.open("ab") as file:
            file.write(_line([key, value]))
        self.values[key] = value

    def get_or_compute(self, key: str, compute: Callable[[], T]) -> T:
        """Return the value of a key; compute and append it if it is not known.

        The value must be what JSON gives back: lists, no tuples. Raises AgentError.
        """
        if key not in self.values:
            self.put(key, compute())  # type: ignore[arg-type]  # json.dumps refuses what is no JSON
        return self.values[key]  # type: ignore[return-value]  # what an earlier run computed by the same function

    def shorten(self) -> None:
        """Rewrite the file with the newest value of each key only, all or nothing. Raises AgentError."""
        lines = [_line([key, value]) for key, value in self.values.items()]
        with self._translating_errors():
            replace_files({self._path: b"".join([self._header, *lines])})

    def finish(self) -> None:
        """Remove the file, once the result that it led to is written. Raises AgentError."""
        with self._translating_errors():
            self._path.unlink(missing_ok=True)

    def _load(self) -> int:
        """Read the values of a file with this journal's header; return the size of its good part in bytes."""
        first, *lines = read_regular(self._path).splitlines(keepends=True) or [b""]
        if first != self._header:
            return 0
        kept = len(first)
        for line in lines:
            pair = parse_or_none(partial(_parse_line, line))
            if pair is None:
                break
            self.values.update([pair])
            kept += len(line)
        return kept

    @contextmanager
    def _translating_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            remedy = f"free some space there, or choose another place than {self._path.parent}"
            found = f"{self._path}: {error.strerror}"
            raise AgentError(self._code, found, "a writable folder with room", remedy) from error


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _parse_line(line: bytes) -> tuple[str, JsonValue]:
    """Return the key and the value of a line. Raises ValueError, RecursionError for half a line, or anything else."""
    pair = parse_state(line)
    if not (line.endswith(b"\n") and isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str)):
        raise ValueError("no pair of a key and a value")
    return pair[0], pair[1]
