"""The fleet's store: SQLite in a file, or PostgreSQL; the same tables, asked in the same words."""

from __future__ import annotations

from pathlib import Path

from agent.common.credentials import located
from agent.common.errors import ConfigError
from fleet.store.sqlite import SqliteStore
from fleet.store.transaction import FleetStore, ReportRow, Row, Transaction, written

__all__ = ["FleetStore", "ReportRow", "Row", "Transaction", "open_existing", "open_store", "written"]

_URLS = ("postgresql://", "postgres://")
_CREDENTIAL = "credential:"
_SQLITE = b"SQLite format 3\0"  # sqlite.org/fileformat.html, 1.3


def open_store(where: str | Path) -> FleetStore:
    """The store at a path, SQLite's file, or at a URL, `postgresql://user@host/database`; there as of the first use.
    `credential:NAME`: where the first line of what systemd hands over says, so that no password is an argument.

    An old schema is brought to today's. Raises AgentError as FleetStore, and ConfigError (`fleet.db`) for a URL of
    another database, or of PostgreSQL where its driver is not installed, and `config.credential`.
    """
    where = _resolved(where) if isinstance(where, str) else where
    if isinstance(where, str) and where.startswith(_URLS):
        return _postgres(where)
    if isinstance(where, str) and "://" in where:
        scheme = where.partition("://")[0]
        raise ConfigError("fleet.db", f"{scheme}://", "a file, or postgresql://...", "correct --db")
    return SqliteStore(Path(where))


def open_existing(where: str) -> FleetStore:
    """As `open_store`, for who only looks: ConfigError (`fleet.db`) where there is no such file, or none of ours.

    A collector puts aside what is damaged; who looks must not rename what somebody has named by mistake.
    """
    where = _resolved(where)
    if "://" not in where:
        try:
            with Path(where).open("rb") as file:
                head = file.read(len(_SQLITE))
        except OSError as error:
            found = f"no file {where}" if isinstance(error, FileNotFoundError) else f"{where}: {error.strerror}"
            raise ConfigError("fleet.db", found, "what 'tared fleet collect' writes", "correct --db") from error
        if head != _SQLITE:
            raise ConfigError("fleet.db", f"{where}, no database", "one of 'tared fleet collect'", "correct --db")
    return open_store(where)


def _resolved(where: str) -> str:
    if not where.startswith(_CREDENTIAL):
        return where
    try:
        return located(Path(where)).read_text(encoding="utf-8").partition("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"give the service LoadCredential={where.removeprefix(_CREDENTIAL)}:FILE"
        raise ConfigError("fleet.db", f"{where}: {error}", "a readable line of text", remedy) from error


def _postgres(url: str) -> FleetStore:
    try:
        from fleet.store.postgres import PostgresStore
    except ModuleNotFoundError:
        remedy = "pip install 'tared[fleet]'"
        raise ConfigError("fleet.db", "no psycopg", "PostgreSQL's driver, for such a URL", remedy) from None
    return PostgresStore(url)
