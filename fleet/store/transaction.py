"""What may be asked of a store within a transaction, whatever database keeps it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from agent.common.errors import AgentError

Row = tuple[Any, ...]
What = Literal["read", "write"]
CONTENDED = "fleet.contended"


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
    """Statements are in the SQL that SQLite and PostgreSQL share, with `?` for each parameter, and no other `?` or `%`.

    Names of tables and columns are the caller's own, and never a stranger's.

    skip_locked: ends a SELECT whose rows are locked to the end of the transaction, but for those that somebody else
    has locked: they are left out.
    """

    skip_locked: str

    def execute(self, sql: str, parameters: Sequence[object] = ()) -> list[Row]:
        """One statement; its rows, none of what returns none."""

    def execute_many(self, sql: str, rows: Sequence[Row]) -> None:
        """One statement for each of these rows of parameters, without waiting for each."""

    def changed(self, sql: str, parameters: Sequence[object] = ()) -> int:
        """One statement; how many rows it has changed."""

    def upsert(
        self, table: str, key: Sequence[str], columns: Sequence[str], rows: Sequence[Row], where: str = "TRUE"
    ) -> None:
        """Rows of these columns, of which the first ones are the key, once each: new, or in the place of the one that
        has the key. Where the key is all there is, what is there stays; so it does where the condition does not hold,
        which calls the row that is there by the table's name, and the new one `excluded`."""

    def lookup(
        self, table: str, key: Sequence[str], columns: Sequence[str], keys: Iterable[Row], lock: bool = False
    ) -> dict[Row, Row]:
        """These columns of those rows that are there, by their keys. lock: nobody else changes them until the end."""

    def add_reports(self, rows: Sequence[ReportRow]) -> list[ReportRow]:
        """Those whose number is not there yet. Returned is whose number had been taken by another document."""

    def prune(self, table: str, column: str, before: float, most: int) -> int:
        """Delete rows whose time in `column` is earlier than `before`, at most so many, those written first; how many
        that were."""


class FleetStore(Protocol):
    """A fleet's database, for one thread at a time; a context manager that closes it.

    Each use raises AgentError where the database does not answer (`fleet.unreachable`), refuses (`fleet.write`,
    `fleet.read`), has ended this transaction for another's sake (`fleet.contended`), or has a schema of a newer tared
    (`fleet.schema`). A SQLite file that is damaged is moved aside (`fleet.damaged`), and the next use begins a new one.
    After any of these the next use connects anew.

    generation: another number after each time that it connected: what is remembered of rows, such as ids of devices,
    holds within one. batch_bytes: of messages, how much is best stored at once.
    """

    where: str
    generation: int
    batch_bytes: int

    def begun(self, what: What = "write") -> AbstractContextManager[Transaction]:
        """A transaction, durable at its end; whatever is raised inside undoes it."""

    def close(self) -> None: ...

    def __enter__(self) -> FleetStore: ...

    def __exit__(self, *_: object) -> None: ...


_ATTEMPTS = 4
_PAUSE_S = 0.2  # at most, so that two that met do not meet again

Found = TypeVar("Found")


def written(store: FleetStore, write: Callable[[Transaction], Found]) -> Found:
    """What `write` returns, called in a transaction of its own, which has been committed then.

    Two that write at once may each wait for the other: the database ends one of them (`fleet.contended`), which is
    begun again here, a few times. Raises AgentError as the store does.
    """
    attempt = 1
    while True:
        try:
            with store.begun("write") as transaction:
                return write(transaction)
        except AgentError as error:
            if error.code != CONTENDED or attempt == _ATTEMPTS:
                raise
        attempt += 1
        time.sleep(random.uniform(0.0, _PAUSE_S))
