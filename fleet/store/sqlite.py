"""Keep the fleet's store in a SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from agent.common.database import Access, Database
from agent.common.errors import AgentError
from fleet.store.schema import SQLITE
from fleet.store.transaction import CONTENDED, FleetStore, Names, ReportRow, Row, Rows, Transaction, on_conflict

# Acknowledged data survives a power cut. The log is copied into the file every 16 MB, less often than by default:
# a page that many batches touch is then written once.
_PRAGMAS = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 4000")
CACHE_KIB = 65_536  # pages of the file in memory
_PATIENCE_S = 5.0  # with another collector, or an operator, that writes
# SQLite releases the GIL for each statement, and waits for it afterwards: so many rows go in one statement.
_ROWS = 500
_VALUES = "(?, ?, ?, ?, ?, ?, ?)"
_INSERT = f"INSERT OR IGNORE INTO reports VALUES {_VALUES}"
_INSERT_MANY = f"INSERT OR IGNORE INTO reports VALUES {', '.join([_VALUES] * _ROWS)}"
_KEY = "device = ? AND epoch = ? AND seq = ?"


class SqliteStore(FleetStore):
    batch_bytes = 4 << 20
    _db: sqlite3.Connection | None

    def __init__(self, path: Path, cache_kib: int = CACHE_KIB) -> None:
        """Open or create the file. Raises AgentError as FleetStore."""
        super().__init__(str(path))
        holds, loss = "the reports of boards", "the reports so far are in the file that was set aside"
        pragmas = (*_PRAGMAS, f"cache_size = -{cache_kib}")
        self._database = Database(path, "fleet", holds, loss, SQLITE, pragmas, _PATIENCE_S)
        self._connect("write")

    @contextmanager
    def transaction(self, access: Access = "write") -> Iterator[Transaction]:
        try:
            db = self._connect(access)
            with self._database.transaction_on(db, access):
                yield SqliteTransaction(db)
        except AgentError as error:  # the open file may have been moved aside
            self.close()
            if "locked" in str(error.__cause__):
                remedy = "let one collector write a file, or several a PostgreSQL database"
                raise AgentError(
                    CONTENDED, f"{self.where}: {error.__cause__}", "a file that can be written now", remedy
                ) from error
            raise

    def _connect(self, access: Access) -> sqlite3.Connection:
        if self._db is None:
            self._db = self._database.connect(access, any_thread=True)
            self.generation += 1
        return self._db


class SqliteTransaction(Transaction):
    skip_locked = ""  # a transaction that writes is alone anyway

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        return self._db.execute(sql, tuple(parameters)).fetchall()

    def execute_many(self, sql: str, rows: Sequence[Row]) -> None:
        self._db.executemany(sql, rows)

    def execute_count(self, sql: str, parameters: Sequence[object] = ()) -> int:
        return self._db.execute(sql, tuple(parameters)).rowcount

    def upsert(self, table: str, key: Names, columns: Names, rows: Sequence[Row], where: str = "TRUE") -> None:
        values = ", ".join("?" * len(columns))
        insert = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({values}) {on_conflict(key, columns, where)}"
        self._db.executemany(insert, rows)

    def lookup(self, table: str, key: Names, columns: Names, keys: Iterable[Row], lock: bool = False) -> Rows:
        del lock  # a transaction that writes is alone anyway
        query = f"SELECT {', '.join(columns)} FROM {table} WHERE {' AND '.join(f'{name} = ?' for name in key)}"
        rows = {}
        for each in keys:
            row = self._db.execute(query, each).fetchone()
            if row is not None:
                rows[each] = row
        return rows

    def add_reports(self, rows: Sequence[ReportRow]) -> list[ReportRow]:
        before = self._db.total_changes
        whole = len(rows) - len(rows) % _ROWS
        for start in range(0, whole, _ROWS):
            self._db.execute(_INSERT_MANY, [value for row in rows[start : start + _ROWS] for value in row])
        self._db.executemany(_INSERT, rows[whole:])
        if self._db.total_changes - before == len(rows):
            return []
        query = f"SELECT document FROM reports WHERE {_KEY}"
        return [row for row in rows if self._db.execute(query, row[:3]).fetchone() != (row.document,)]

    def prune(self, table: str, column: str, before: float, most: int) -> int:
        oldest = f"SELECT rowid FROM {table} ORDER BY rowid LIMIT ?"
        return self.execute_count(f"DELETE FROM {table} WHERE rowid IN ({oldest}) AND {column} < ?", (most, before))
