"""Keep the small state of a board in one SQLite file, `state.sqlite`: its tables, and how damage is repaired.

Every store of a board (jobs, commands, settings, limits, regimes, ...) has a table here, and reads and writes it by
`StateStore`. A transaction opens the file anew, and is on the disk when it ends. A power cut or a kill loses no
finished transaction and leaves no half one.

There is one way to be damaged, whether SQLite finds a bad page or a store a row that tared does not write. The file is
set aside as `state.sqlite.damaged.N`. A new one takes its place, with every table that is whole. `state.damaged` names
the tables that were lost. The state directory of 0.2.0 is taken over in the same way.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from agent.common.database import Access, Database, make_room_aside, move_companions
from agent.common.errors import AgentError
from agent.common.state_files import parse_or_none
from agent.state.salvage import Row, copy_table, insert_rows, is_regular
from agent.state.schema import MIGRATIONS, TABLES
from agent.state.takeover import take_over
from engines.store.files import sync_folder

FILE = "state.sqlite"

_PRAGMAS = ("synchronous = EXTRA",)  # with a rollback journal FULL may lose the last commit
_NEW_PRAGMAS = ("journal_mode = MEMORY", "synchronous = FULL")  # nobody sees a new file before it is whole
_IN_MEMORY = Path(":memory:")

T = TypeVar("T")


class RepairedError(AgentError):
    """The file was damaged, which has been reported, and is usable again: the transaction may be tried again."""


class StateStore:
    """The state of one board; any thread may use it, one at a time.

    Without a folder it lies in memory: a recording starts from scratch each time.

    Attributes:
        repairs: How often the file was begun anew since this start.

    >>> state = StateStore(None)
    >>> state.replace({"releases": [("a key", 5)]})
    >>> state.read("releases", dict)
    {'a key': 5}
    """

    def __init__(self, folder: Path | None) -> None:
        """Open the file; create it, or take over the files of 0.2.0, if there is none.

        A disk that refuses is reported, and tried again with each transaction.

        Raises AgentError (`state.schema`) for a file of a newer tared.
        """
        self.repairs = 0
        self._lock = threading.RLock()
        self._unreported: list[AgentError] = []
        self._on_error: Callable[[AgentError], None] = self._unreported.append
        self._reported: set[str] = set()
        self._lost: dict[str, Path] = {}
        loss = "the board begins with a new one"
        self._file = Database(
            folder / FILE if folder is not None else _IN_MEMORY,
            "state",
            "the state of the board",
            loss,
            MIGRATIONS,
            _PRAGMAS,
            repair=self._repair,
        )
        self._memory = self._file.connect(any_thread=True) if folder is None else None
        self._has_been_there = False
        if folder is not None:
            self._check()

    @classmethod
    def copy_of(cls, folder: Path, tables: Sequence[str]) -> StateStore:
        """Return these tables as they lie in a state directory, in memory: nothing is changed or repaired there.

        Raises AgentError (`state.schema`) for a file of a newer tared.
        """
        path, copy = folder / FILE, cls(None)
        former = replace(copy._file, path=path, repair=partial(copy._file.access_error, "read"))
        with copy.transaction("write") as memory, former.translating_errors("read"):
            if is_regular(path):
                with suppress(sqlite3.DatabaseError), closing(sqlite3.connect(path)) as db:
                    former.check_schema(db)
                _copy(memory, path, tables, FILE)
            else:
                take_over(memory, folder)
            copy._lost = {name: aside for name, aside in copy._lost_of(memory).items() if name in tables}
        if copy._lost:
            copy._report_damage(f"{folder}: tables that cannot be read")
        return copy

    @property
    def path(self) -> Path:
        """The file, for errors."""
        return self._file.path

    def report_to(self, on_error: Callable[[AgentError], None]) -> None:
        """Call on_error with every error from now on, by the thread that meets it, and with those found so far."""
        self._on_error = on_error
        while self._unreported:
            on_error(self._unreported.pop(0))

    def report(self, error: AgentError) -> None:
        """Report an error that the board survives."""
        self._on_error(error)

    def lost_in(self, table: str) -> Path | None:
        """Return the file with which a table was lost, or could not be read; None for any other table.

        A table is lost until somebody removes that file, and starts the daemon again.
        """
        return self._lost.get(table)

    @contextmanager
    def transaction(self, access: Access, table: str = "") -> Iterator[sqlite3.Connection]:
        """Run a transaction; an exception inside undoes it. table: the one concerned, for errors.

        Raises AgentError:
            state.read, state.write     the disk refuses; as a RepairedError if the file was damaged
            state.schema                a newer tared has written the file
        """
        with self._lock:
            holds = TABLES[table][0] if table else self._file.holds
            database = replace(self._file, holds=holds)
            if self._memory is not None:
                with database.transaction_on(self._memory, access):
                    yield self._memory
                return
            self._make_sure_it_is_there(database, access)
            with database.transaction(access) as db:
                yield db

    def read(self, table: str, parse: Callable[[list[Row]], T]) -> T | None:
        """Return the result of `parse` for the rows of a table, in their order; None if there are no rows.

        None also if the rows cannot be read, which is reported, or `parse` cannot understand them: they are damaged.
        """
        try:
            rows = _retried(partial(self._rows, table))
        except AgentError as error:
            self._report_once("read", error)
            self._lost.setdefault(table, self.path)
            return None
        if not rows:
            return None
        parsed = parse_or_none(lambda: parse(rows))
        if parsed is None:
            self._repair(f"rows in table {table} that no tared has written", [table])
        return parsed

    def replace(self, contents: Mapping[str, Sequence[Row]]) -> None:
        """Replace all rows of these tables, all or nothing. Raises AgentError (`state.write`)."""
        _retried(partial(self._replace, contents))

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Replace all rows of a table; a disk that refuses is reported once."""
        try:
            self.replace({table: rows})
        except AgentError as error:
            self._report_once(f"write {table}", error)

    def _rows(self, table: str) -> list[Row]:
        with self.transaction("read", table) as db:
            return db.execute(f"SELECT * FROM {table} ORDER BY rowid").fetchall()

    def _replace(self, contents: Mapping[str, Sequence[Row]]) -> None:
        with self.transaction("write", next(iter(contents))) as db:
            for table, rows in contents.items():
                db.execute(f"DELETE FROM {table}")
                for row in rows:
                    db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)

    def _report_once(self, key: str, error: AgentError) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self.report(error)

    def _check(self) -> None:
        """Open the file for the first time; repair it if a page is damaged."""
        try:
            self._file.path.parent.mkdir(parents=True, exist_ok=True)
            with self.transaction("read") as db:
                is_sound = db.execute("PRAGMA quick_check").fetchone() == ("ok",)
                self._lost = {name: aside for name, aside in self._lost_of(db).items() if os.path.lexists(aside)}
            if not is_sound:
                self._repair("a damaged page")
        except RepairedError:
            pass  # as reported
        except AgentError as error:
            if error.code == "state.schema":
                raise
            self._report_once("read", error)
        except OSError as error:
            self._report_once("read", self._file.access_error("write", error.strerror or str(error)))

    def _lost_of(self, db: sqlite3.Connection) -> dict[str, Path]:
        """Return by table the file with which it was lost, of those rows that `_copy` or `take_over` has written."""
        rows = db.execute("SELECT * FROM lost").fetchall()
        return {name: self.path.with_name(aside) for name, aside in rows if name in TABLES and _is_name(aside)}

    def _make_sure_it_is_there(self, database: Database, access: Access) -> None:
        """Create a file that is not there yet; one that has gone since, or is empty, is damage."""
        path = database.path
        if not _is_missing(path):
            self._has_been_there = True
            with database.translating_errors(access):
                is_empty = is_regular(path) and path.stat().st_size == 0
            if is_empty:
                raise self._repair("it is empty")
        elif self._has_been_there:
            raise self._repair("it is gone")
        else:
            try:
                self._put_in_place(self._made(partial(take_over, folder=path.parent)))
            except (AgentError, OSError) as error:
                if isinstance(error, AgentError) and error.code == "state.schema":
                    raise
                raise database.access_error(access, f"it cannot be created: {_why(error)}") from error
            if self._lost:
                self._report_damage(f"{path.parent}: files of 0.2.0 that cannot be read")

    def _made(self, fill: Callable[[sqlite3.Connection], None]) -> Path:
        """Write a new file beside the present one, and return its path. Raises AgentError, OSError."""
        new = self._file.path.with_name(f".{FILE}.{os.getpid()}.new")
        new.unlink(missing_ok=True)
        database = replace(self._file, path=new, pragmas=_NEW_PRAGMAS, repair=None)
        try:
            with closing(database.connect()) as db, database.transaction_on(db):
                fill(db)
                self._lost = self._lost_of(db)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
        return new

    def _put_in_place(self, new: Path) -> None:
        new.replace(self._file.path)
        sync_folder(new.parent)
        self._has_been_there = True

    def _repair(self, found: str, damaged: Sequence[str] = ()) -> AgentError:
        """Set the file aside, and put a new one in its place, with all tables that are whole; report that.

        A kill in between leaves the damaged file where it is, and the next start repairs it.

        Args:
            damaged: Tables that are not taken over.

        Returns the error for the transaction that has met the damage.
        """
        path = self._file.path
        if self._memory is not None:
            self._lost |= dict.fromkeys(damaged, path)
            self._report_damage(found)
            return self._file.access_error("read", found)
        with self._lock:
            try:
                aside = make_room_aside(path)
                whole = [name for name in TABLES if name not in damaged]
                new = self._made(partial(_copy, source=path, tables=whole, aside=aside.name))
                if is_regular(path):
                    os.link(path, aside)  # so that there is a file at any moment
                elif os.path.lexists(path):
                    path.replace(aside)
                move_companions(path, aside)
                self._put_in_place(new)
            except (AgentError, OSError) as error:
                self._lost |= dict.fromkeys(damaged, path)
                self._report_once("repair", self._damage(f"{path}: {found}; it cannot be repaired: {_why(error)}", ""))
                return self._file.access_error("write", found)
            self.repairs += 1
            self._report_damage(f"{aside if os.path.lexists(aside) else path}: {found}")
        refused = self._file.access_error("write", "it was damaged, and has been repaired")
        return RepairedError(refused.code, refused.found, refused.expected, "try again")

    def _report_damage(self, found: str) -> None:
        lost = [words + (f" ({action})" if action else "") for words, action in (TABLES[name] for name in self._lost)]
        self.report(self._damage(found, f"; lost: {', '.join(lost)}" if lost else "; nothing was lost"))

    def _damage(self, found: str, losses: str) -> AgentError:
        expected, remedy = "the state of the board, as tared wrote it", f"check the disk{losses}"
        return AgentError("state.damaged", found, expected, remedy)


def _retried(action: Callable[[], T]) -> T:
    """Return the result of a transaction, which is tried again where the file had to be repaired."""
    try:
        return action()
    except RepairedError:
        return action()


def _why(error: AgentError | OSError) -> str:
    """Return the reason in words, without the name of the new file."""
    return error.found.rpartition(": ")[2] if isinstance(error, AgentError) else error.strerror or str(error)


def _is_name(text: str) -> bool:
    return bool(text) and Path(text).name == text


def _is_missing(path: Path) -> bool:
    """Return False also for a folder that may not be read: the file may be there."""
    try:
        path.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False


def _copy(db: sqlite3.Connection, source: Path, tables: Sequence[str], aside: str) -> None:
    """Copy those of these tables that are whole, and note the others, and all that were lost before.

    aside: The name under which the source will lie.

    Raises sqlite3.OperationalError if the disk, or another process, refuses.
    """
    lost = set(TABLES)
    if is_regular(source):
        with closing(sqlite3.connect(source)) as former:
            lost -= {table for table in tables if copy_table(db, former, table)}
            with suppress(sqlite3.DatabaseError, UnicodeError):
                lost |= {name for (name,) in former.execute("SELECT name FROM lost")} & set(TABLES)
    insert_rows(db, "lost", [(name, aside) for name in sorted(lost)])
