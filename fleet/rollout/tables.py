"""A rollout's rows: itself, and its boards."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.errors import CommandError
from fleet.rollout.spec import Spec
from fleet.rollout.states import State, Target
from fleet.store import Row, Transaction

_ROLLOUT = "id, fleet, spec, state, wave, waves, soak_until, undo_from, ends_as, created, lease_owner, lease_until"
_TARGET = "t.device, d.name, t.wave, t.zone, t.state, t.attempts, t.baseline, t.artefact, t.reason, t.settled"
_AT_ONCE = 500
_TARGETS = "rollout_targets t JOIN devices d ON d.id = t.device"


@dataclass(frozen=True)
class Rollout:
    """wave: the present one, from 0, of so many. soak_until: until when it is looked at, None before all of it is
    settled. undo_from: the first wave whose boards are to go back, once it is UNDOING, to end as `ends_as`. Unix times
    in s."""

    id: str
    fleet: str
    spec: Spec
    state: State
    wave: int
    waves: int
    soak_until: float | None
    undo_from: int
    ends_as: State
    created: float
    lease_owner: str | None
    lease_until: float


@dataclass(frozen=True)
class TargetRow:
    """before: its facts, and of a policy its values, when it was told. artefact: that it made of it. settled: when its
    state became one that lasts."""

    device: int
    name: str
    wave: int
    zone: str
    state: Target
    attempts: int
    before: Mapping[str, Any]
    artefact: str | None
    reason: str
    settled: float | None


@dataclass(frozen=True)
class Change:
    """What becomes of a board's row; what is None stays as it is."""

    device: int
    state: Target
    reason: str = ""
    artefact: str | None = None
    before: Mapping[str, Any] | None = None
    due: float = 0.0
    attempts: int | None = None


def create(
    transaction: Transaction, fleet: str, spec: Spec, waves: Sequence[Sequence[tuple[int, str]]], now: float
) -> str:
    """A new rollout; its id. waves: of each the ids and time zones of its boards."""
    identity = uuid.uuid4().hex[:12]
    transaction.execute(
        "INSERT INTO rollouts (id, fleet, spec, state, wave, waves, undo_from, ends_as, created, lease_until) "
        "VALUES (?, ?, ?, ?, 0, ?, 0, ?, ?, 0.0)",
        (identity, fleet, spec.to_json(), State.RUNNING.value, len(waves), State.COMPLETED.value, now),
    )
    rows = [
        (identity, device, wave, place, zone, Target.WAITING.value)
        for wave, boards in enumerate(waves)
        for place, (device, zone) in enumerate(boards)
    ]
    transaction.execute_many(
        "INSERT INTO rollout_targets (rollout, device, wave, place, zone, state, due, attempts, baseline, reason) "
        "VALUES (?, ?, ?, ?, ?, ?, 0.0, 0, '{}', '')",
        rows,
    )
    return identity


def find(transaction: Transaction, identity: str) -> Rollout:
    """By its id, or the beginning of it that only one has. Raises CommandError (`rollout.unknown`, and `rollout.spec`
    for one of a newer tared)."""
    ids = [str(row[0]) for row in transaction.execute("SELECT id FROM rollouts")]
    found = [each for each in ids if each.startswith(identity)] if identity else []
    if len(found) != 1:
        expected = "the id of one rollout" if not found else "more of its id: several begin so"
        raise CommandError("rollout.unknown", repr(identity), expected, "look at 'tared fleet rollout list'")
    (row,) = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts WHERE id = ?", (found[0],))
    return _rollout(row)


def locked(transaction: Transaction, identity: str) -> Rollout:
    """As `find`; nobody else changes it until the end of the transaction."""
    found = find(transaction, identity)
    transaction.execute("UPDATE rollouts SET created = created WHERE id = ?", (found.id,))
    return find(transaction, found.id)


def rollouts(transaction: Transaction, fleet: str | None = None) -> list[Rollout]:
    """The newest first; of all fleets where none is named."""
    where, values = ("", ()) if fleet is None else (" WHERE fleet = ?", (fleet,))
    found = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts{where} ORDER BY created DESC", values)
    return [_rollout(row) for row in found]


def claim(transaction: Transaction, owner: str, now: float, until: float, but: Collection[str]) -> list[str]:
    """The ids of the rollouts that are not over and nobody else holds; from now on `owner` does, `until` then. but:
    those it cannot carry out, and leaves to others.

    Of two that claim at the same moment each takes what the other has not: rows that are being taken are passed over.
    """
    free = (
        "SELECT id FROM rollouts WHERE state IN (?, ?, ?) AND (lease_owner = ? OR lease_until < ?) "
        f"ORDER BY created {transaction.skip_locked}"
    )
    live = [each.value for each in State if not each.over]
    found = [str(row[0]) for row in transaction.execute(free, (*live, owner, now)) if row[0] not in but]
    take = "UPDATE rollouts SET lease_owner = ?, lease_until = ? WHERE id = ?"
    transaction.execute_many(take, [(owner, until, identity) for identity in found])
    return found


def hold(transaction: Transaction, identity: str, owner: str, now: float) -> Rollout | None:
    """The rollout, locked to the end of the transaction; None where the owner's lease on it is over, or was taken."""
    mine = "UPDATE rollouts SET lease_owner = lease_owner WHERE id = ? AND lease_owner = ? AND lease_until >= ?"
    if not transaction.changed(mine, (identity, owner, now)):
        return None
    return find(transaction, identity)


def release(transaction: Transaction, owner: str, ids: Iterable[str]) -> None:
    """Of these, what it holds: anybody may claim them at once."""
    free = "UPDATE rollouts SET lease_until = 0.0 WHERE lease_owner = ? AND id = ?"
    transaction.execute_many(free, [(owner, identity) for identity in ids])


def move(transaction: Transaction, rollout: Rollout) -> None:
    """Write down where it is now."""
    transaction.execute(
        "UPDATE rollouts SET state = ?, wave = ?, soak_until = ?, undo_from = ?, ends_as = ? WHERE id = ?",
        (
            rollout.state.value,
            rollout.wave,
            rollout.soak_until,
            rollout.undo_from,
            rollout.ends_as.value,
            rollout.id,
        ),
    )


def counts(transaction: Transaction, identity: str) -> dict[int, Counter[Target]]:
    """How many boards of each wave are in which state."""
    query = "SELECT wave, state, count(*) FROM rollout_targets WHERE rollout = ? GROUP BY wave, state"
    found: dict[int, Counter[Target]] = {}
    for wave, state, count in transaction.execute(query, (identity,)):
        found.setdefault(int(wave), Counter())[Target(state)] = int(count)
    return found


def zones(transaction: Transaction, identity: str, wave: int) -> list[str]:
    """Where boards of a wave are that nobody has told yet."""
    query = "SELECT DISTINCT zone FROM rollout_targets WHERE rollout = ? AND wave = ? AND state = ? ORDER BY zone"
    return [str(row[0]) for row in transaction.execute(query, (identity, wave, Target.WAITING.value))]


def due(
    transaction: Transaction,
    identity: str,
    waves: tuple[int, int],
    state: Target,
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


def targets(
    transaction: Transaction, identity: str, first: int, last: int, state: Target | None = None
) -> list[TargetRow]:
    """Boards of these waves, the first and the last, in their order; only those in a state where one is named."""
    only, values = ("", ()) if state is None else (" AND t.state = ?", (state.value,))
    query = (
        f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.wave BETWEEN ? AND ?{only} "
        "ORDER BY t.wave, t.place"
    )
    return [_target(row) for row in transaction.execute(query, (identity, first, last, *values))]


def these(transaction: Transaction, identity: str, devices: Sequence[int]) -> dict[int, TargetRow]:
    """Boards by their ids."""
    found = {}
    for start in range(0, len(devices), _AT_ONCE):
        part = devices[start : start + _AT_ONCE]
        query = f"SELECT {_TARGET} FROM {_TARGETS} WHERE t.rollout = ? AND t.device IN ({', '.join('?' * len(part))})"
        found.update({row[0]: _target(row) for row in transaction.execute(query, (identity, *part))})
    return found


def change(transaction: Transaction, identity: str, changes: Sequence[Change], now: float) -> None:
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
                json.dumps(each.before) if each.before is not None else None,
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


def _rollout(row: Row) -> Rollout:
    identity, fleet, spec, state, wave, waves, soak_until, undo_from, ends_as, *rest = row
    return Rollout(
        identity, fleet, Spec.from_json(spec), State(state), wave, waves, soak_until, undo_from, State(ends_as), *rest
    )


def _target(row: Row) -> TargetRow:
    device, name, wave, zone, state, attempts, before, *rest = row
    return TargetRow(device, name, wave, zone, Target(state), attempts, json.loads(before), *rest)
