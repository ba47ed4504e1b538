"""Fixtures for the databases of a fleet's store: SQLite always, a real PostgreSQL where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from benchmarks.postgres import Postgres
from fleet.store.opening import open_store
from fleet.store.transaction import FleetStore


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A running server. Skips the test where there is none, unless TARED_REQUIRE_POSTGRES is set."""
    missing = Postgres.missing()
    if importlib.util.find_spec("psycopg") is None:
        missing = "psycopg is not installed: pip install '.[fleet]'"
    if missing is not None:
        assert "TARED_REQUIRE_POSTGRES" not in os.environ, missing
        pytest.skip(missing)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgres"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the address of a new store, in each of the databases."""
    if request.param == "sqlite":
        return str(tmp_path / "fleet.sqlite")
    return _emptied(request.getfixturevalue("postgres"))


@cache
def _url(server: Postgres) -> str:
    return server.new_database()


def _emptied(server: Postgres) -> str:
    """Return the address of the server's one database, without its tables: a new database takes ten times as long."""
    import psycopg

    with psycopg.connect(_url(server), autocommit=True) as db:
        db.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        db.execute("DROP SCHEMA public CASCADE")
        db.execute("CREATE SCHEMA public")
    return _url(server)


@pytest.fixture
def store(where: str) -> Iterator[FleetStore]:
    """Open a new store, in each of the databases."""
    with open_store(where) as opened:
        yield opened
