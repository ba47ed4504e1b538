"""Rollouts: their rows, and whose they are at present."""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from agent.common.errors import CommandError
from fleet.rollout.board_rows import TargetState
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import Row, Transaction

_ROLLOUT = "id, fleet, spec, state, wave, waves, soak_until, undo_from, ends_as, created, lease_owner, lease_until"


class RolloutState(str, Enum):
    """Of a rollout. UNDOING: nobody is told to change any more, and who has is told to go back."""

    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    UNDOING = "UNDOING"
    COMPLETED = "COMPLETED"
    ROLLED_BACK = "ROLLED_BACK"
    ABORTED = "ABORTED"

    @property
    def is_finished(self) -> bool:
        return self in (RolloutState.COMPLETED, RolloutState.ROLLED_BACK, RolloutState.ABORTED)


@dataclass(frozen=True)
class Rollout:
    """wishes: what it is to do, as JSON. wave: the present one, from 0, of so many. soak_until: until when it is looked
    at, None before all of it is settled. undo_from: the first wave whose boards are to go back, once it is UNDOING, to
    end as `ends_as`. Unix times in s."""

    id: str
    fleet: str
    spec_json: str
    state: RolloutState
    wave: int
    waves: int
    soak_until: float | None
    undo_from: int
    ends_as: RolloutState
    created: float
    lease_owner: str | None
    lease_until: float

    @cached_property
    def spec(self) -> RolloutSpec:
        """Its wishes, read. Raises CommandError (`rollout.spec`) for those of a newer tared."""
        return RolloutSpec.from_json(self.spec_json)

    @property
    def op(self) -> str:
        """Of any tared's."""
        return str(json.loads(self.spec_json).get("op"))

    @property
    def is_signed(self) -> bool:
        """Whether its boards are to be told nothing unsigned."""
        return _is_signed(self.spec_json)


def create(
    transaction: Transaction, fleet: str, spec: RolloutSpec, waves: Sequence[Sequence[tuple[int, str]]], now: float
) -> str:
    """A new rollout; its id. waves: of each the ids and time zones of its boards."""
    identity = uuid.uuid4().hex[:12]
    transaction.execute(
        "INSERT INTO rollouts (id, fleet, spec, state, wave, waves, undo_from, ends_as, created, lease_until) "
        "VALUES (?, ?, ?, ?, 0, ?, 0, ?, ?, 0.0)",
        (identity, fleet, spec.to_json(), RolloutState.RUNNING.value, len(waves), RolloutState.COMPLETED.value, now),
    )
    rows = [
        (identity, device, wave, place, zone, TargetState.WAITING.value)
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
    """By its id, or the beginning of it that only one has. Raises CommandError (`rollout.unknown`)."""
    ids = [str(row[0]) for row in transaction.execute("SELECT id FROM rollouts")]
    found = [each for each in ids if each.startswith(identity)] if identity else []
    if len(found) != 1:
        expected = "the id of one rollout" if not found else "more of its id: several begin so"
        raise CommandError("rollout.unknown", repr(identity), expected, "look at 'tared fleet rollout list'")
    return get(transaction, found[0])


def find_for_update(transaction: Transaction, identity: str) -> Rollout:
    """As `find`; nobody else changes it until the end of the transaction."""
    found = find(transaction, identity)
    transaction.execute("UPDATE rollouts SET created = created WHERE id = ?", (found.id,))
    return find(transaction, found.id)


def all_rollouts(transaction: Transaction, fleet: str | None = None) -> list[Rollout]:
    """The newest first; of all fleets where none is named."""
    where, values = ("", ()) if fleet is None else (" WHERE fleet = ?", (fleet,))
    found = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts{where} ORDER BY created DESC", values)
    return [_rollout(row) for row in found]


def claim(
    transaction: Transaction,
    owner: str,
    now: float,
    until: float,
    but: Collection[str],
    fleet: str | None = None,
    can_sign: bool = True,
) -> dict[str, bool]:
    """The ids of the rollouts that are not over and nobody else holds; from now on `owner` does, `until` then. True for
    one that somebody else may have moved since the owner had it, if ever. but: those it cannot carry out, and leaves
    to others. fleet: only those of this one. can_sign: else those that demand signatures are not for it.

    Of two that claim at the same moment each takes what the other has not: rows that are being taken are passed over.
    """
    free = (
        "SELECT id, lease_owner, spec FROM rollouts WHERE state IN (?, ?, ?) AND (lease_owner = ? OR lease_until < ?) "
        f"AND fleet = coalesce(?, fleet) ORDER BY created {transaction.skip_locked}"
    )
    live = [each.value for each in RolloutState if not each.is_finished]
    rows = transaction.execute(free, (*live, owner, now, fleet))
    mine = [row for row in rows if row[0] not in but and (can_sign or not _is_signed(row[2]))]
    found = {str(identity): former != owner for identity, former, _ in mine}
    take = "UPDATE rollouts SET lease_owner = ?, lease_until = ? WHERE id = ?"
    transaction.execute_many(take, [(owner, until, identity) for identity in found])
    return found


def waiting_for_signer(transaction: Transaction, now: float, fleet: str | None = None) -> list[str]:
    """The ids of those that are not over and nobody holds, and whose boards are to be told nothing unsigned."""
    live = [each.value for each in RolloutState if not each.is_finished]
    query = "SELECT id, spec FROM rollouts WHERE state IN (?, ?, ?) AND lease_until < ? AND fleet = coalesce(?, fleet)"
    found = transaction.execute(query, (*live, now, fleet))
    return [str(identity) for identity, wishes in found if _is_signed(wishes)]


def _is_signed(wishes: str) -> bool:
    """Of any tared's."""
    return bool(json.loads(wishes).get("signed"))


def renew_lease(transaction: Transaction, identity: str, owner: str, now: float, until: float) -> Rollout | None:
    """The rollout, locked to the end of the transaction, and held `until` then; None where the owner's lease on it is
    over, or was taken."""
    mine = "UPDATE rollouts SET lease_until = ? WHERE id = ? AND lease_owner = ? AND lease_until >= ?"
    if not transaction.execute_count(mine, (until, identity, owner, now)):
        return None
    return get(transaction, identity)


def get(transaction: Transaction, identity: str) -> Rollout:
    """The one of this id, which there is."""
    (row,) = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts WHERE id = ?", (identity,))
    return _rollout(row)


def release(transaction: Transaction, owner: str, ids: Iterable[str]) -> None:
    """Of these, what it holds: anybody may claim them at once."""
    free = "UPDATE rollouts SET lease_until = 0.0 WHERE lease_owner = ? AND id = ?"
    transaction.execute_many(free, [(owner, identity) for identity in ids])


def save_position(transaction: Transaction, rollout: Rollout) -> None:
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


def _rollout(row: Row) -> Rollout:
    identity, fleet, wishes, state, wave, waves, soak_until, undo_from, ends_as, *rest = row
    return Rollout(
        identity, fleet, wishes, RolloutState(state), wave, waves, soak_until, undo_from, RolloutState(ends_as), *rest
    )
