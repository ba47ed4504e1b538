"""A SQLite file of tared's own: its schema migrates forward, a damaged one is moved aside, a newer one is refused."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agent.common.errors import AgentError
from engines.store.files import remove

_PATIENCE_S = 1.0  # the supervisor's watchdog cannot wait for long
_LOOK_S = 0.01
_MOST_DAMAGED = 3  # files that were moved aside
_COMPANIONS = ("-journal", "-wal", "-shm")  # what SQLite keeps beside a file, under its name


@dataclass(frozen=True)
class Database:
    """What it takes to open the file at `path`, and what to say where that fails.

    name: of its errors, `{name}.read`, `.write`, `.schema` and `.damaged`. holds: what it holds, in words. loss: what
    goes with it, in words. migrations: the script at n migrates a file of schema n to schema n + 1. pragmas: what each
    connection begins with. patience_s: with another process that has the file open.
    """

    path: Path
    name: str
    holds: str
    loss: str
    migrations: Sequence[str]
    pragmas: Sequence[str]
    patience_s: float = _PATIENCE_S

    def connect(self, what: str = "write", any_thread: bool = False) -> sqlite3.Connection:
        """Today's schema, in no transaction. what: "read" or "write". any_thread: not only this one will use it.

        Raises AgentError: `.schema` for a file of a newer tared, `.damaged` for one that was moved aside, `.read` or
        `.write` for one that cannot be opened.
        """
        with self.translating_errors(what):
            if self.path.is_dir():
                raise self.set_aside("a folder")
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
    def transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        """On a connection of its own; whatever is raised inside undoes it. Raises AgentError as `connect`."""
        with closing(self.connect(what)) as db, self.transaction_on(db, what):
            yield db

    @contextmanager
    def transaction_on(self, db: sqlite3.Connection, what: str = "write") -> Iterator[None]:
        """A transaction on this connection, as `transaction`."""
        with self.translating_errors(what):
            db.execute("BEGIN IMMEDIATE" if what == "write" else "BEGIN")
            try:
                yield
                db.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # a damaged file may refuse that, too
                    db.execute("ROLLBACK")
                raise

    @contextmanager
    def translating_errors(self, what: str) -> Iterator[None]:
        """What SQLite and the disk raise inside is raised as AgentError; a damaged file is moved aside."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            if type(error) is sqlite3.DatabaseError:  # what SQLite says of a file that is none, or no longer one
                raise self.set_aside(str(error)) from error
            raise self.access_error(what, str(error)) from error

    def set_aside(self, found: str) -> AgentError:
        """Let a damaged file lie beside the new one, for whoever wants to look; what to tell of it.

        What SQLite keeps beside it goes along, under its new name: a write-ahead log may have what nobody has copied
        into the file yet, a journal what is to be undone in it, and to the new file both would be poison. A connection
        that still has it open may be closed then, and is of no other use.
        """
        numbers = sorted({_number(path) for path in self.path.parent.glob(f"{self.path.name}.damaged.*")} - {0})
        aside = self._aside(numbers[-1] + 1 if numbers else 1)
        try:
            for oldest in numbers[: len(numbers) + 1 - _MOST_DAMAGED]:
                for ending in ("", *_COMPANIONS):
                    with suppress(FileNotFoundError):
                        remove(_beside(self._aside(oldest), ending))
            self.path.replace(aside)
            for companion in _COMPANIONS:
                with suppress(FileNotFoundError):
                    _beside(self.path, companion).replace(_beside(aside, companion))
        except OSError as error:
            found, aside = f"{found}; it cannot be moved: {error.strerror}", self.path
        remedy = f"check the disk; a new one is begun, and {self.loss}"
        return AgentError(f"{self.name}.damaged", f"{aside}: {found}", f"{self.holds}, as it was written", remedy)

    def _aside(self, number: int) -> Path:
        return _beside(self.path, f".damaged.{number}")

    def access_error(self, what: str, found: str) -> AgentError:
        """What to tell of a file that cannot be read, or written."""
        remedy = "make room there, or correct its rights"
        return AgentError(f"{self.name}.{what}", f"{self.path}: {found}", f"{self.holds}, in a file of its own", remedy)

    def _prepare(self, db: sqlite3.Connection) -> None:
        """Bring the file to today's schema, and to what survives a power cut."""
        today = len(self.migrations)
        schema = self._schema(db)
        for pragma in self.pragmas:
            self._set(db, pragma)
        if schema == today:
            return
        db.execute("BEGIN IMMEDIATE")  # of two that begin a file at once, one migrates it, and the other has waited
        for statement in _statements("".join(self.migrations[self._schema(db) :])):
            db.execute(statement)
        db.execute(f"PRAGMA user_version = {today}")
        db.execute("COMMIT")

    def _schema(self, db: sqlite3.Connection) -> int:
        """Raises AgentError for one of a newer tared."""
        today = len(self.migrations)
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema > today:
            raise AgentError(
                f"{self.name}.schema",
                f"{self.path} of schema {schema}",
                f"schema {today} or an older one",
                f"run the tared that wrote it, or remove the file: {self.loss}",
            )
        return int(schema)

    def _set(self, db: sqlite3.Connection, pragma: str) -> None:
        """SQLite waits for nobody where a file is to have another journal."""
        give_up_at = time.monotonic() + self.patience_s
        while (refusal := _refusal(db, f"PRAGMA {pragma}")) is not None:
            if "locked" not in str(refusal) or time.monotonic() > give_up_at:
                raise refusal
            time.sleep(_LOOK_S)


def _refusal(db: sqlite3.Connection, sql: str) -> sqlite3.OperationalError | None:
    try:
        db.execute(sql)
    except sqlite3.OperationalError as error:
        return error
    return None


def _statements(script: str) -> Iterator[str]:
    """One by one: `executescript` would commit what has begun."""
    statement = ""
    for piece in script.split(";"):
        statement += f"{piece};"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def _beside(path: Path, companion: str) -> Path:
    return path.with_name(f"{path.name}{companion}")


def _number(path: Path) -> int:
    """Of a file that was moved aside, or of what went along with it; 0 for a stranger's."""
    found = re.fullmatch(rf".*\.damaged\.(\d+)(?:{'|'.join(_COMPANIONS)})?", path.name)
    return int(found[1]) if found is not None else 0
