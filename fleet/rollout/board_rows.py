"""Read and write the table of a rollout's boards (`rollout_targets`): their waves, states and baselines."""

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
    """The state of one board in a rollout.

    WAITING: it was sent nothing yet. SENT: it was sent a command whose result is not known. DONE, FAILED: the result.
    UNREACHED: it did not answer. UNDOING: it was sent back to what it had. UNDONE: it is back. KEPT: it is not, for a
    reason.
    """

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
    """A board of a rollout.

    baseline: its facts before the command, and for a policy the replaced values. artefact: the engine that it made.
    settled: when it got its present state, Unix time in s.
    """

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
    """The new state of a board; fields of None stay as they are. due: Unix time in s of the next step."""

    device: int
    state: TargetState
    reason: str = ""
    artefact: str | None = None
    baseline: Mapping[str, Any] | None = None
    due: float = 0.0
    attempts: int | None = None


def counts(transaction: Transaction, identity: str) -> dict[int, Counter[TargetState]]:
    """Return how many boards of each wave are in which state."""
    query = "SELECT wave, state, count(*) FROM rollout_targets WHERE rollout = ? GROUP BY wave, state"
    by_wave: dict[int, Counter[TargetState]] = {}
    for wave, state, count in transaction.execute(query, (identity,)):
        by_wave.setdefault(int(wave), Counter())[TargetState(state)] = int(count)
    return by_wave


def waiting_zones(transaction: Transaction, identity: str, wave: int) -> list[str]:
    """Return the time zones of the boards of a wave that are still WAITING."""
    query = "SELECT DISTINCT zone FROM rollout_targets WHERE rollout = ? AND wave = ? AND state = ? ORDER BY zone"
    return [str(row[0]) for row in transaction.execute(query, (identity, wave, TargetState.WAITING.value))]


def due(
    transaction: Transaction,
    identity: str,
    waves: tuple[int, int],
    state: TargetState,
    now: float,
    most: int,
    zones: Sequence[str] | None = None,
) -> list[TargetRow]:
    """Return boards whose next step is due, in their order.

    waves: the first and the last. most: at most so many boards. zones: only boards in these time zones.
    """
    where, values = "", tuple(zones or ())
    if zones is not None:
        where = f" AND t.zone IN ({', '.join('?' * len(values))})" if values else " AND 1 = 0"
    query = (
        f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.wave BETWEEN ? AND ? AND t.state = ? "
        f"AND t.due <= ?{where} ORDER BY t.wave, t.place LIMIT ?"
    )
    rows = transaction.execute(query, (identity, *waves, state.value, now, *values, most))
    return [_target(row) for row in rows]


def of_waves(
    transaction: Transaction, identity: str, first: int, last: int, state: TargetState | None = None
) -> list[TargetRow]:
    """Return the boards of the waves from `first` to `last`, in their order; only those in `state` if it is given."""
    only, values = ("", ()) if state is None else (" AND t.state = ?", (state.value,))
    query = (
        f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.wave BETWEEN ? AND ?{only} "
        "ORDER BY t.wave, t.place"
    )
    return [_target(row) for row in transaction.execute(query, (identity, first, last, *values))]


def by_device(transaction: Transaction, identity: str, devices: Sequence[int]) -> dict[int, TargetRow]:
    """Return these boards, by their ids."""
    rows = {}
    for start in range(0, len(devices), _AT_ONCE):
        part = devices[start : start + _AT_ONCE]
        query = f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.device IN ({', '.join('?' * len(part))})"
        rows.update({row[0]: _target(row) for row in transaction.execute(query, (identity, *part))})
    return rows


def late_successes(transaction: Transaction, identity: str, first: int) -> list[tuple[int, str]]:
    """Return boards that counted as FAILED or UNREACHED and have succeeded after all, each with that result.

    first: the first wave that is searched. The results are those that a collector has stored.
    """
    query = (
        "SELECT t.device, r.document FROM rollout_targets t "
        "JOIN rollout_commands c ON c.rollout = t.rollout AND c.device = t.device "
        "JOIN results r ON r.device = c.device AND r.command = c.id "
        "WHERE t.rollout = ? AND t.wave >= ? AND t.state IN (?, ?) AND c.role = ? AND r.status = 'SUCCEEDED'"
    )
    values = identity, first, TargetState.FAILED.value, TargetState.UNREACHED.value, CommandRole.DO.value
    return [(int(device), str(document)) for device, document in transaction.execute(query, values)]


def apply_changes(transaction: Transaction, identity: str, changes: Sequence[TargetChange], now: float) -> None:
    """Store the new states of boards."""
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
