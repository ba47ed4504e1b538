"""Keep records for people: refused messages, results of commands, and who did what."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from agent.contract.commands import CommandResult
from fleet.operator import may_answer_forged_command
from fleet.store.transaction import FleetStore, Transaction
from fleet.untrusted import printable

_MOST_REFUSED = 10_000  # rows
_MOST_BYTES = 4096  # stored bytes of a refused payload
_RESULT = ("device", "command", "status", "final", "received", "document")
_STORE_RESULT = (
    f"INSERT INTO results ({', '.join(_RESULT)}) VALUES ({', '.join('?' * len(_RESULT))}) "
    f"ON CONFLICT (device, command) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _RESULT[2:])} "
    "WHERE results.final = 0 AND (excluded.final = 1 OR excluded.status = 'IN_PROGRESS' OR results.status = 'REJECTED')"
)


@dataclass(frozen=True)
class Refused:
    """A message that could not be accepted. code, found: of the error, `found` as a sentence."""

    fleet: str
    device: str
    topic: str
    code: str
    found: str
    payload: bytes


@dataclass(frozen=True)
class AuditEntry:
    """One act of an operator or a controller.

    at: Unix time in s. what: the act, such as "tag". subject: its object, such as a rollout's id. document: JSON, such
    as the signed command.
    """

    at: float
    who: str
    what: str
    why: str
    subject: str
    document: str


def quarantine(transaction: Transaction, refused: Sequence[Refused], now: float) -> None:
    """Record refused messages. The newest 10,000 are kept, each with up to 4 KiB of its payload."""
    columns = "received, fleet, device, topic, code, found, payload"
    rows = []
    for each in refused[-_MOST_REFUSED:]:
        names = printable(each.fleet), printable(each.device), printable(each.topic)
        rows.append((now, *names, each.code, printable(each.found, 300), each.payload[:_MOST_BYTES]))
    transaction.execute_many(f"INSERT INTO quarantine ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    if refused:
        transaction.execute("DELETE FROM quarantine WHERE id <= (SELECT max(id) FROM quarantine) - ?", (_MOST_REFUSED,))


def audit(transaction: Transaction, who: str, what: str, why: str, subject: str, document: str) -> None:
    """Record an act. Records are never deleted."""
    insert = "INSERT INTO audit (at, who, what, why, subject, document) VALUES (?, ?, ?, ?, ?, ?)"
    transaction.execute(insert, (time.time(), who, what, why, subject, document))


def count_audited(transaction: Transaction, what: str) -> int:
    """Return how often an act was recorded."""
    return int(transaction.execute("SELECT count(*) FROM audit WHERE what = ?", (what,))[0][0])


def audit_entries(store: FleetStore, subject: str | None = None) -> list[AuditEntry]:
    """Return the records of a subject, or all of them; the oldest first."""
    where, values = ("", ()) if subject is None else (" WHERE subject = ?", (subject,))
    with store.transaction("read") as transaction:
        rows = transaction.execute(
            f"SELECT at, who, what, why, subject, document FROM audit{where} ORDER BY id", values
        )
    return [AuditEntry(*row) for row in rows]


def quarantined(store: FleetStore, newest: int = 100, fleet: str | None = None) -> list[Refused]:
    """Return the newest refused messages of a fleet, or of all fleets; the newest first."""
    query = (
        "SELECT fleet, device, topic, code, found, payload FROM quarantine "
        "WHERE fleet = coalesce(?, fleet) ORDER BY id DESC LIMIT ?"
    )
    with store.transaction("read") as transaction:
        rows = transaction.execute(query, (fleet, newest))
    return [Refused(*row[:5], bytes(row[5])) for row in rows]  # type: ignore[call-arg]  # mypy counts no slice


def store_results(transaction: Transaction, results: Sequence[tuple[int, CommandResult, str]], now: float) -> None:
    """Store results of commands.

    A stored final result stays, and `ACCEPTED` does not replace `IN_PROGRESS`: another collector may be ahead. A
    refusal that anybody can provoke under the id of another's command is replaced by any other result.

    Args:
        results: The device's id, its result, and the result's document; the older first.
        now: Unix time in s.
    """
    rows = []
    for device, result, document in results:
        is_final = result.final and not may_answer_forged_command(result)
        rows.append((device, result.id, result.status, int(is_final), now, document))
    transaction.execute_many(_STORE_RESULT, sorted(rows, key=lambda row: row[:2]))


def result_documents(store: FleetStore, commands: Iterable[tuple[int, str]]) -> list[str]:
    """Return the newest result of each of these commands that has one. commands: the device's id, the command's id."""
    with store.transaction("read") as transaction:
        return [str(row[0]) for row in transaction.lookup("results", _RESULT[:2], ("document",), commands).values()]
