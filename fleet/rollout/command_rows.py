"""Commands of rollouts: each is on record before it is sent, as it is sent, and stays there with what came of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from agent.contract.commands import CommandResult
from fleet.store.transaction import Row, Transaction

_ORDER = "c.id, c.device, d.name, c.role, c.payload, c.sent, c.expires, c.accepted"


class CommandRole(str, Enum):
    """What a command is for."""

    DO = "do"
    CANCEL = "cancel"
    UNDO = "undo"


@dataclass(frozen=True)
class CommandRow:
    """A command to a board: on record before it is sent, and as it is sent. accepted: when the board first said so."""

    id: str
    device: int
    name: str
    role: CommandRole
    payload: str
    sent: float
    expires: float
    accepted: float | None = None


def record(transaction: Transaction, identity: str, orders: Iterable[CommandRow]) -> None:
    """Before they are sent."""
    transaction.execute_many(
        "INSERT INTO rollout_commands (id, rollout, device, role, payload, sent, expires) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(each.id, identity, each.device, each.role.value, each.payload, each.sent, each.expires) for each in orders],
    )


def open_commands(transaction: Transaction, identity: str) -> list[CommandRow]:
    """Commands of which nobody knows yet what became."""
    query = (
        f"SELECT {_ORDER} FROM rollout_commands c JOIN devices d ON d.id = c.device "
        "WHERE c.rollout = ? AND c.ended IS NULL ORDER BY c.id"
    )
    return [_order(row) for row in transaction.execute(query, (identity,))]


def devices_with(transaction: Transaction, identity: str, role: CommandRole) -> set[int]:
    """The boards that have been sent a command for this, whatever came of it."""
    query = "SELECT device FROM rollout_commands WHERE rollout = ? AND role = ?"
    return {int(row[0]) for row in transaction.execute(query, (identity, role.value))}


def has_any_accepted(transaction: Transaction, identity: str) -> bool:
    """Whether any board has taken its commands for an order."""
    query = (
        "SELECT 1 FROM rollout_commands WHERE rollout = ? AND (accepted IS NOT NULL OR status = 'SUCCEEDED') LIMIT 1"
    )
    return bool(transaction.execute(query, (identity,)))


def mark_accepted(transaction: Transaction, orders: Iterable[str], now: float) -> None:
    """Their boards have said that they are at it."""
    transaction.execute_many("UPDATE rollout_commands SET accepted = ? WHERE id = ?", [(now, each) for each in orders])


def mark_ended(transaction: Transaction, results: Iterable[CommandResult], now: float) -> None:
    """What became of commands."""
    rows = [(now, each.status, each.to_json().decode(), each.id) for each in results]
    transaction.execute_many("UPDATE rollout_commands SET ended = ?, status = ?, document = ? WHERE id = ?", rows)


def all_commands(transaction: Transaction, identity: str) -> list[Row]:
    """For people: device, role, id, sent, status, the document that was sent, the one that came; the oldest first."""
    query = (
        "SELECT d.name, c.role, c.id, c.sent, c.status, c.payload, c.document FROM rollout_commands c "
        "JOIN devices d ON d.id = c.device WHERE c.rollout = ? ORDER BY c.sent, c.id"
    )
    return transaction.execute(query, (identity,))


def _order(row: Row) -> CommandRow:
    identity, device, name, role, *rest = row
    return CommandRow(identity, device, name, CommandRole(role), *rest)
