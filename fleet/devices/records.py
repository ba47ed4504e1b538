"""What is kept for people to look at: what was refused of boards, what became of commands, who has done what."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from agent.contract.commands import CommandResult
from fleet.devices.identities import Identities, Name
from fleet.operator import may_be_of_anybodys
from fleet.store import FleetStore, Row, Transaction
from fleet.untrusted import printable

_MOST_REFUSED = 10_000  # rows
_MOST_BYTES = 4096  # of what was refused
_RESULT = ("device", "command", "status", "final", "received", "document")
_TAKE_RESULT = (
    f"INSERT INTO results ({', '.join(_RESULT)}) VALUES ({', '.join('?' * len(_RESULT))}) "
    f"ON CONFLICT (device, command) DO UPDATE SET {', '.join(f'{name} = excluded.{name}' for name in _RESULT[2:])} "
    "WHERE results.final = 0 AND (excluded.final = 1 OR excluded.status = 'IN_PROGRESS' OR results.status = 'REJECTED')"
)


@dataclass(frozen=True)
class Refused:
    """What a board has sent, and nobody could take as what it should have been. found: in words."""

    fleet: str
    device: str
    topic: str
    code: str
    found: str
    payload: bytes


@dataclass(frozen=True)
class AuditEntry:
    """at: Unix time in s. what: the act, such as "tag". subject: what it was done to, such as a rollout's id. document:
    JSON, such as the signed command."""

    at: float
    who: str
    what: str
    why: str
    subject: str
    document: str


def quarantine(transaction: Transaction, refused: Sequence[Refused], now: float) -> None:
    """Keep the newest 10,000, each up to 4 KiB of it."""
    insert = (
        "INSERT INTO quarantine (received, fleet, device, topic, code, found, payload) VALUES (?, ?, ?, ?, ?, ?, ?)"
    )
    transaction.execute_many(insert, [_row(each, now) for each in refused[-_MOST_REFUSED:]])
    if refused:
        transaction.execute("DELETE FROM quarantine WHERE id <= (SELECT max(id) FROM quarantine) - ?", (_MOST_REFUSED,))


def _row(each: Refused, now: float) -> Row:
    names = printable(each.fleet), printable(each.device), printable(each.topic)
    return now, *names, each.code, printable(each.found, 300), each.payload[:_MOST_BYTES]


def audit(transaction: Transaction, who: str, what: str, why: str, subject: str, document: str) -> None:
    """Put on record; nothing takes it off again."""
    insert = "INSERT INTO audit (at, who, what, why, subject, document) VALUES (?, ?, ?, ?, ?, ?)"
    transaction.execute(insert, (time.time(), who, what, why, subject, document))


def audited(store: FleetStore, subject: str | None = None) -> list[AuditEntry]:
    """What is on record, of all subjects where none is named, the oldest first."""
    where, values = ("", ()) if subject is None else (" WHERE subject = ?", (subject,))
    with store.begun("read") as transaction:
        found = transaction.execute(
            f"SELECT at, who, what, why, subject, document FROM audit{where} ORDER BY id", values
        )
    return [AuditEntry(*row) for row in found]


def refused(store: FleetStore, newest: int = 100, fleet: str | None = None) -> list[Refused]:
    """What lies in quarantine of a fleet, of all where none is named, the newest first."""
    query = (
        "SELECT fleet, device, topic, code, found, payload FROM quarantine "
        "WHERE fleet = coalesce(?, fleet) ORDER BY id DESC LIMIT ?"
    )
    with store.begun("read") as transaction:
        found = transaction.execute(query, (fleet, newest))
    return [Refused(*row[:5], bytes(row[5])) for row in found]  # type: ignore[call-arg]  # mypy counts no slice


def _is_final(result: CommandResult) -> bool:
    return result.final and not may_be_of_anybodys(result)


class Results:
    """What became of commands. Raises AgentError as the store does."""

    def __init__(self, store: FleetStore) -> None:
        self._store = store
        self._identities = Identities(store)

    def take(self, transaction: Transaction, told: Iterable[tuple[Name, CommandResult, str]], now: float) -> None:
        """The results of commands, the older first, and each document.

        A final one stays, and what was accepted is no news of what is in progress: another collector may be ahead. A
        refusal that anybody can provoke under the id of another's command stays until there is anything else.
        """
        told = list(told)
        ids = self._identities.of(transaction, {name for name, _, _ in told}, now)
        rows = [
            (ids[name], result.id, result.status, int(_is_final(result)), now, document)
            for name, result, document in told
        ]
        transaction.execute_many(_TAKE_RESULT, sorted(rows, key=lambda row: row[:2]))

    def of(self, commands: Iterable[tuple[int, str]]) -> Mapping[tuple[int, str], str]:
        """The newest result of each of these, by device's id and command's id, as it came."""
        with self._store.begun("read") as transaction:
            found = transaction.lookup("results", _RESULT[:2], ("document",), commands)
        return {(int(key[0]), str(key[1])): str(row[0]) for key, row in found.items()}
