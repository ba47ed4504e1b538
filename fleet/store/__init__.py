"""The fleet's store: SQLite in a file, or PostgreSQL; the same tables, asked in the same words."""

from __future__ import annotations

from pathlib import Path

from agent.errors import ConfigError
from fleet.store.sqlite import SqliteStore
from fleet.store.transaction import ReportRow, Row, Store, Transaction

__all__ = ["ReportRow", "Row", "Store", "Transaction", "open_existing", "open_store"]

_URLS = ("postgresql://", "postgres://")


def open_store(where: str | Path) -> Store:
    """The store at a path, SQLite's file, or at a URL, `postgresql://user@host/database`; there as of the first use.

    An old schema is brought to today's. Raises AgentError as Store, and ConfigError (`fleet.db`) for a URL of another
    database, or of PostgreSQL where its driver is not installed.
    """
    if isinstance(where, str) and where.startswith(_URLS):
        return _postgres(where)
    if isinstance(where, str) and "://" in where:
        scheme = where.partition("://")[0]
        raise ConfigError("fleet.db", f"{scheme}://", "a file, or postgresql://...", "correct --db")
    return SqliteStore(Path(where))


def open_existing(where: str) -> Store:
    """As `open_store`, for who only looks: raises ConfigError (`fleet.db`) where there is no such file."""
    if "://" not in where and not Path(where).exists():
        raise ConfigError("fleet.db", f"no file {where}", "what 'tared fleet collect' writes", "correct --db")
    return open_store(where)


def _postgres(url: str) -> Store:
    try:
        from fleet.store.postgres import PostgresStore
    except ModuleNotFoundError:
        remedy = "pip install 'tared[fleet]'"
        raise ConfigError("fleet.db", "no psycopg", "PostgreSQL's driver, for such a URL", remedy) from None
    return PostgresStore(url)
