"""Offer an operator's acts on rollouts: create, show, pause, resume, abort. Each act is recorded.

The register writes to the store alone. A controller, maybe on another machine, notices at its next step.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import CommandError
from fleet.devices.devices import Device, Devices
from fleet.devices.records import AuditEntry, audit, audit_entries
from fleet.devices.selection import select
from fleet.rollout import rows
from fleet.rollout.rows import BoardRow, BoardStage, Rollout, RolloutState
from fleet.rollout.spec import RolloutSpec, check_zone, order_devices, wave_sizes
from fleet.store.transaction import FleetStore, Row

ZONE_TAG = "tz"
WAVE, ALL = "wave", "all"  # the waves that an abort can undo


@dataclass(frozen=True)
class Overview:
    """A rollout for people. counts: boards of each wave, by state. records: the oldest first."""

    rollout: Rollout
    counts: Mapping[int, Counter[BoardStage]]
    records: Sequence[AuditEntry]


class RolloutRegister:
    """The rollouts in a store. who: the operator, as the record names them. Raises AgentError as the store does."""

    def __init__(self, store: FleetStore, who: str, clock: Clock = SYSTEM_CLOCK) -> None:
        self._store, self._who, self._clock = store, who, clock

    def plan(self, fleet: str, spec: RolloutSpec, seed: str | None = None) -> list[list[Device]]:
        """Return the boards of each wave, without creating a rollout.

        seed: Draws a random order. None: it is drawn again after each rollout of the fleet. Until the next one is
        created it stays, so that a dry run shows the boards that the next rollout takes.

        Raises CommandError:
            fleet.where      the selection cannot be read
            fleet.nobody     it selects no board
            rollout.zone     a board's time zone is unknown
            rollout.schema   boards speak a newer contract, so that their results could not be read
        """
        devices = select(Devices(self._store), fleet, spec.select, spec.silent_s, clock=self._clock)
        if not devices:
            remedy = "let 'tared fleet collect' run until devices have reported"
            raise CommandError("fleet.nobody", f"no device of {fleet!a}", "a fleet whose devices have reported", remedy)
        if newer := [each for each in devices if each.is_newer]:
            found = f"{len(newer)} of {len(devices)} boards speak a newer schema, the first {newer[0].name!a}"
            others = ",".join(f"schema!={each}" for each in sorted({each.schema for each in newer if each.schema}))
            remedy = f"update this tared, or leave them out by '{others}' in --select"
            raise CommandError("rollout.schema", found, "boards whose answers this tared can read", remedy)
        for zone in {each.tags.get(ZONE_TAG, spec.timezone) for each in devices}:
            check_zone(zone)
        if seed is None:
            with self._store.transaction("read") as transaction:
                seed = f"{fleet}/{[each.id for each in rows.all_rollouts(transaction, fleet)[:1]]}"
        rest, waves = order_devices(devices, spec.order, seed), []
        for size in wave_sizes(spec.parsed_waves, len(rest)):
            waves.append(rest[:size])
            rest = rest[size:]
        return waves

    def create(self, fleet: str, spec: RolloutSpec, waves: Sequence[Sequence[Device]], why: str) -> str:
        """Store a new rollout, which a controller then carries out; return its id."""
        boards = [[(each.id, each.tags.get(ZONE_TAG, spec.timezone)) for each in wave] for wave in waves]
        with self._store.transaction("write") as transaction:
            identity = rows.create_rollout(transaction, fleet, spec, boards, self._clock.wall_s())
            document = {"spec": json.loads(spec.to_json()), "waves": [len(wave) for wave in waves]}
            audit(transaction, self._who, "created", why, identity, json.dumps(document))
        return identity

    def all(self, fleet: str) -> list[Overview]:
        """Return the rollouts of a fleet, without their records; the newest first."""
        with self._store.transaction("read") as transaction:
            rollouts = rows.all_rollouts(transaction, fleet)
            return [Overview(each, rows.board_counts(transaction, each.id), ()) for each in rollouts]

    def show(self, identity: str) -> tuple[Overview, list[BoardRow], list[Row]]:
        """Return a rollout with its boards, and its commands as `rows.all_commands` has them.

        identity: the id, or the start of it. Raises CommandError (`rollout.unknown`).
        """
        overview, boards = self.progress(identity)
        with self._store.transaction("read") as transaction:
            commands = rows.all_commands(transaction, overview.rollout.id)
        return overview, boards, commands

    def progress(self, identity: str) -> tuple[Overview, list[BoardRow]]:
        """Return a rollout with its boards, as `show`, without their commands."""
        with self._store.transaction("read") as transaction:
            rollout = rows.find_rollout(transaction, identity)
            counts = rows.board_counts(transaction, rollout.id)
            boards = rows.boards_of_waves(transaction, rollout.id, 0, rollout.waves)
        return Overview(rollout, counts, audit_entries(self._store, rollout.id)), boards

    def pause(self, identity: str, why: str) -> Rollout:
        """Start no further board, and judge nothing; boards that have a command go on.

        Raises CommandError, as `resume` and `abort`: rollout.unknown, and rollout.state for a state that forbids it.
        """
        changed = partial(replace, state=RolloutState.PAUSED)
        return self._change_state(identity, (RolloutState.RUNNING,), "paused", why, changed)

    def resume(self, identity: str, why: str) -> Rollout:
        """Go on where the rollout stood."""
        changed = partial(replace, state=RolloutState.RUNNING)
        return self._change_state(identity, (RolloutState.PAUSED,), "resumed", why, changed)

    def abort(self, identity: str, undo: str | None, why: str) -> Rollout:
        """Start no further board, and cancel what boards still do.

        undo: WAVE, the boards of the present wave go back to what they had; ALL, all boards do, also of a finished
        rollout, or of one that undoes its wave already; None, no board does.
        """

        def aborted(rollout: Rollout) -> Rollout:
            undo_from = {WAVE: rollout.wave, ALL: 0}.get(undo or "", rollout.waves)
            return replace(rollout, state=RolloutState.UNDOING, undo_from=undo_from, ends_as=RolloutState.ABORTED)

        what = "aborted" if undo is None else f"aborted, to undo {'its wave' if undo == WAVE else 'all'}"
        states = tuple(RolloutState) if undo == ALL else (RolloutState.RUNNING, RolloutState.PAUSED)
        return self._change_state(identity, states, what, why, aborted)

    def _change_state(
        self, identity: str, states: Sequence[RolloutState], what: str, why: str, changed: Callable[[Rollout], Rollout]
    ) -> Rollout:
        with self._store.transaction("write") as transaction:
            current = rows.find_rollout(transaction, identity, lock=True)
            if current.state not in states:
                expected = " or ".join(each.value for each in states)
                remedy = "see 'tared fleet rollout show'; 'abort --undo all' undoes the rollout in any state"
                raise CommandError("rollout.state", f"{current.id} is {current.state.value}", expected, remedy)
            rollout = changed(current)
            rows.save_position(transaction, rollout)
            document = {"wave": rollout.wave + 1, "state": rollout.state.value}
            audit(transaction, self._who, what, why, rollout.id, json.dumps(document))
        return rollout
