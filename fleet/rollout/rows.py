"""Read and write the three tables of rollouts: the rollouts, their boards and their commands.

A rollout is carried out by one controller at a time, which holds it by a lease and renews that with each step. Of two
that claim at the same moment each gets rollouts that the other does not: rows that are being claimed are skipped.
Each command is recorded before it is sent, exactly as it is sent, and stays there with its result.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

from agent.common.errors import CommandError
from agent.contract.commands import CommandResult
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import Row, Transaction

_ROLLOUT = "id, fleet, spec, state, ends_as, wave, waves, soak_until, undo_from, created, lease_owner, lease_until"
_BOARD = "t.device, d.name, t.wave, t.zone, t.state, t.attempts, t.baseline, t.artefact, t.reason, t.settled"
_COMMAND = "c.id, c.device, d.name, c.role, c.payload, c.sent, c.expires, c.accepted"
_AT_ONCE = 500


class RolloutState(str, Enum):
    """The state of a rollout. UNDOING: no further board is changed, and changed boards are sent back."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    UNDOING = "UNDOING"
    COMPLETED = "COMPLETED"
    ROLLED_BACK = "ROLLED_BACK"
    ABORTED = "ABORTED"

    @property
    def is_finished(self) -> bool:
        return self in (RolloutState.COMPLETED, RolloutState.ROLLED_BACK, RolloutState.ABORTED)


_UNFINISHED = f"state IN ({', '.join(repr(each.value) for each in RolloutState if not each.is_finished)})"


class BoardStage(str, Enum):
    """The stage of one board in a rollout.

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


class CommandRole(str, Enum):
    """The purpose of a command."""

    DO = "do"
    CANCEL = "cancel"
    UNDO = "undo"


@dataclass(frozen=True)
class Rollout:
    """A rollout and its position; times are Unix time in s.

    spec_json: what it is to do. ends_as: once UNDOING, the final state. wave: the present wave, from 0, of `waves`.
    soak_until: when the wave is judged; None while boards are not settled. undo_from: once UNDOING, the first wave
    whose boards go back.
    """

    id: str
    fleet: str
    spec_json: str
    state: RolloutState
    ends_as: RolloutState
    wave: int
    waves: int
    soak_until: float | None
    undo_from: int
    created: float
    lease_owner: str | None
    lease_until: float = field(compare=False)  # each step renews it: a rollout that nobody has moved is equal

    def is_held(self, now: float) -> bool:
        """True if a controller is at work on it. now: Unix time in s."""
        return self.lease_owner is not None and self.lease_until >= now

    @cached_property
    def spec(self) -> RolloutSpec:
        """The specification. Raises CommandError (`rollout.spec`) for one of a newer tared."""
        return RolloutSpec.from_json(self.spec_json)

    @property
    def op(self) -> str:
        """The operation; also readable for a specification of a newer tared."""
        return str(json.loads(self.spec_json).get("op"))

    @property
    def is_signed(self) -> bool:
        """True if its boards must get signed commands only."""
        return bool(json.loads(self.spec_json).get("signed"))


@dataclass(frozen=True)
class BoardRow:
    """A board of a rollout.

    baseline: its facts before the command, and for a policy the replaced values. artefact: the engine that it made.
    settled: when it got its present state, Unix time in s.
    """

    device: int
    name: str
    wave: int
    zone: str
    state: BoardStage
    attempts: int
    baseline: Mapping[str, Any]
    artefact: str | None
    reason: str
    settled: float | None


@dataclass(frozen=True)
class BoardChange:
    """The new state of a board; fields of None stay as they are.

    due: Unix time in s of the next step. command: what the board is sent.
    """

    device: int
    state: BoardStage
    reason: str = ""
    artefact: str | None = None
    baseline: Mapping[str, Any] | None = None
    due: float = 0.0
    attempts: int | None = None
    command: CommandRow | None = None


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


def create_rollout(
    transaction: Transaction, fleet: str, spec: RolloutSpec, waves: Sequence[Sequence[tuple[int, str]]], now: float
) -> str:
    """Store a new rollout, and return its id. waves: for each wave, the ids and time zones of its boards."""
    identity = uuid.uuid4().hex[:12]
    transaction.execute(
        "INSERT INTO rollouts (id, fleet, spec, state, wave, waves, undo_from, ends_as, created, lease_until) "
        "VALUES (?, ?, ?, ?, 0, ?, 0, ?, ?, 0.0)",
        (identity, fleet, spec.to_json(), RolloutState.RUNNING.value, len(waves), RolloutState.COMPLETED.value, now),
    )
    rows = [
        (identity, device, wave, place, zone, BoardStage.WAITING.value)
        for wave, boards in enumerate(waves)
        for place, (device, zone) in enumerate(boards)
    ]
    transaction.execute_many(
        "INSERT INTO rollout_targets (rollout, device, wave, place, zone, state, due, attempts, baseline, reason) "
        "VALUES (?, ?, ?, ?, ?, ?, 0.0, 0, '{}', '')",
        rows,
    )
    return identity


def find_rollout(transaction: Transaction, identity: str, lock: bool = False) -> Rollout:
    """Return the rollout whose id begins so. lock: nobody else changes it until the end of the transaction.

    Raises CommandError (`rollout.unknown`) unless there is exactly one.
    """
    ids = [str(row[0]) for row in transaction.execute("SELECT id FROM rollouts")]
    matching = [each for each in ids if each.startswith(identity)] if identity else []
    if len(matching) != 1:
        expected = (
            "the id of one rollout" if not matching else "a longer part of the id: several ids have this beginning"
        )
        raise CommandError("rollout.unknown", repr(identity), expected, "see 'tared fleet rollout list'")
    if lock:
        transaction.execute("UPDATE rollouts SET created = created WHERE id = ?", matching)
    return get_rollout(transaction, matching[0])


def get_rollout(transaction: Transaction, identity: str) -> Rollout:
    """Return the rollout of exactly this id."""
    (rollout,) = _rollouts(transaction, "WHERE id = ?", (identity,))
    return rollout


def all_rollouts(transaction: Transaction, fleet: str) -> list[Rollout]:
    """Return the rollouts of a fleet; the newest first."""
    return _rollouts(transaction, "WHERE fleet = ? ORDER BY created DESC", (fleet,))


def rollout_counts(transaction: Transaction) -> Counter[RolloutState]:
    """Return how many rollouts are in which state, of all fleets."""
    counts = transaction.execute("SELECT state, count(*) FROM rollouts GROUP BY state")
    return Counter({RolloutState(state): int(count) for state, count in counts})


def unfinished_rollouts(transaction: Transaction, most: int) -> list[Rollout]:
    """Return the newest rollouts that are not finished, of all fleets."""
    return _rollouts(transaction, f"WHERE {_UNFINISHED} ORDER BY created DESC LIMIT ?", (most,))


def free_rollouts(transaction: Transaction, owner: str, now: float, fleet: str | None = None) -> list[Rollout]:
    """Return the unfinished rollouts of a fleet, or of all, that nobody but `owner` holds, locked; the oldest first."""
    where = (
        f"WHERE {_UNFINISHED} AND (lease_owner = ? OR lease_until < ?) AND fleet = coalesce(?, fleet) "
        f"ORDER BY created {transaction.skip_locked}"
    )
    return _rollouts(transaction, where, (owner, now, fleet))


def lease(transaction: Transaction, rollouts: Iterable[Rollout], owner: str, until: float) -> None:
    """Let the owner hold these rollouts `until` then."""
    rows = [(owner, until, each.id) for each in rollouts]
    transaction.execute_many("UPDATE rollouts SET lease_owner = ?, lease_until = ? WHERE id = ?", rows)


def renew_lease(transaction: Transaction, identity: str, owner: str, now: float, until: float) -> Rollout | None:
    """Renew the owner's lease `until` then, and return the rollout, locked to the end of the transaction.

    Return None if the lease has ended, or is another's.
    """
    mine = "UPDATE rollouts SET lease_until = ? WHERE id = ? AND lease_owner = ? AND lease_until >= ?"
    if not transaction.execute_count(mine, (until, identity, owner, now)):
        return None
    return get_rollout(transaction, identity)


def release_leases(transaction: Transaction, owner: str, ids: Iterable[str]) -> None:
    """End the owner's leases on these rollouts: others may claim them at once."""
    free = "UPDATE rollouts SET lease_until = 0.0 WHERE lease_owner = ? AND id = ?"
    transaction.execute_many(free, [(owner, identity) for identity in ids])


def save_position(transaction: Transaction, rollout: Rollout) -> None:
    """Store the state and position of a rollout."""
    position = rollout.state.value, rollout.wave, rollout.soak_until, rollout.undo_from, rollout.ends_as.value
    transaction.execute(
        "UPDATE rollouts SET state = ?, wave = ?, soak_until = ?, undo_from = ?, ends_as = ? WHERE id = ?",
        (*position, rollout.id),
    )


def _rollouts(transaction: Transaction, where: str, values: Sequence[object]) -> list[Rollout]:
    rows = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts {where}", values)
    return [
        Rollout(identity, fleet, spec_json, RolloutState(state), RolloutState(ends_as), *rest)
        for identity, fleet, spec_json, state, ends_as, *rest in rows
    ]


def board_counts(transaction: Transaction, identity: str) -> dict[int, Counter[BoardStage]]:
    """Return how many boards of each wave are in which state."""
    query = "SELECT wave, state, count(*) FROM rollout_targets WHERE rollout = ? GROUP BY wave, state"
    by_wave: dict[int, Counter[BoardStage]] = {}
    for wave, state, count in transaction.execute(query, (identity,)):
        by_wave.setdefault(int(wave), Counter())[BoardStage(state)] = int(count)
    return by_wave


def count_words(counted: Iterable[Counter[BoardStage]]) -> str:
    """Return in words how many boards are in which state."""
    total = sum(counted, Counter[BoardStage]())
    return ", ".join(f"{total[each]} {each.value}" for each in BoardStage if total[each])


def waiting_zones(transaction: Transaction, identity: str, waves: tuple[int, int]) -> list[str]:
    """Return the time zones of the boards that are still WAITING. waves: the first and the last."""
    query = (
        "SELECT DISTINCT zone FROM rollout_targets WHERE rollout = ? AND wave BETWEEN ? AND ? AND state = ? "
        "ORDER BY zone"
    )
    return [str(row[0]) for row in transaction.execute(query, (identity, *waves, BoardStage.WAITING.value))]


def due_boards(
    transaction: Transaction,
    identity: str,
    waves: tuple[int, int],
    state: BoardStage,
    now: float,
    most: int,
    zones: Sequence[str] | None = None,
) -> list[BoardRow]:
    """Return boards whose next step is due, in their order.

    waves: the first and the last. most: at most so many boards. zones: only boards in these time zones.
    """
    if zones is not None and not zones:
        return []
    where = f" AND t.zone IN ({', '.join('?' * len(zones))})" if zones else ""
    return _boards(
        transaction,
        f"t.rollout = ? AND t.wave BETWEEN ? AND ? AND t.state = ? AND t.due <= ?{where} "
        "ORDER BY t.wave, t.place LIMIT ?",
        (identity, *waves, state.value, now, *(zones or ()), most),
    )


def boards_of_waves(transaction: Transaction, identity: str, first: int, last: int) -> list[BoardRow]:
    """Return the boards of the waves from `first` to `last`, in their order."""
    where = "t.rollout = ? AND t.wave BETWEEN ? AND ? ORDER BY t.wave, t.place"
    return _boards(transaction, where, (identity, first, last))


def boards_by_device(transaction: Transaction, identity: str, devices: Sequence[int]) -> dict[int, BoardRow]:
    """Return these boards, by their ids."""
    boards = []
    for start in range(0, len(devices), _AT_ONCE):
        part = devices[start : start + _AT_ONCE]
        where = f"t.rollout = ? AND t.device IN ({', '.join('?' * len(part))})"
        boards += _boards(transaction, where, (identity, *part))
    return {board.device: board for board in boards}


def _boards(transaction: Transaction, where: str, values: Sequence[object]) -> list[BoardRow]:
    query = f"SELECT {_BOARD} FROM rollout_targets t JOIN devices d ON d.id = t.device WHERE {where}"
    return [
        BoardRow(device, name, wave, zone, BoardStage(state), attempts, json.loads(baseline), *rest)
        for device, name, wave, zone, state, attempts, baseline, *rest in transaction.execute(query, values)
    ]


def late_successes(transaction: Transaction, identity: str, first: int) -> list[tuple[int, CommandResult]]:
    """Return boards that counted as FAILED or UNREACHED and have succeeded after all, each with that result.

    first: the first wave that is searched. The results are those that a collector has stored.
    """
    query = (
        "SELECT t.device, r.document FROM rollout_targets t "
        "JOIN rollout_commands c ON c.rollout = t.rollout AND c.device = t.device "
        "JOIN results r ON r.device = c.device AND r.command = c.id "
        "WHERE t.rollout = ? AND t.wave >= ? AND t.state IN (?, ?) AND c.role = ? AND r.status = 'SUCCEEDED'"
    )
    values = identity, first, BoardStage.FAILED.value, BoardStage.UNREACHED.value, CommandRole.DO.value
    rows = transaction.execute(query, values)
    return [(int(device), CommandResult.from_json(document.encode())) for device, document in rows]


def change_boards(transaction: Transaction, identity: str, changes: Sequence[BoardChange], now: float) -> None:
    """Store the new states of boards."""
    rows = []
    for each in sorted(changes, key=lambda each: each.device):
        baseline = json.dumps(each.baseline) if each.baseline is not None else None
        fields = each.state.value, each.reason, each.artefact, baseline, each.due, each.attempts
        rows.append((*fields, each.state.value, now, identity, each.device))
    transaction.execute_many(
        "UPDATE rollout_targets SET state = ?, reason = ?, artefact = coalesce(?, artefact), "
        "baseline = coalesce(?, baseline), due = ?, attempts = coalesce(?, attempts), "
        "settled = CASE WHEN state = ? THEN settled ELSE ? END "
        "WHERE rollout = ? AND device = ?",
        rows,
    )


def record_commands(transaction: Transaction, identity: str, commands: Iterable[CommandRow]) -> None:
    """Record new commands of a rollout."""
    transaction.execute_many(
        "INSERT INTO rollout_commands (id, rollout, device, role, payload, sent, expires) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(each.id, identity, each.device, each.role.value, each.payload, each.sent, each.expires) for each in commands],
    )


def open_commands(transaction: Transaction, identity: str) -> dict[str, CommandRow]:
    """Return the commands without a final result, by their ids."""
    query = (
        f"SELECT {_COMMAND} FROM rollout_commands c JOIN devices d ON d.id = c.device "
        "WHERE c.rollout = ? AND c.ended IS NULL ORDER BY c.id"
    )
    rows = transaction.execute(query, (identity,))
    return {id_: CommandRow(id_, device, name, CommandRole(role), *rest) for id_, device, name, role, *rest in rows}


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
    rows = [(now, each) for each in commands]
    transaction.execute_many("UPDATE rollout_commands SET accepted = ? WHERE id = ?", rows)


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
