"""Keep the fleet's store in PostgreSQL.

Reports are inserted by COPY, and other rows by one statement with arrays instead of one statement a row. Whoever
writes several rows does so in the order of their keys, so that two writers never wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, cast

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.sql import SQL

from agent.common.database import Access, readable_schemas, show_schemas
from agent.common.errors import AgentError, ConfigError
from fleet.store.schema import POSTGRES
from fleet.store.transaction import CONTENDED, FleetStore, Names, ReportRow, Row, Rows, Transaction, on_conflict

_TYPES = {int: "bigint", float: "double precision", str: "text", bytes: "bytea"}
_MIGRATING = 0x7A7265  # advisory lock: of two processes that start at once, one migrates
# A server that vanished is noticed within seconds; of several hosts the writable one is used. The URL overrides these.
_OPTIONS: dict[str, Any] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
    "application_name": "tared fleet",
    "target_session_attrs": "read-write",
}
_ROLLED_BACK = ("40", "55P03")  # deadlocks and serialisation failures; a lock that is not available
_STAGED = "CREATE TEMPORARY TABLE IF NOT EXISTS staged (LIKE reports) ON COMMIT DELETE ROWS"


class PostgresStore(FleetStore):
    # The server stores one batch while the next is parsed here: with large batches, each side waits for the other.
    batch_bytes = 1 << 20
    _db: psycopg.Connection[Row] | None

    def __init__(self, url: str) -> None:
        """Connect, and migrate the schema. url: as libpq reads it.

        Raises AgentError as FleetStore, and ConfigError (`fleet.db`).
        """
        self._parameters = _parameters(url)
        super().__init__(_shown(self._parameters))
        with self._translating_errors("write"):
            self._connect()

    @contextmanager
    def transaction(self, access: Access = "write") -> Iterator[Transaction]:
        with self._translating_errors(access):
            db = self._connect()
            with db.transaction():
                yield PostgresTransaction(db.cursor())

    def _connect(self) -> psycopg.Connection[Row]:
        if self._db is None:
            db = psycopg.connect(autocommit=True, **self._parameters)
            try:
                with db.transaction():
                    self._prepare(db)
                db.execute(_STAGED)
            except BaseException:
                db.close()
                raise
            self._db = db
            self.generation += 1
        return self._db

    def _prepare(self, db: psycopg.Connection[Row]) -> None:
        """Bring the database to today's schema."""
        db.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATING,))
        db.execute("CREATE TABLE IF NOT EXISTS tared_schema (version BIGINT NOT NULL)")
        row, today = db.execute("SELECT version FROM tared_schema").fetchone(), len(POSTGRES)
        schema = int(row[0]) if row is not None else 0
        if schema and schema not in readable_schemas(POSTGRES):
            remedy = "run the tared that wrote it, or give --db another database"
            found, expected = f"{self.where} of schema {schema}", show_schemas(POSTGRES)
            raise AgentError("fleet.schema", found, expected, remedy)
        for script in POSTGRES[schema:]:
            db.execute(_sql(script))
        if schema < today:
            db.execute("DELETE FROM tared_schema")
            db.execute("INSERT INTO tared_schema VALUES (%s)", (today,))

    @contextmanager
    def _translating_errors(self, access: Access) -> Iterator[None]:
        """Raise the driver's errors as AgentError; close the connection after any error."""
        try:
            yield
        except psycopg.Error as error:
            self.close()
            found = f"{self.where}: {' '.join(str(error).split()) or type(error).__name__}"
            if isinstance(error, psycopg.OperationalError) and (error.sqlstate or "08")[:2] in ("08", "57"):
                remedy = "start it, or correct --db, the network or its permissions"
                raise AgentError("fleet.unreachable", found, "a PostgreSQL server that answers", remedy) from error
            if (error.sqlstate or "").startswith(_ROLLED_BACK):
                remedy = "wait for the next attempt, and check what else writes there"
                raise AgentError(
                    CONTENDED, found, "no other transaction that waits for the same rows", remedy
                ) from error
            remedy = "free some space there, or correct its permissions"
            raise AgentError(f"fleet.{access}", found, "the reports of boards, in PostgreSQL", remedy) from error
        except AgentError:
            self.close()
            raise


class PostgresTransaction(Transaction):
    skip_locked = "FOR UPDATE SKIP LOCKED"

    def __init__(self, cursor: psycopg.Cursor[Row]) -> None:
        self._cursor = cursor

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        self._cursor.execute(_translate(sql), parameters)
        return self._cursor.fetchall() if self._cursor.description is not None else []

    def execute_many(self, sql: str, rows: Sequence[Row]) -> None:
        if rows:
            self._cursor.executemany(_translate(sql), rows)

    def execute_count(self, sql: str, parameters: Sequence[object] = ()) -> int:
        return self._cursor.execute(_translate(sql), parameters).rowcount

    def upsert(self, table: str, key: Names, columns: Names, rows: Sequence[Row], where: str = "TRUE") -> None:
        if not rows:
            return
        arrays, values = _arrays(sorted(rows))
        insert = f"INSERT INTO {table} ({', '.join(columns)}) SELECT * FROM unnest({arrays}) "
        self._cursor.execute(_sql(insert + on_conflict(key, columns, where)), values)

    def lookup(self, table: str, key: Names, columns: Names, keys: Iterable[Row], lock: bool = False) -> Rows:
        requested = sorted(keys)
        if not requested:
            return {}
        arrays, values = _arrays(requested)
        names = ", ".join(key)
        self._cursor.execute(
            _sql(
                f"SELECT {', '.join(f't.{name}' for name in (*key, *columns))} FROM {table} t "
                f"JOIN unnest({arrays}) AS requested ({names}) USING ({names}) ORDER BY {names}"
                + (" FOR UPDATE OF t" if lock else "")
            ),
            values,
        )
        return {row[: len(key)]: row[len(key) :] for row in self._cursor}

    def add_reports(self, rows: Sequence[ReportRow]) -> list[ReportRow]:
        if not rows:
            return []
        ordered = sorted(rows)
        with suppress(psycopg.errors.UniqueViolation), self._cursor.connection.transaction():
            self._copy("reports", ordered)  # half of the server's time, if no number is taken
            return []
        self._copy("staged", ordered)
        self._cursor.execute("INSERT INTO reports SELECT * FROM staged ON CONFLICT DO NOTHING")
        self._cursor.execute(
            "SELECT s.* FROM staged s JOIN reports r USING (device, epoch, seq) WHERE s.document <> r.document"
        )
        return [ReportRow(*row) for row in self._cursor]

    def _copy(self, table: str, rows: Sequence[ReportRow]) -> None:
        with self._cursor.copy(_sql(f"COPY {table} FROM STDIN")) as copy:
            for row in rows:
                copy.write_row(row)

    def prune(self, table: str, column: str, before: float, most: int) -> int:
        oldest = f"SELECT ctid FROM {table} WHERE {column} < ? LIMIT ?"
        return self.execute_count(f"DELETE FROM {table} WHERE ctid IN ({oldest})", (before, most))


def _arrays(rows: Sequence[Row]) -> tuple[str, list[list[Any]]]:
    """Return the columns of these rows as parameters of unnest: placeholders with types, and values."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    types = [next((_TYPES[type(value)] for value in column if value is not None), "text") for column in columns]
    return ", ".join(f"%s::{each}[]" for each in types), columns


@cache
def _translate(sql: str) -> SQL:
    return _sql(sql.replace("?", "%s"))


def _sql(text: str) -> SQL:
    """Return a statement composed of the project's own constants. The driver's type accepts only literals."""
    return SQL(cast("Any", text))


def _parameters(url: str) -> dict[str, Any]:
    """Return the parameters of a connection. Raises ConfigError (`fleet.db`), which quotes nothing of the URL.

    If a password has a bare `/` or `@`, libpq takes the rest of it for a host or a database.
    """
    try:
        parsed = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        parsed = {"host": "@"}
    if "@" in f"{parsed.get('host')}{parsed.get('dbname')}":
        found, expected = "a URL that PostgreSQL cannot read", "postgresql://user:password@host/database"
        remedy = "write special characters in it as %40 (@), %2F (/), %3A (:), or leave the password to ~/.pgpass"
        raise ConfigError("fleet.db", found, expected, remedy)
    return {**_OPTIONS, **parsed}


def _shown(parameters: Mapping[str, Any]) -> str:
    """Return the address for people, without anything that may be secret."""
    hosts = str(parameters.get("host") or "").split(",")
    ports = str(parameters.get("port") or "").split(",")
    ports = ports * len(hosts) if len(ports) == 1 else ports
    named = [f"{host}:{port}" if port else host for host, port in zip(hosts, ports, strict=False) if host[:1] != "/"]
    return f"postgresql://{','.join(named)}/{parameters.get('dbname') or ''}"
