"""Copy tables from one SQLite file into another, each whole or not at all."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agent.common.database import is_damage

Row = tuple[Any, ...]


def is_regular(path: Path) -> bool:
    """Return whether a file may be opened; a pipe would block, and a link may lead anywhere."""
    return path.is_file() and not path.is_symlink()


def copy_table(db: sqlite3.Connection, former: sqlite3.Connection, table: str) -> bool:
    """Copy all rows of a table; return False, and copy nothing, if it is damaged, or its rows do not fit.

    Raises sqlite3.OperationalError if the disk, or another process, refuses.
    """
    try:
        if former.execute(f"PRAGMA quick_check({table})").fetchone() != ("ok",):
            return False
        columns = ", ".join(row[1] for row in db.execute(f"PRAGMA table_info({table})"))
        rows = former.execute(f"SELECT {columns} FROM {table} ORDER BY rowid").fetchall()
    except (sqlite3.Error, UnicodeError) as error:
        return _is_no_fault_of_the_disk(error)
    return insert_rows(db, table, rows)


def insert_rows(db: sqlite3.Connection, table: str, rows: Sequence[Row]) -> bool:
    """Insert rows within a transaction; return False, and insert nothing, if they do not fit the table.

    Raises sqlite3.OperationalError if the disk refuses.
    """
    db.execute("SAVEPOINT inserted")
    try:
        for row in rows:
            db.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)
    except (sqlite3.Error, UnicodeError, OverflowError) as error:
        db.execute("ROLLBACK TO inserted")
        return _is_no_fault_of_the_disk(error)
    finally:
        db.execute("RELEASE inserted")
    return True


def _is_no_fault_of_the_disk(error: Exception) -> bool:
    """Return False for an error by what was read; raise any other."""
    if isinstance(error, sqlite3.OperationalError) and not is_damage(error):
        raise error
    return False
