"""Define what the fleet may do with its database, whichever database it is.

`FleetStore` opens transactions, `Transaction` runs statements in one. SQLite and PostgreSQL each implement the two.
`write_with_retries` is the way to write: it repeats what the database ended in favour of another writer.
"""

from __future__ import annotations

import abc
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from typing_extensions import Self  # typing has it from Python 3.11 on

from agent.common.database import Access
from agent.common.errors import AgentError

Row = tuple[Any, ...]
Rows = dict[Row, Row]  # values by keys
Names = Sequence[str]  # columns of a table
Result = TypeVar("Result")
CONTENDED = "fleet.contended"

_ATTEMPTS = 4
_PAUSE_S = 0.2  # at most and at random, so that two that met do not meet again


class ReportRow(NamedTuple):
    """A row of `reports`. device: its id. ts: by the board's clock, received: by ours, Unix time in s."""

    device: int
    epoch: int
    seq: int
    kind: str
    ts: float
    received: float
    document: str


class Transaction(Protocol):
    """Run statements in the SQL that SQLite and PostgreSQL share.

    Each parameter is a `?`; no statement has another `?` or `%`. Names of tables and columns are constants of the
    caller, never a stranger's text.

    skip_locked: ends a SELECT that locks its rows to the end of the transaction, and leaves out locked ones.
    """

    skip_locked: str

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """Run one statement and return its rows, if it has any."""

    def execute_many(self, sql: str, rows: Sequence[Row]) -> None:
        """Run the statement once for each row of parameters, without waiting for each."""

    def execute_count(self, sql: str, parameters: Sequence[object] = ()) -> int:
        """Run one statement and return how many rows it changed."""

    def upsert(self, table: str, key: Names, columns: Names, rows: Sequence[Row], where: str = "TRUE") -> None:
        """Insert rows, or update those that exist.

        Args:
            key: Columns that identify a row. They come first in `columns`; no two of the rows have the same key.
            columns: Columns of the rows. If all are key columns, existing rows stay as they are.
            where: Condition for an update. It names the existing row by the table, the new one `excluded`.
        """

    def lookup(self, table: str, key: Names, columns: Names, keys: Iterable[Row], lock: bool = False) -> Rows:
        """Return these columns of the rows that exist, by key. lock: nobody else changes them until the end."""

    def add_reports(self, rows: Sequence[ReportRow]) -> list[ReportRow]:
        """Insert rows whose number is new; return those whose number another document has."""

    def prune(self, table: str, column: str, before: float, most: int) -> int:
        """Delete at most `most` rows whose time in `column` is earlier than `before`; return how many."""


class FleetStore(abc.ABC):
    """Hold the connection to a fleet's database, for one thread at a time; a context manager that closes it.

    After an error the next use connects again. Each use raises AgentError:
        fleet.unreachable   the database does not answer
        fleet.write         it refuses to write
        fleet.read          it refuses to read
        fleet.contended     it ended this transaction in favour of another
        fleet.schema        its schema is of a newer tared
        fleet.damaged       the SQLite file is damaged; it was moved aside, and the next use creates a new one

    where: the database, for people; without password. generation: changes with each connection. What is remembered
    of rows, such as ids of devices, holds within one generation. batch_bytes: of messages, how much is best stored at
    once.
    """

    batch_bytes: ClassVar[int]

    def __init__(self, where: str) -> None:
        self.where = where
        self.generation = 0
        self._db: Any = None

    @abc.abstractmethod
    def transaction(self, access: Access = "write") -> AbstractContextManager[Transaction]:
        """Run a transaction, durable at its end. An exception inside undoes it."""

    def close(self) -> None:
        if self._db is not None:
            self._db.close()
        self._db = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def on_conflict(key: Names, columns: Names, where: str) -> str:
    """Return the end of an INSERT that updates rows which exist, as `Transaction.upsert` describes it."""
    others = [f"{name} = excluded.{name}" for name in columns if name not in key]
    action = f"UPDATE SET {', '.join(others)} WHERE {where}" if others else "NOTHING"
    return f"ON CONFLICT ({', '.join(key)}) DO {action}"


def write_with_retries(store: FleetStore, write: Callable[[Transaction], Result]) -> Result:
    """Call `write` in a transaction of its own, commit it, and return what `write` returned.

    Of two writers that wait for each other the database ends one (`fleet.contended`); that one is repeated here, a few
    times. Raises AgentError as the store does.
    """
    attempt = 1
    while True:
        try:
            with store.transaction("write") as transaction:
                return write(transaction)
        except AgentError as error:
            if error.code != CONTENDED or attempt == _ATTEMPTS:
                raise
        attempt += 1
        time.sleep(random.uniform(0.0, _PAUSE_S))
