"""Open a fleet's store by its address: a path for SQLite, a URL for PostgreSQL, or a credential that holds one."""

from __future__ import annotations

from pathlib import Path

from agent.common.credentials import locate
from agent.common.errors import ConfigError
from calibrate.errors import install_extra
from fleet.store.sqlite import CACHE_KIB, SqliteStore
from fleet.store.transaction import FleetStore

_URLS = ("postgresql://", "postgres://")
_CREDENTIAL = "credential:"
_SQLITE = b"SQLite format 3\0"  # sqlite.org/fileformat.html, 1.3


def open_store(where: str | Path, cache_kib: int = CACHE_KIB) -> FleetStore:
    """Open the store, create it if it does not exist, and migrate an old schema.

    where: the path of SQLite's file; `postgresql://user@host/database`; or `credential:NAME`, whose first line is one
    of these: with a systemd credential no password is an argument. cache_kib: SQLite's pages in memory.

    Raises AgentError as FleetStore, and ConfigError:
        fleet.db            a URL of another database, or PostgreSQL without its driver
        config.credential   systemd hands over no such credential
    """
    where = _resolved(str(where))
    if where.startswith(_URLS):
        try:
            from fleet.store.postgres import PostgresStore  # only if needed: psycopg is an extra
        except ModuleNotFoundError:
            remedy = install_extra("fleet")
            raise ConfigError("fleet.db", "no psycopg", "PostgreSQL's driver, for such a URL", remedy) from None
        return PostgresStore(where)
    if "://" in where:
        scheme = where.partition("://")[0]
        raise ConfigError("fleet.db", f"{scheme}://", "a file, or postgresql://...", "correct --db")
    return SqliteStore(Path(where), cache_kib)


def open_existing(where: str, cache_kib: int = CACHE_KIB) -> FleetStore:
    """Open a store that exists, as `open_store`. Raises ConfigError (`fleet.db`) for a missing or foreign file.

    A collector moves a damaged file aside. Other commands must not do that to a file that was named by mistake.
    """
    where = _resolved(where)
    if "://" not in where:
        found = ""
        try:
            with Path(where).open("rb") as file:
                if file.read(len(_SQLITE)) != _SQLITE:
                    found = f"{where}, no database"
        except OSError as error:
            found = f"no file {where}" if isinstance(error, FileNotFoundError) else f"{where}: {error.strerror}"
        if found:
            raise ConfigError("fleet.db", found, "a database that 'tared fleet collect' writes", "correct --db")
    return open_store(where, cache_kib)


def _resolved(where: str) -> str:
    if not where.startswith(_CREDENTIAL):
        return where
    try:
        return locate(Path(where)).read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"give the service LoadCredential={where.removeprefix(_CREDENTIAL)}:FILE"
        raise ConfigError("fleet.db", f"{where}: {error}", "a readable line of text", remedy) from error
