"""A SQLite file of tared's own: as durable as its users say, and moved aside with all that belongs to it."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from agent.common.database import Database
from agent.common.errors import AgentError
from agent.state.store import StateStore
from agent.uplink import outbox_store
from fleet.store.sqlite import SqliteStore

_FULL, _EXTRA = 2, 3  # of PRAGMA synchronous
COMPANIONS = ("-journal", "-wal", "-shm")

# Commits what only the WAL has, and dies; what it leaves is whole, but for what is spoilt afterwards.
_KILLED = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA journal_mode = WAL")
db.execute("CREATE TABLE numbers (n INTEGER)")
db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
db.execute("PRAGMA wal_autocheckpoint = 0")
db.execute("INSERT INTO numbers VALUES (1), (2), (3)")
os.kill(os.getpid(), 9)
"""


def test_each_file_is_written_so_that_a_power_cut_takes_no_commit_back(tmp_path: Path) -> None:
    store, state = SqliteStore(tmp_path / "fleet"), StateStore(tmp_path)
    store.close()
    outbox = outbox_store.database(tmp_path / "outbox")
    settings = {}
    for database in (outbox, store._database, state._file):
        with closing(database.connect()) as db:
            asked = (db.execute(f"PRAGMA {of}").fetchone()[0] for of in ("journal_mode", "synchronous"))
            settings[database.path.name] = tuple(asked)
    assert settings == {
        "outbox": ("wal", _FULL),
        "fleet": ("wal", _FULL),
        "state.sqlite": ("delete", _EXTRA),  # with a rollback journal FULL may lose the last commit
    }


@pytest.fixture
def database(tmp_path: Path) -> Database:
    return Database(tmp_path / "db", "numbers", "numbers", "they lie there", (), ("journal_mode = WAL",))


def test_pages_in_the_log_go_along_with_a_file_that_is_moved_aside(database: Database) -> None:
    subprocess.run([sys.executable, "-c", _KILLED, str(database.path)], check=False)
    assert database.path.with_name("db-wal").stat().st_size > 0
    assert "db.damaged.1" in str(database.set_aside("a test"))
    with closing(sqlite3.connect(database.path.with_name("db.damaged.1"))) as aside:
        assert aside.execute("SELECT n FROM numbers").fetchall() == [(1,), (2,), (3,)]
    with closing(database.connect()) as fresh:
        assert fresh.execute("SELECT * FROM sqlite_master").fetchall() == []


def test_a_connection_to_a_file_that_was_moved_aside_ends_without_harm_to_the_new_one(database: Database) -> None:
    with closing(database.connect()) as former:
        former.execute("CREATE TABLE former (n INTEGER)")
        database.set_aside("a test")
        with closing(database.connect()) as new:
            new.execute("CREATE TABLE new (n INTEGER)")
            former.close()
            new.execute("INSERT INTO new VALUES (1)")
            with closing(database.connect()) as another:
                assert another.execute("SELECT n FROM new").fetchall() == [(1,)]
    with closing(sqlite3.connect(database.path.with_name("db.damaged.1"))) as aside:
        assert aside.execute("SELECT count(*) FROM former").fetchone() == (0,)


def test_three_damaged_files_are_kept_each_with_what_belongs_to_it(database: Database) -> None:
    strange = database.path.with_name("db.damaged.by-hand")
    strange.write_bytes(b"not ours")
    for number in range(1, 6):
        for companion in ("", *COMPANIONS):
            database.path.with_name(f"db{companion}").write_bytes(b"%d" % number)
        database.set_aside("a test")
    kept = {path.name: path.read_bytes() for path in database.path.parent.iterdir() if path != strange}
    assert kept == {
        f"db.damaged.{number}{companion}": b"%d" % number for number in (3, 4, 5) for companion in ("", *COMPANIONS)
    }
    assert strange.exists()


def test_a_schema_whose_names_are_no_text_is_a_damaged_file(database: Database) -> None:
    """SQLite quotes the name in its message, and Python's module raises UnicodeDecodeError over that."""
    with closing(sqlite3.connect(database.path)) as db:
        db.execute("CREATE TABLE numbers (n INTEGER)")
        db.execute("CREATE INDEX by_number ON numbers (n)")
    content = database.path.read_bytes()
    database.path.write_bytes(content.replace(b"by_number", b"by_\xccumber").replace(b"CREATE INDEX", b"CREATE INDEY"))
    with pytest.raises(AgentError) as caught, database.transaction("read") as db:
        db.execute("SELECT n FROM numbers")
    assert caught.value.code == "numbers.damaged"
