"""The databases a fleet's store may lie in, as fixtures: SQLite always, a real PostgreSQL where it is installed."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
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
    """Where a new store is to lie, in each of the databases."""
    if request.param == "sqlite":
        return str(tmp_path / "fleet.sqlite")
    server: Postgres = request.getfixturevalue("postgres")
    return server.new_database()


@pytest.fixture
def store(where: str) -> Iterator[FleetStore]:
    """A new one, in each of the databases."""
    with open_store(where) as opened:
        yield opened
