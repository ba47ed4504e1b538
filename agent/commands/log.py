"""Which signed commands may have been carried out although the log of commands does not know them."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os.path import lexists
from pathlib import Path
from typing import Any

from agent.common.database import Database
from agent.common.errors import AgentError
from agent.common.state_files import StateFile
from agent.contract.commands import CommandResult
from agent.contract.wire import MessageError
from agent.mqtt.message import Reply

_SCHEMA = 1


class ReplayGuard:
    """What is known of the commands that a log of commands has lost or forgotten, in a file of its own beside it.

    The log of a new board has lost nothing, and refuses nothing: such a board has carried out no command, and its clock
    may be wrong at its first start. Any other log that is begun anew refuses what was issued no later than the newest
    command that the old one took, by the clocks of their senders: this board's may have jumped. Where that is unknown
    too, because the file is damaged or an older tared had none, it is the time of this start.
    """

    def __init__(self, path: Path, log_exists: bool, on_error: Callable[[AgentError], None]) -> None:
        """log_exists: whether there is a log of commands already. on_error hears of a disk that refuses.

        Raises AgentError (`command.schema`).
        """
        self._file = StateFile(path, _SCHEMA, "command.write", on_error)
        known = self._file.read(_take)
        self._newest, self._begun, self._forgotten = known or (0.0, 0.0, 0.0)
        if known is None and (log_exists or lexists(path)):
            self._newest = time.time()
            self._file.write(self._document)

    def log_lost(self) -> None:
        """The log is begun anew."""
        if self._begun != self._newest:
            self._begun = self._newest
            self._file.write(self._document)

    def check(self, issued: float, expires: float) -> None:
        """Of a signed command that the log does not know; Unix times in seconds. Raises AgentError
        (`command.forgotten`)."""
        if issued > self._begun and expires > self._forgotten:
            return
        found = "a command from before the log of commands began, or as old as what it has forgotten"
        expected = "one of which it is known that it was not carried out"
        raise AgentError("command.forgotten", found, expected, "send it anew")

    def note(self, issued: float, forgotten: float) -> None:
        """Before a signed command is carried out; durable when this returns. forgotten: the latest expiry of commands
        that the log has removed, by a clock that may have jumped ahead. Raises AgentError (`command.write`)."""
        self._newest, self._forgotten = max(self._newest, issued), max(self._forgotten, forgotten)
        self._file.replace(self._document)

    @property
    def _document(self) -> dict[str, float]:
        return {"newest": self._newest, "begun": self._begun, "forgotten": self._forgotten}


def _take(document: Mapping[str, Any]) -> tuple[float, float, float]:
    return float(document["newest"]), float(document["begun"]), float(document["forgotten"])


MEMORY_S = 30 * 86_400.0  # and as long as a command may be valid: what is forgotten has expired
MOST_ROWS = 10_000
_MIGRATIONS = (
    """
    CREATE TABLE commands (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        digest TEXT NOT NULL,
        expires_wall REAL NOT NULL,
        received_wall REAL NOT NULL,
        result TEXT NOT NULL,
        final INTEGER NOT NULL,
        delivered INTEGER NOT NULL DEFAULT 0
    );
    CREATE INDEX undelivered ON commands (delivered) WHERE delivered = 0;
    """,
    """
    ALTER TABLE commands ADD COLUMN reply_topic TEXT;
    ALTER TABLE commands ADD COLUMN reply_correlation BLOB;
    """,
)
_PRAGMAS = ("synchronous = EXTRA",)  # with a rollback journal FULL may lose the last commit


class CommandLog:
    """Accepted commands and their ends, in the file at `path`, opened for each transaction; one thread uses it.

    A damaged file is moved aside, told of as `command.damaged`, and begun anew: what was signed before that is refused,
    see ReplayGuard, whose file has the name `path` with `.json` for its ending. What could not be written is kept in
    memory, and written with whatever is written next.
    """

    def __init__(self, path: Path, on_error: Callable[[AgentError], None], most_rows: int = MOST_ROWS) -> None:
        """on_error hears of a file that is damaged, and of a disk that refuses an end. Raises AgentError
        (`command.schema`) for the file of a newer tared."""
        holds, loss = "the log of commands", "an unsigned command that is sent again may be carried out again"
        self._database = Database(path, "command", holds, loss, _MIGRATIONS, _PRAGMAS)
        self._on_error = on_error
        self._most_rows = most_rows
        self._owed: dict[str, CommandResult] = {}  # ends that the disk refused
        self._delivered: set[str] = set()  # ids whose end the broker has, not yet written
        path.parent.mkdir(parents=True, exist_ok=True)
        self._bound = ReplayGuard(path.with_suffix(".json"), not _is_missing(path), on_error)
        try:
            self._check()
        except AgentError as error:
            if error.code == "command.schema":
                raise
            on_error(error)

    def accept(
        self,
        command_id: str,
        digest: str,
        expires: float,
        now: float,
        issued: float | None = None,
        reply: Reply | None = None,
    ) -> None:
        """Before a command is carried out; durable when this returns.

        digest: of what was asked. expires, now, issued: Unix times in seconds; issued: of a signed one. reply: where
        its end is wanted too, after a restart as well. Raises
        AgentError: `command.log` where the disk refuses, `command.full` where all that are remembered are still valid,
        so that none may be forgotten, `command.forgotten` for a signed one that may have been carried out.
        """
        accepted = CommandResult(id=command_id, status="ACCEPTED")
        back = (reply.topic, reply.correlation) if reply is not None else (None, None)
        row = (command_id, digest, expires, now, accepted.to_json().decode(), *back)
        columns = "id, digest, expires_wall, received_wall, result, reply_topic, reply_correlation, final"
        try:
            with self._transaction("write") as db:
                if issued is not None:
                    self._bound.check(issued, expires)
                self._settle(db)
                forgotten = self._forget(db, now)
                if issued is not None or forgotten:
                    self._bound.note(min(issued or 0.0, expires), forgotten)
                db.execute(f"INSERT INTO commands ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, 0)", row)
        except AgentError as error:
            if error.code in ("command.full", "command.forgotten"):
                raise
            raise AgentError("command.log", error.found, error.expected, error.remedy) from error
        self._clear()

    def end(self, result: CommandResult) -> None:
        """A command's final result, before anybody hears of it. A disk that refuses is told of."""
        self._owed[result.id] = result
        self._write()

    def delivered(self, command_ids: Iterable[str]) -> None:
        """The broker has their final results: they need not be told at the next start."""
        self._delivered.update(command_ids)
        self._write()

    def find(self, command_id: str) -> tuple[str, CommandResult] | None:
        """The digest and the latest result of a command that was accepted. Raises AgentError (`command.log`)."""
        try:
            with self._transaction("read") as db:
                query = "SELECT digest, result FROM commands WHERE id = ?"
                row = db.execute(query, (command_id,)).fetchone()
        except AgentError as error:
            raise AgentError("command.log", error.found, error.expected, error.remedy) from error
        if row is None:
            return None
        return row[0], self._owed.get(command_id) or CommandResult.from_json(row[1].encode())

    def unfinished(self) -> list[str]:
        """Ids of commands that were accepted and have no end, the newest last."""
        return [result.id for result, _ in self._select("final = 0")]

    def undelivered(self) -> list[tuple[CommandResult, Reply | None]]:
        """Final results that the broker may not have, and where they are wanted too, the newest last."""
        return self._select("final = 1 AND delivered = 0")

    def _select(self, which: str) -> list[tuple[CommandResult, Reply | None]]:
        """Those of a log that can be read: it was told of when it was opened."""
        try:
            with self._transaction("read") as db:
                columns = "result, reply_topic, reply_correlation"
                rows = db.execute(f"SELECT {columns} FROM commands WHERE {which} ORDER BY number").fetchall()
        except AgentError:
            return []
        return [
            (CommandResult.from_json(result.encode()), Reply(topic, correlation) if topic is not None else None)
            for result, topic, correlation in rows
        ]

    @contextmanager
    def _transaction(self, what: str) -> Iterator[sqlite3.Connection]:
        """Of the database, which begins a log anew where there is none, or a damaged one."""
        if _is_missing(self._database.path):
            self._bound.log_lost()
        try:
            with self._database.transaction(what) as db:
                yield db
        except AgentError as error:
            if error.code == "command.damaged":
                self._bound.log_lost()
            raise

    def _write(self) -> None:
        try:
            with self._transaction("write") as db:
                self._settle(db)
        except AgentError as error:
            self._on_error(error)
        else:
            self._clear()

    def _settle(self, db: sqlite3.Connection) -> None:
        """Write what is owed."""
        for result in self._owed.values():
            row = (result.to_json().decode(), result.id)
            db.execute("UPDATE commands SET result = ?, final = 1, delivered = 0 WHERE id = ?", row)
        for command_id in self._delivered:
            db.execute("UPDATE commands SET delivered = 1 WHERE id = ? AND final = 1", (command_id,))

    def _clear(self) -> None:
        self._owed.clear()
        self._delivered.clear()

    def _forget(self, db: sqlite3.Connection, now: float) -> float:
        """What is older than a month, and beyond the most rows the oldest that have expired: one that is still valid
        could be sent once more, and would be carried out once more. Returns the latest time at which any of them
        expired, 0 without any: after a jump of the clock that lies ahead. Raises AgentError (`command.full`)."""
        over = "final = 1 AND expires_wall <= ?"
        aged = f"SELECT number FROM commands WHERE received_wall < ? AND {over}"
        _, latest = _remove(db, aged, (now - MEMORY_S, now))
        (rows,) = db.execute("SELECT count(*) FROM commands").fetchone()
        if (excess := rows + 1 - self._most_rows) <= 0:
            return latest
        oldest = f"SELECT number FROM commands WHERE {over} ORDER BY number LIMIT ?"
        removed, latest_spare = _remove(db, oldest, (now, excess))
        if removed < excess:
            found = f"{rows} commands that are still valid"
            expected = f"at most {self._most_rows} that have to be remembered"
            raise AgentError("command.full", found, expected, "let commands expire sooner")
        return max(latest, latest_spare)

    def _check(self) -> None:
        """Whether all can be read; what cannot is moved aside."""
        with self._transaction("read") as db:
            sound = db.execute("PRAGMA quick_check").fetchone() == ("ok",)
            sound = sound and _all_read(db)
        if not sound:
            self._bound.log_lost()
            raise self._database.set_aside("it does not hold what a log of commands holds")


def _is_missing(path: Path) -> bool:
    """Not where nobody may look: it may be there."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _remove(db: sqlite3.Connection, which: str, parameters: tuple[float, float]) -> tuple[int, float]:
    """How many rows of these numbers there were, and when the last of them expired, 0 without any."""
    (latest,) = db.execute(f"SELECT max(expires_wall) FROM commands WHERE number IN ({which})", parameters).fetchone()
    return db.execute(f"DELETE FROM commands WHERE number IN ({which})", parameters).rowcount, latest or 0.0


def _all_read(db: sqlite3.Connection) -> bool:
    try:
        for _digest, result in db.execute("SELECT digest, result FROM commands"):
            CommandResult.from_json(result.encode())
    except (sqlite3.OperationalError, MessageError, AttributeError):  # a column that is not there, or no result in it
        return False
    return True
