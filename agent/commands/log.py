"""Remember on the disk which commands were carried out, so that each is carried out once, also after a kill.

`CommandLog` is a SQLite file of accepted commands and their results. `ReplayGuard`, a small file of its own, refuses
signed commands that a lost or pruned log may have known.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from os.path import lexists
from pathlib import Path
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.database import Access, Database
from agent.common.errors import AgentError
from agent.common.state_files import StateFile
from agent.contract.commands import CommandResult
from agent.contract.wire import MessageError
from agent.mqtt.message import Reply

_SCHEMA = 1  # schema of the replay guard's file
MEMORY_S = 30 * 86_400.0  # also the longest validity of a command: a forgotten one has expired
MOST_ROWS = 10_000
_MIGRATIONS = (
    "",  # the first release wrote schema 2
    """
    CREATE TABLE commands (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        digest TEXT NOT NULL,
        expires_wall REAL NOT NULL,
        received_wall REAL NOT NULL,
        result TEXT NOT NULL,
        final INTEGER NOT NULL,
        delivered INTEGER NOT NULL DEFAULT 0,
        reply_topic TEXT,
        reply_correlation BLOB
    );
    CREATE INDEX undelivered ON commands (delivered) WHERE delivered = 0;
    """,
)
_PRAGMAS = ("synchronous = EXTRA",)  # with a rollback journal FULL may lose the last commit


class ReplayGuard:
    """Refuse signed commands that may have been carried out although the command log does not know them.

    A new board's log refuses nothing: no command was carried out yet, and the clock may be wrong at the first start.
    Any other log that starts empty refuses commands issued no later than the newest one that the old log accepted. Both
    times are those of the senders' clocks, since this board's may have jumped. If that time is unknown too, because the
    file is damaged or gone, the time of this start takes its place.
    """

    def __init__(
        self, path: Path, log_exists: bool, on_error: Callable[[AgentError], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """log_exists: whether there is a command log already. on_error: receives write errors.

        Raises AgentError (`command.schema`).
        """
        self._file = StateFile(path, _SCHEMA, "command.write", on_error)
        known = self._file.read(_parse_times)
        self._newest, self._started, self._forgotten = known or (0.0, 0.0, 0.0)
        if known is None and (log_exists or lexists(path)):
            self._newest = clock.wall_s()
            self._file.write(self._document)

    def note_log_lost(self) -> None:
        """Note that the log starts empty again."""
        if self._started != self._newest:
            self._started = self._newest
            self._file.write(self._document)

    def check(self, issued: float, expires: float) -> None:
        """Check a signed command that the log does not know; Unix times in seconds.

        Raises AgentError (`command.forgotten`).
        """
        if issued > self._started and expires > self._forgotten:
            return
        found = "a command that is older than the log of commands, or as old as commands that the log has dropped"
        expected = "a command of which the log proves that it was not carried out"
        raise AgentError("command.forgotten", found, expected, "send the command again")

    def record(self, issued: float, forgotten: float) -> None:
        """Record a signed command before it is carried out; durable when this returns.

        forgotten: the latest expiry of commands that the log has removed, by a clock that may have jumped ahead.

        Raises AgentError (`command.write`).
        """
        self._newest, self._forgotten = max(self._newest, issued), max(self._forgotten, forgotten)
        self._file.replace(self._document)

    @property
    def _document(self) -> dict[str, float]:
        return {"newest": self._newest, "begun": self._started, "forgotten": self._forgotten}


def _parse_times(document: Mapping[str, Any]) -> tuple[float, float, float]:
    return float(document["newest"]), float(document["begun"]), float(document["forgotten"])


class CommandLog:
    """Accepted commands and their final results, in the file at `path`, opened for each transaction.

    One thread uses it. A damaged file is moved aside, reported as `command.damaged`, and replaced by an empty one; the
    ReplayGuard, whose file is `path` with the ending `.json`, then refuses older signed commands. Results that could
    not be written are kept in memory, and written with the next write.
    """

    def __init__(
        self,
        path: Path,
        on_error: Callable[[AgentError], None],
        most_rows: int = MOST_ROWS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """on_error: receives the error of a damaged file, and write errors of results.

        Raises AgentError (`command.schema`) for the file of a newer tared.
        """
        holds, loss = "the log of commands", "an unsigned command that is sent again may be carried out again"
        self._database = Database(path, "command", holds, loss, _MIGRATIONS, _PRAGMAS)
        self._on_error = on_error
        self._most_rows = most_rows
        self._unwritten: dict[str, CommandResult] = {}  # final results that the disk refused
        self._delivered: set[str] = set()  # ids whose final result the broker has, not yet written
        path.parent.mkdir(parents=True, exist_ok=True)
        self._replay_guard = ReplayGuard(path.with_suffix(".json"), not _is_missing(path), on_error, clock)
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
        """Record a command before it is carried out; durable when this returns.

        Args:
            digest: Of the command's content.
            expires: Unix time in seconds, as `now` and `issued`.
            issued: Of a signed command; None for an unsigned one.
            reply: Where the final result goes too, after a restart as well.

        Raises AgentError:
            command.log         the disk refuses
            command.full        all remembered commands are still valid, so that none may be forgotten
            command.forgotten   a signed command that may have been carried out already
        """
        accepted = CommandResult(id=command_id, status="ACCEPTED")
        reply_columns = (reply.topic, reply.correlation) if reply is not None else (None, None)
        row = (command_id, digest, expires, now, accepted.to_json().decode(), *reply_columns)
        columns = "id, digest, expires_wall, received_wall, result, reply_topic, reply_correlation, final"
        try:
            with self._transaction("write") as db:
                if issued is not None:
                    self._replay_guard.check(issued, expires)
                self._flush(db)
                forgotten = self._forget(db, now)
                if issued is not None or forgotten:
                    self._replay_guard.record(min(issued or 0.0, expires), forgotten)
                db.execute(f"INSERT INTO commands ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, 0)", row)
        except AgentError as error:
            if error.code in ("command.full", "command.forgotten"):
                raise
            raise AgentError("command.log", error.found, error.expected, error.remedy) from error
        self._clear()

    def end(self, result: CommandResult) -> None:
        """Record a command's final result, before it is published. A write error goes to `on_error`."""
        self._unwritten[result.id] = result
        self._write()

    def mark_delivered(self, command_ids: Iterable[str]) -> None:
        """Record that the broker has these final results: the next start need not publish them."""
        self._delivered.update(command_ids)
        self._write()

    def find(self, command_id: str) -> tuple[str, CommandResult] | None:
        """Return the digest and the latest result of an accepted command. Raises AgentError (`command.log`)."""
        try:
            with self._transaction("read") as db:
                query = "SELECT digest, result FROM commands WHERE id = ?"
                row = db.execute(query, (command_id,)).fetchone()
        except AgentError as error:
            raise AgentError("command.log", error.found, error.expected, error.remedy) from error
        if row is None:
            return None
        return row[0], self._unwritten.get(command_id) or CommandResult.from_json(row[1].encode())

    def unfinished(self) -> list[str]:
        """Return the ids of accepted commands without a final result, the newest last."""
        return [result.id for result, _ in self._select("final = 0")]

    def undelivered(self) -> list[tuple[CommandResult, Reply | None]]:
        """Return final results that the broker may not have, each with its reply address, the newest last."""
        return self._select("final = 1 AND delivered = 0")

    def _select(self, which: str) -> list[tuple[CommandResult, Reply | None]]:
        """Return nothing for a log that cannot be read: that was reported when it was opened."""
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
    def _transaction(self, access: Access) -> Iterator[sqlite3.Connection]:
        """Open a transaction of the database, which replaces a missing or damaged file by an empty one."""
        if _is_missing(self._database.path):
            self._replay_guard.note_log_lost()
        try:
            with self._database.transaction(access) as db:
                yield db
        except AgentError as error:
            if error.code == "command.damaged":
                self._replay_guard.note_log_lost()
            raise

    def _write(self) -> None:
        try:
            with self._transaction("write") as db:
                self._flush(db)
        except AgentError as error:
            self._on_error(error)
        else:
            self._clear()

    def _flush(self, db: sqlite3.Connection) -> None:
        for result in self._unwritten.values():
            row = (result.to_json().decode(), result.id)
            db.execute("UPDATE commands SET result = ?, final = 1, delivered = 0 WHERE id = ?", row)
        for command_id in self._delivered:
            db.execute("UPDATE commands SET delivered = 1 WHERE id = ? AND final = 1", (command_id,))

    def _clear(self) -> None:
        self._unwritten.clear()
        self._delivered.clear()

    def _forget(self, db: sqlite3.Connection, now: float) -> float:
        """Remove commands older than a month, and the oldest beyond `most_rows`; only commands that have expired.

        A valid one could be sent again, and would be carried out again. Returns the latest expiry of the removed
        commands, 0 without any; after a jump of the clock it lies ahead. Raises AgentError (`command.full`).
        """
        expired = "final = 1 AND expires_wall <= ?"
        aged = f"SELECT number FROM commands WHERE received_wall < ? AND {expired}"
        _, latest = _remove(db, aged, (now - MEMORY_S, now))
        (rows,) = db.execute("SELECT count(*) FROM commands").fetchone()
        if (excess := rows + 1 - self._most_rows) <= 0:
            return latest
        oldest = f"SELECT number FROM commands WHERE {expired} ORDER BY number LIMIT ?"
        removed, latest_spare = _remove(db, oldest, (now, excess))
        if removed < excess:
            found = f"{rows} commands that are still valid"
            expected = f"at most {self._most_rows} commands that have to be remembered"
            raise AgentError("command.full", found, expected, "choose earlier times of expiry for commands")
        return max(latest, latest_spare)

    def _check(self) -> None:
        """Check that all rows can be read; else move the file aside and raise its AgentError."""
        with self._transaction("read") as db:
            sound = db.execute("PRAGMA quick_check").fetchone() == ("ok",) and _all_read(db)
        if not sound:
            self._replay_guard.note_log_lost()
            raise self._database.set_aside("its tables are not those of a log of commands")


def _is_missing(path: Path) -> bool:
    """Return False also for a folder that may not be read: the file may be there."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _remove(db: sqlite3.Connection, which: str, parameters: tuple[float, float]) -> tuple[int, float]:
    """Remove the rows of these numbers; return how many there were, and their latest expiry, 0 without any."""
    (latest,) = db.execute(f"SELECT max(expires_wall) FROM commands WHERE number IN ({which})", parameters).fetchone()
    return db.execute(f"DELETE FROM commands WHERE number IN ({which})", parameters).rowcount, latest or 0.0


def _all_read(db: sqlite3.Connection) -> bool:
    try:
        for _digest, result in db.execute("SELECT digest, result FROM commands"):
            CommandResult.from_json(result.encode())
    except (sqlite3.OperationalError, MessageError, AttributeError):  # a column that is not there, or no result in it
        return False
    return True
