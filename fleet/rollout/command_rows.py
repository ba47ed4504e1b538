"""Read and write the table of commands (`rollout_commands`).

Each command is recorded before it is sent, exactly as it is sent, and stays there with its result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from agent.contract.commands import CommandResult
from fleet.store.transaction import Row, Transaction

_COLUMNS = "c.id, c.device, d.name, c.role, c.payload, c.sent, c.expires, c.accepted"


class CommandRole(str, Enum):
    """What a command is for."""

    DO = "do"
    CANCEL = "cancel"
    UNDO = "undo"


@dataclass(frozen=True)
class CommandRow:
    """A command to a board. payload: the document. accepted: when the board first said that it carries it out."""

    id: str
    device: int
    name: str
    role: CommandRole
    payload: str
    sent: float
    expires: float
    accepted: float | None = None


def record(transaction: Transaction, identity: str, commands: Iterable[CommandRow]) -> None:
    """Record new commands of a rollout."""
    transaction.execute_many(
        "INSERT INTO rollout_commands (id, rollout, device, role, payload, sent, expires) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(each.id, identity, each.device, each.role.value, each.payload, each.sent, each.expires) for each in commands],
    )


def open_commands(transaction: Transaction, identity: str) -> list[CommandRow]:
    """Return the commands without a final result."""
    query = (
        f"SELECT {_COLUMNS} FROM rollout_commands c JOIN devices d ON d.id = c.device "
        "WHERE c.rollout = ? AND c.ended IS NULL ORDER BY c.id"
    )
    rows = transaction.execute(query, (identity,))
    return [CommandRow(id_, device, name, CommandRole(role), *rest) for id_, device, name, role, *rest in rows]


def devices_with_role(transaction: Transaction, identity: str, role: CommandRole) -> set[int]:
    """Return the devices that got a command of this role, whatever its result."""
    query = "SELECT device FROM rollout_commands WHERE rollout = ? AND role = ?"
    return {int(row[0]) for row in transaction.execute(query, (identity, role.value))}


def has_any_accepted(transaction: Transaction, identity: str) -> bool:
    """Return True if any board has accepted a command of this rollout."""
    query = (
        "SELECT 1 FROM rollout_commands WHERE rollout = ? AND (accepted IS NOT NULL OR status = 'SUCCEEDED') LIMIT 1"
    )
    return bool(transaction.execute(query, (identity,)))


def mark_accepted(transaction: Transaction, commands: Iterable[str], now: float) -> None:
    """Note that boards carry out these commands."""
    transaction.execute_many(
        "UPDATE rollout_commands SET accepted = ? WHERE id = ?", [(now, each) for each in commands]
    )


def mark_ended(transaction: Transaction, results: Iterable[CommandResult], now: float) -> None:
    """Note the final results of commands."""
    rows = [(now, each.status, each.to_json().decode(), each.id) for each in results]
    transaction.execute_many("UPDATE rollout_commands SET ended = ?, status = ?, document = ? WHERE id = ?", rows)


def all_commands(transaction: Transaction, identity: str) -> list[Row]:
    """Return rows for people: device, role, id, sent, status, command, result; the oldest first."""
    query = (
        "SELECT d.name, c.role, c.id, c.sent, c.status, c.payload, c.document FROM rollout_commands c "
        "JOIN devices d ON d.id = c.device WHERE c.rollout = ? ORDER BY c.sent, c.id"
    )
    return transaction.execute(query, (identity,))
