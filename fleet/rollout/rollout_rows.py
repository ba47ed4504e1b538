"""Read and write the table of rollouts (`rollouts`), and the leases by which controllers hold them.

A rollout is carried out by one controller at a time, which renews its lease with each step. Of two that claim at the
same moment each gets rollouts that the other does not: rows that are being claimed are skipped.
"""

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


@dataclass(frozen=True)
class Rollout:
    """A rollout and its position; times are Unix time in s.

    spec_json: what it is to do. wave: the present wave, from 0, of `waves`. soak_until: when the wave is judged; None
    while boards are not settled. undo_from: once UNDOING, the first wave whose boards go back. ends_as: once UNDOING,
    the final state.
    """

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
        """The specification. Raises CommandError (`rollout.spec`) for one of a newer tared."""
        return RolloutSpec.from_json(self.spec_json)

    @property
    def op(self) -> str:
        """The operation; also readable for a specification of a newer tared."""
        return str(json.loads(self.spec_json).get("op"))

    @property
    def is_signed(self) -> bool:
        """True if its boards must get signed commands only."""
        return _is_signed(self.spec_json)


def create(
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
    """Return the rollout whose id begins so. Raises CommandError (`rollout.unknown`) unless there is exactly one."""
    ids = [str(row[0]) for row in transaction.execute("SELECT id FROM rollouts")]
    matching = [each for each in ids if each.startswith(identity)] if identity else []
    if len(matching) != 1:
        expected = "the id of one rollout" if not matching else "more of its id: several begin so"
        raise CommandError("rollout.unknown", repr(identity), expected, "look at 'tared fleet rollout list'")
    return get(transaction, matching[0])


def find_for_update(transaction: Transaction, identity: str) -> Rollout:
    """Return the rollout as `find`, locked to the end of the transaction."""
    rollout = find(transaction, identity)
    transaction.execute("UPDATE rollouts SET created = created WHERE id = ?", (rollout.id,))  # takes the lock
    return get(transaction, rollout.id)


def all_rollouts(transaction: Transaction, fleet: str | None = None) -> list[Rollout]:
    """Return the rollouts of a fleet, or of all; the newest first."""
    where, values = ("", ()) if fleet is None else (" WHERE fleet = ?", (fleet,))
    rows = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts{where} ORDER BY created DESC", values)
    return [_rollout(row) for row in rows]


def claim(
    transaction: Transaction,
    owner: str,
    now: float,
    until: float,
    but: Collection[str],
    fleet: str | None = None,
    can_sign: bool = True,
) -> dict[str, bool]:
    """Claim the unfinished rollouts that nobody else holds.

    Return their ids; the value is True if another controller may have moved the rollout since `owner` last held it.

    Args:
        owner: Name of the controller, which holds them `until` then (Unix time in s).
        but: Rollouts that the controller cannot carry out, and leaves to others.
        fleet: Only rollouts of this fleet.
        can_sign: False: rollouts that demand signatures are left to others.
    """
    free = (
        "SELECT id, lease_owner, spec FROM rollouts WHERE state IN (?, ?, ?) AND (lease_owner = ? OR lease_until < ?) "
        f"AND fleet = coalesce(?, fleet) ORDER BY created {transaction.skip_locked}"
    )
    live = [each.value for each in RolloutState if not each.is_finished]
    rows = transaction.execute(free, (*live, owner, now, fleet))
    mine = [row for row in rows if row[0] not in but and (can_sign or not _is_signed(row[2]))]
    claimed = {str(identity): former != owner for identity, former, _ in mine}
    lease = "UPDATE rollouts SET lease_owner = ?, lease_until = ? WHERE id = ?"
    transaction.execute_many(lease, [(owner, until, identity) for identity in claimed])
    return claimed


def waiting_for_signer(transaction: Transaction, now: float, fleet: str | None = None) -> list[str]:
    """Return the ids of unfinished rollouts that demand signatures and that nobody holds."""
    live = [each.value for each in RolloutState if not each.is_finished]
    query = "SELECT id, spec FROM rollouts WHERE state IN (?, ?, ?) AND lease_until < ? AND fleet = coalesce(?, fleet)"
    rows = transaction.execute(query, (*live, now, fleet))
    return [str(identity) for identity, spec_json in rows if _is_signed(spec_json)]


def _is_signed(spec_json: str) -> bool:
    return bool(json.loads(spec_json).get("signed"))


def renew_lease(transaction: Transaction, identity: str, owner: str, now: float, until: float) -> Rollout | None:
    """Renew the owner's lease `until` then, and return the rollout, locked to the end of the transaction.

    Return None if the lease has ended, or is another's.
    """
    mine = "UPDATE rollouts SET lease_until = ? WHERE id = ? AND lease_owner = ? AND lease_until >= ?"
    if not transaction.execute_count(mine, (until, identity, owner, now)):
        return None
    return get(transaction, identity)


def get(transaction: Transaction, identity: str) -> Rollout:
    """Return the rollout of exactly this id."""
    (row,) = transaction.execute(f"SELECT {_ROLLOUT} FROM rollouts WHERE id = ?", (identity,))
    return _rollout(row)


def release(transaction: Transaction, owner: str, ids: Iterable[str]) -> None:
    """End the owner's leases on these rollouts: others may claim them at once."""
    free = "UPDATE rollouts SET lease_until = 0.0 WHERE lease_owner = ? AND id = ?"
    transaction.execute_many(free, [(owner, identity) for identity in ids])


def save_position(transaction: Transaction, rollout: Rollout) -> None:
    """Store the state and position of a rollout."""
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
    identity, fleet, spec_json, state, wave, waves, soak_until, undo_from, ends_as, *rest = row
    return Rollout(
        identity,
        fleet,
        spec_json,
        RolloutState(state),
        wave,
        waves,
        soak_until,
        undo_from,
        RolloutState(ends_as),
        *rest,
    )
