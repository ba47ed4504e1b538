"""The boards of a rollout: their rows, and what becomes of them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from fleet.rollout.command_rows import CommandRole
from fleet.store.transaction import Row, Transaction

_TARGET = "t.device, d.name, t.wave, t.zone, t.state, t.attempts, t.baseline, t.artefact, t.reason, t.settled"
_AT_ONCE = 500
_TARGETS = "rollout_targets t JOIN devices d ON d.id = t.device"


class TargetState(str, Enum):
    """Of a board. WAITING: nobody has told it anything. SENT: it has been told, and what became of it is not known.
    UNDOING to UNDONE: it goes back to what it had; KEPT: it did not, for a reason."""

    WAITING = "WAITING"
    SENT = "SENT"
    DONE = "DONE"
    FAILED = "FAILED"
    UNREACHED = "UNREACHED"
    UNDOING = "UNDOING"
    UNDONE = "UNDONE"
    KEPT = "KEPT"


@dataclass(frozen=True)
class TargetRow:
    """before: its facts, and of a policy its values, when it was told. artefact: that it made of it. settled: when its
    state became one that lasts."""

    device: int
    name: str
    wave: int
    zone: str
    state: TargetState
    attempts: int
    baseline: Mapping[str, Any]
    artefact: str | None
    reason: str
    settled: float | None


@dataclass(frozen=True)
class TargetChange:
    """What becomes of a board's row; what is None stays as it is."""

    device: int
    state: TargetState
    reason: str = ""
    artefact: str | None = None
    baseline: Mapping[str, Any] | None = None
    due: float = 0.0
    attempts: int | None = None


def counts(transaction: Transaction, identity: str) -> dict[int, Counter[TargetState]]:
    """How many boards of each wave are in which state."""
    query = "SELECT wave, state, count(*) FROM rollout_targets WHERE rollout = ? GROUP BY wave, state"
    found: dict[int, Counter[TargetState]] = {}
    for wave, state, count in transaction.execute(query, (identity,)):
        found.setdefault(int(wave), Counter())[TargetState(state)] = int(count)
    return found


def waiting_zones(transaction: Transaction, identity: str, wave: int) -> list[str]:
    """Where boards of a wave are that nobody has told yet."""
    query = "SELECT DISTINCT zone FROM rollout_targets WHERE rollout = ? AND wave = ? AND state = ? ORDER BY zone"
    return [str(row[0]) for row in transaction.execute(query, (identity, wave, TargetState.WAITING.value))]


def due(
    transaction: Transaction,
    identity: str,
    waves: tuple[int, int],
    state: TargetState,
    now: float,
    most: int,
    within: Sequence[str] | None = None,
) -> list[TargetRow]:
    """Boards of these waves, the first and the last, in a state whose next step is due, in their order; within: those
    in these time zones."""
    where, values = "", tuple(within or ())
    if within is not None:
        where = f" AND t.zone IN ({', '.join('?' * len(values))})" if values else " AND 1 = 0"
    query = (
        f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.wave BETWEEN ? AND ? AND t.state = ? "
        f"AND t.due <= ?{where} ORDER BY t.wave, t.place LIMIT ?"
    )
    found = transaction.execute(query, (identity, *waves, state.value, now, *values, most))
    return [_target(row) for row in found]


def of_waves(
    transaction: Transaction, identity: str, first: int, last: int, state: TargetState | None = None
) -> list[TargetRow]:
    """Boards of these waves, the first and the last, in their order; only those in a state where one is named."""
    only, values = ("", ()) if state is None else (" AND t.state = ?", (state.value,))
    query = (
        f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.wave BETWEEN ? AND ?{only} "
        "ORDER BY t.wave, t.place"
    )
    return [_target(row) for row in transaction.execute(query, (identity, first, last, *values))]


def by_device(transaction: Transaction, identity: str, devices: Sequence[int]) -> dict[int, TargetRow]:
    """Boards by their ids."""
    found = {}
    for start in range(0, len(devices), _AT_ONCE):
        part = devices[start : start + _AT_ONCE]
        query = f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.device IN ({', '.join('?' * len(part))})"
        found.update({row[0]: _target(row) for row in transaction.execute(query, (identity, *part))})
    return found


def late_successes(transaction: Transaction, identity: str, first: int) -> list[tuple[int, str]]:
    """Boards of that wave and those after it that counted as failed or unreached, and have done what they were told
    after all, by what a collector has heard: with that result."""
    query = (
        "SELECT t.device, r.document FROM rollout_targets t "
        "JOIN rollout_commands c ON c.rollout = t.rollout AND c.device = t.device "
        "JOIN results r ON r.device = c.device AND r.command = c.id "
        "WHERE t.rollout = ? AND t.wave >= ? AND t.state IN (?, ?) AND c.role = ? AND r.status = 'SUCCEEDED'"
    )
    values = identity, first, TargetState.FAILED.value, TargetState.UNREACHED.value, CommandRole.DO.value
    return [(int(device), str(document)) for device, document in transaction.execute(query, values)]


def apply_changes(transaction: Transaction, identity: str, changes: Sequence[TargetChange], now: float) -> None:
    """Write down what became of boards."""
    transaction.execute_many(
        "UPDATE rollout_targets SET state = ?, reason = ?, artefact = coalesce(?, artefact), "
        "baseline = coalesce(?, baseline), due = ?, attempts = coalesce(?, attempts), "
        "settled = CASE WHEN state = ? THEN settled ELSE ? END "
        "WHERE rollout = ? AND device = ?",
        [
            (
                each.state.value,
                each.reason,
                each.artefact,
                json.dumps(each.baseline) if each.baseline is not None else None,
                each.due,
                each.attempts,
                each.state.value,
                now,
                identity,
                each.device,
            )
            for each in sorted(changes, key=lambda each: each.device)
        ],
    )


def _target(row: Row) -> TargetRow:
    device, name, wave, zone, state, attempts, before, *rest = row
    return TargetRow(device, name, wave, zone, TargetState(state), attempts, json.loads(before), *rest)
