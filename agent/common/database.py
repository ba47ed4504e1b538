"""Open SQLite files of tared's own: migrate the schema forward, set a damaged file aside, refuse a newer one."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from engines.store.files import remove

Access = Literal["read", "write"]

_PATIENCE_S = 1.0  # for another process that has the file open; the supervisor's watchdog cannot wait for long
_RETRY_S = 0.01
_MOST_DAMAGED = 3  # files that were set aside
_COMPANIONS = ("-journal", "-wal", "-shm")  # files that SQLite keeps next to the database, under its name


@dataclass(frozen=True)
class Database:
    """A SQLite file at `path`: how to open it, and what to say where that fails.

    Args:
        path: The file; its folder must exist.
        name: Prefix of the error codes: `{name}.read`, `.write`, `.schema` and `.damaged`.
        holds: The content in words, for errors.
        loss: What is lost with the file, in words, for errors.
        migrations: The script at index n migrates a file of schema n to schema n + 1. Empty ones at the beginning
            stand for schemas that are no longer read.
        pragmas: Executed at the start of each connection.
        patience_s: How long to wait for another process that has the file open.
        repair: Called with the damage in words; makes the file usable again, and returns the error to raise. None: the
            file is set aside, and the next connection starts a new one.
    """

    path: Path
    name: str
    holds: str
    loss: str
    migrations: Sequence[str]
    pragmas: Sequence[str]
    patience_s: float = _PATIENCE_S
    clock: Clock = SYSTEM_CLOCK
    repair: Callable[[str], AgentError] | None = None

    def connect(self, access: Access = "write", any_thread: bool = False) -> sqlite3.Connection:
        """Open the file, with today's schema and in no transaction.

        Args:
            access: "read" or "write"; names the error code.
            any_thread: Threads other than this one will use the connection too.

        Raises AgentError:
            .schema         a newer tared wrote the file
            .damaged        the file is damaged and was set aside
            .read, .write   the file cannot be opened
        """
        with self.translating_errors(access):
            if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
                raise self._damage("not a regular file")  # a pipe, for one, would block
            db = sqlite3.connect(
                self.path, timeout=self.patience_s, isolation_level=None, check_same_thread=not any_thread
            )
            try:
                self._prepare(db)
            except BaseException:
                db.close()
                raise
            return db

    @contextmanager
    def transaction(self, access: Access) -> Iterator[sqlite3.Connection]:
        """Open a connection for one transaction; an exception inside undoes it. Raises AgentError as `connect`."""
        with closing(self.connect(access)) as db, self.transaction_on(db, access):
            yield db

    @contextmanager
    def transaction_on(self, db: sqlite3.Connection, access: Access = "write") -> Iterator[None]:
        """Run a transaction on this connection, as `transaction`."""
        with self.translating_errors(access):
            db.execute("BEGIN IMMEDIATE" if access == "write" else "BEGIN")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error, UnicodeDecodeError):  # a damaged file may refuse that, too
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def translating_errors(self, access: Access) -> Iterator[None]:
        """Raise errors of SQLite and the disk as AgentError; set a damaged file aside."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if is_damage(error):
                raise self._damage(str(error)) from error
            raise self.access_error(access, str(error)) from error
        except UnicodeDecodeError as error:  # SQLite's message quotes a name in a damaged schema
            raise self._damage("a name that is not UTF-8") from error

    def set_aside(self, found: str) -> AgentError:
        """Rename a damaged file to `NAME.damaged.N`, for later inspection; return the error to raise.

        The files that SQLite keeps next to it are renamed along. A write-ahead log may hold pages that nobody has
        copied into the file yet, a journal pages to be undone; both would corrupt the new file. A connection that still
        has the damaged file open is of no use any more and may be closed.
        """
        aside = self.path
        try:
            aside = make_room_aside(self.path)
            self.path.replace(aside)
            move_companions(self.path, aside)
        except OSError as error:
            found, aside = f"{found}; it cannot be moved: {error.strerror}", self.path
        remedy = f"check the disk; a new file is started, and {self.loss}"
        return AgentError(f"{self.name}.damaged", f"{aside}: {found}", f"{self.holds}, as tared wrote it", remedy)

    def access_error(self, access: Access, found: str) -> AgentError:
        """Return the error for a file that cannot be read, or written."""
        remedy = "free some space there, or correct its permissions"
        return AgentError(f"{self.name}.{access}", f"{self.path}: {found}", f"{self.holds}, kept in this file", remedy)

    def check_schema(self, db: sqlite3.Connection) -> int:
        """Return the file's schema; 0 for a new file. Raises AgentError (`.schema`) if tared cannot read it."""
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema and schema not in readable_schemas(self.migrations):
            raise AgentError(
                f"{self.name}.schema",
                f"{self.path} of schema {schema}",
                show_schemas(self.migrations),
                f"run the tared that wrote it, or remove the file: {self.loss}",
            )
        return int(schema)

    def _damage(self, found: str) -> AgentError:
        """Return the error to raise for a damaged file."""
        return self.repair(found) if self.repair is not None else self.set_aside(found)

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Set the pragmas and migrate the file to today's schema."""
        today = len(self.migrations)
        schema = self.check_schema(db)
        for pragma in self.pragmas:
            self._set_pragma(db, pragma)
        if schema == today:
            return
        # Two processes may open a new file at once: one migrates it, the other waits here, and finds it migrated.
        db.execute("BEGIN IMMEDIATE")
        for statement in _statements("".join(self.migrations[self.check_schema(db) :])):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {today}")
        db.execute("COMMIT")

    def _set_pragma(self, db: sqlite3.Connection, pragma: str) -> None:
        """Retry while the file is locked: SQLite's own timeout does not cover a change of the journal mode."""
        give_up_s = self.clock.monotonic_s() + self.patience_s
        while True:
            try:
                db.execute(f"PRAGMA {pragma}")
                return
            except sqlite3.OperationalError as error:
                if "locked" not in str(error) or self.clock.monotonic_s() > give_up_s:
                    raise
            self.clock.sleep(_RETRY_S)


def make_room_aside(path: Path) -> Path:
    """Return the name for a damaged file that is set aside; the oldest beyond the newest three are removed.

    Raises OSError.
    """
    numbers = sorted({_damaged_number(each) for each in path.parent.glob(f"{path.name}.damaged.*")} - {0})
    for oldest in numbers[: len(numbers) + 1 - _MOST_DAMAGED]:
        for ending in ("", *_COMPANIONS):
            with suppress(FileNotFoundError):
                remove(_with_suffix(path, f".damaged.{oldest}{ending}"))
    return _with_suffix(path, f".damaged.{numbers[-1] + 1 if numbers else 1}")


def move_companions(path: Path, aside: Path) -> None:
    """Rename the files that SQLite keeps next to a database, as the database itself is renamed. Raises OSError."""
    for companion in _COMPANIONS:
        with suppress(FileNotFoundError):
            _with_suffix(path, companion).replace(_with_suffix(aside, companion))


def readable_schemas(migrations: Sequence[str]) -> range:
    """Return the schemas that can be read: those made by the first script that is not empty, and by all later ones.

    >>> readable_schemas(["", "CREATE TABLE a (b);", "ALTER TABLE a ADD COLUMN c;"])
    range(2, 4)
    """
    first = next(number for number, script in enumerate(migrations) if script)
    return range(first + 1, len(migrations) + 1)


def show_schemas(migrations: Sequence[str]) -> str:
    """Return the readable schemas in words, for an error."""
    schemas = readable_schemas(migrations)
    return f"schema {schemas[0]}" if len(schemas) == 1 else f"schema {schemas[0]} to {schemas[-1]}"


def is_damage(error: sqlite3.Error | OSError) -> bool:
    """Return True for an error by the file's content, and not by the disk or another process.

    SQLite raises DatabaseError itself, and no subclass, for a file that is no database or no longer one.
    """
    damages = ("no such table", "no such column", "table ", "Could not decode")
    return type(error) is sqlite3.DatabaseError or (
        isinstance(error, sqlite3.OperationalError) and str(error).startswith(damages)
    )


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements: `executescript` would commit the transaction that is open."""
    statement = ""
    for piece in script.split(";"):
        statement += f"{piece};"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}{suffix}")


def _damaged_number(path: Path) -> int:
    """Return N of `NAME.damaged.N`, or of its companion files; 0 for a file that tared did not name."""
    match = re.fullmatch(rf".*\.damaged\.(\d+)(?:{'|'.join(_COMPANIONS)})?", path.name)
    return int(match[1]) if match is not None else 0
