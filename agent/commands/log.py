"""Remember on the disk which commands were carried out, so that each is carried out once, also after a kill.

The log of commands holds those that were accepted, and their results. The guard against replays refuses signed commands
that a lost or pruned log may have known. Both lie in the board's state.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.database import Access
from agent.common.errors import AgentError
from agent.contract.commands import CommandResult
from agent.mqtt.message import Reply
from agent.state.salvage import Row
from agent.state.store import StateStore

MEMORY_S = 30 * 86_400.0  # also the longest validity of a command: a forgotten one has expired
MOST_ROWS = 10_000


class CommandLog:
    """Accepted commands and their final results; one thread uses it.

    Results that could not be written are kept in memory, and written with the next write.

    The guard against replays has three Unix times, by the clocks of the senders, since this board's may have jumped:
    `newest`, when the newest signed command was issued; `started`, up to which the log may have known commands that it
    has lost; `forgotten`, the latest expiry of commands that the log has dropped. A new board refuses nothing: no
    command was carried out yet, and its clock may be wrong.
    """

    def __init__(self, state: StateStore, most_rows: int = MOST_ROWS, clock: Clock = SYSTEM_CLOCK) -> None:
        self._state = state
        self._most_rows = most_rows
        self._clock = clock
        self._guarded = -1  # the repair of the state after which the guard was last set
        self._unwritten: dict[str, CommandResult] = {}  # final results that the disk refused
        self._delivered: set[str] = set()  # ids whose final result the broker has, not yet written
        state.read("commands", _check)
        try:
            self._set_guard()
        except AgentError as error:
            state.report(error)

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
            state.write         the disk refuses
            command.full        all remembered commands are still valid, so that none may be forgotten
            command.forgotten   a signed command that may have been carried out already
        """
        accepted = CommandResult(id=command_id, status="ACCEPTED")
        reply_columns = (reply.topic, reply.correlation) if reply is not None else (None, None)
        row = (command_id, digest, expires, now, accepted.to_json().decode(), *reply_columns)
        columns = "id, digest, expires_wall, received_wall, result, reply_topic, reply_correlation, final"
        with self._transaction("write") as db:
            newest, started, forgotten = _guard(db) or (0.0, 0.0, 0.0)
            if issued is not None and (issued <= started or expires <= forgotten):
                raise _forgotten()
            self._flush(db)
            removed = self._forget(db, now)
            if issued is not None or removed:
                newest = max(newest, min(issued or 0.0, expires))
                _write_guard(db, newest, started, max(forgotten, removed))
            db.execute(f"INSERT INTO commands ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, 0)", row)
        self._clear()

    def end(self, result: CommandResult) -> None:
        """Record a command's final result, before it is published. A write error is reported."""
        self._unwritten[result.id] = result
        self._write()

    def mark_delivered(self, command_ids: Iterable[str]) -> None:
        """Record that the broker has these final results: the next start need not publish them."""
        self._delivered.update(command_ids)
        self._write()

    def find(self, command_id: str) -> tuple[str, CommandResult] | None:
        """Return the digest and the latest result of an accepted command. Raises AgentError (`state.read`)."""
        with self._transaction("read") as db:
            query = "SELECT digest, result FROM commands WHERE id = ?"
            row = db.execute(query, (command_id,)).fetchone()
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
        if access == "write" and self._guarded != self._state.repairs:
            self._set_guard()
        with self._state.transaction(access, "commands") as db:
            yield db

    def _set_guard(self) -> None:
        """Set the guard for a log that has been lost, or for a guard that has. Raises AgentError (`state.write`)."""
        repairs = self._state.repairs
        with self._state.transaction("read", "commands") as db:
            known, is_empty = _guard(db), db.execute("SELECT 1 FROM commands LIMIT 1").fetchone() is None
        newest, started, forgotten = known or (0.0, 0.0, 0.0)
        if known is None and (not is_empty or self._state.lost_in("replay_guard") is not None):
            newest = self._clock.wall_s()
        if is_empty:  # a signed command leaves a row, so all rows were lost
            started = newest
        if (newest, started, forgotten) != (known or (0.0, 0.0, 0.0)):
            with self._state.transaction("write", "replay_guard") as db:
                _write_guard(db, newest, started, forgotten)
        self._guarded = repairs

    def _write(self) -> None:
        try:
            with self._transaction("write") as db:
                self._flush(db)
        except AgentError as error:
            self._state.report(error)
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


def _remove(db: sqlite3.Connection, which: str, parameters: tuple[float, float]) -> tuple[int, float]:
    """Remove the rows of these numbers; return how many there were, and their latest expiry, 0 without any."""
    (latest,) = db.execute(f"SELECT max(expires_wall) FROM commands WHERE number IN ({which})", parameters).fetchone()
    return db.execute(f"DELETE FROM commands WHERE number IN ({which})", parameters).rowcount, latest or 0.0


def _check(rows: Sequence[Row]) -> bool:
    """Raises MessageError, AttributeError for rows that no log has written."""
    for row in rows:
        CommandResult.from_json(row[5].encode())
    return True


def _guard(db: sqlite3.Connection) -> Row | None:
    """Return `newest`, `started` and `forgotten`; None where no signed command was accepted yet."""
    return db.execute("SELECT newest, started, forgotten FROM replay_guard").fetchone()  # type: ignore[no-any-return]


def _write_guard(db: sqlite3.Connection, newest: float, started: float, forgotten: float) -> None:
    db.execute("DELETE FROM replay_guard")
    db.execute("INSERT INTO replay_guard VALUES (?, ?, ?)", (newest, started, forgotten))


def _forgotten() -> AgentError:
    found = "a command that is older than the log of commands, or as old as commands that the log has dropped"
    expected = "a command of which the log proves that it was not carried out"
    return AgentError("command.forgotten", found, expected, "send the command again")
