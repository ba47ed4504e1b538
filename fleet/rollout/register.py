"""What an operator does with rollouts: begin one, look at it, stop it for a while or for good; each is on record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from agent.common.errors import CommandError
from fleet.devices.devices import Device, Devices
from fleet.devices.records import AuditEntry, audit, audit_entries
from fleet.devices.selection import select
from fleet.rollout import board_rows, command_rows, rollout_rows
from fleet.rollout.board_rows import TargetRow, TargetState
from fleet.rollout.rollout_rows import Rollout, RolloutState
from fleet.rollout.schedule import check_zone, order_devices, wave_sizes
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import FleetStore, Row

ZONE_TAG = "tz"
WAVE, ALL = "wave", "all"  # what may be undone of a rollout that is aborted


@dataclass(frozen=True)
class Overview:
    """counts: boards of each wave, by their state. records: the oldest first."""

    rollout: Rollout
    counts: dict[int, dict[TargetState, int]]
    records: Sequence[AuditEntry]


class RolloutRegister:
    """Those in a store. who: as the record names the operator. Raises AgentError as the store does."""

    def __init__(self, store: FleetStore, who: str) -> None:
        self._store, self._who = store, who

    def plan(self, fleet: str, spec: RolloutSpec, seed: str) -> list[list[Device]]:
        """The boards of each wave, as they would be. Raises CommandError as `select` (`fleet.nobody`, `fleet.where`)
        and `check_zone`, and `rollout.schema` where what some of them would answer could not be read."""
        found = select(Devices(self._store), fleet, spec.select, spec.silent_s)
        if not found:
            remedy = "let 'tared fleet collect' run until they have reported"
            raise CommandError("fleet.nobody", f"no device of {fleet!a}", "at least one", remedy)
        _check_schemas(found)
        for zone in {each.tags.get(ZONE_TAG, spec.timezone) for each in found}:
            check_zone(zone)
        rest, waves = order_devices(found, spec.order, seed), []
        for size in wave_sizes(spec.parsed_waves, len(rest)):
            waves.append(rest[:size])
            rest = rest[size:]
        return waves

    def create(self, fleet: str, spec: RolloutSpec, waves: Sequence[Sequence[Device]], why: str) -> str:
        """From now on a controller carries it out; its id."""
        boards = [[(each.id, each.tags.get(ZONE_TAG, spec.timezone)) for each in wave] for wave in waves]
        with self._store.transaction("write") as transaction:
            identity = rollout_rows.create(transaction, fleet, spec, boards, time.time())
            document = {"spec": json.loads(spec.to_json()), "waves": [len(wave) for wave in waves]}
            audit(transaction, self._who, "created", why, identity, json.dumps(document))
        return identity

    def all(self, fleet: str) -> list[Overview]:
        """The newest first."""
        with self._store.transaction("read") as transaction:
            found = [
                (each, board_rows.counts(transaction, each.id))
                for each in rollout_rows.all_rollouts(transaction, fleet)
            ]
        return [Overview(rollout, dict(counts), ()) for rollout, counts in found]

    def show(self, identity: str) -> tuple[Overview, list[TargetRow], list[Row]]:
        """With each of its boards, and each command as `orders.commands` has them. identity: may be cut short. Raises
        CommandError (`rollout.unknown`)."""
        with self._store.transaction("read") as transaction:
            rollout = rollout_rows.find(transaction, identity)
            counts = board_rows.counts(transaction, rollout.id)
            boards = board_rows.of_waves(transaction, rollout.id, 0, rollout.waves)
            commands = command_rows.all_commands(transaction, rollout.id)
        return Overview(rollout, dict(counts), audit_entries(self._store, rollout.id)), boards, commands

    def pause(self, identity: str, why: str) -> Rollout:
        """Nobody else is told, nothing is judged; who has been told goes on. Raises CommandError (`rollout.unknown`,
        `rollout.state`), as all of these."""
        return self._turn(
            identity, (RolloutState.RUNNING,), "paused", why, lambda found: replace(found, state=RolloutState.PAUSED)
        )

    def resume(self, identity: str, why: str) -> Rollout:
        """Where it stood."""
        return self._turn(
            identity, (RolloutState.PAUSED,), "resumed", why, lambda found: replace(found, state=RolloutState.RUNNING)
        )

    def abort(self, identity: str, undo: str | None, why: str) -> Rollout:
        """Nobody else is told, who is at it still is to leave it. undo: WAVE, the boards of the present one go back to
        what they had; ALL, all do, also of one that is over, or is undoing its wave already; None, none."""

        def turned(found: Rollout) -> Rollout:
            undo_from = {WAVE: found.wave, ALL: 0}.get(undo or "", found.waves)
            return replace(found, state=RolloutState.UNDOING, undo_from=undo_from, ends_as=RolloutState.ABORTED)

        what = "aborted" if undo is None else f"aborted, to undo {'its wave' if undo == WAVE else 'all'}"
        states = tuple(RolloutState) if undo == ALL else (RolloutState.RUNNING, RolloutState.PAUSED)
        return self._turn(identity, states, what, why, turned)

    def _turn(
        self, identity: str, states: Sequence[RolloutState], what: str, why: str, turned: Callable[[Rollout], Rollout]
    ) -> Rollout:
        with self._store.transaction("write") as transaction:
            found = rollout_rows.find_for_update(transaction, identity)
            if found.state not in states:
                expected = " or ".join(each.value for each in states)
                remedy = "look at 'tared fleet rollout show'; 'abort --undo all' takes back what is done, in any state"
                raise CommandError("rollout.state", f"{found.id} is {found.state.value}", expected, remedy)
            rollout = turned(found)
            rollout_rows.save_position(transaction, rollout)
            document = {"wave": rollout.wave + 1, "state": rollout.state.value}
            audit(transaction, self._who, what, why, rollout.id, json.dumps(document))
        return rollout


def _check_schemas(boards: Sequence[Device]) -> None:
    newer = [each for each in boards if each.is_newer]
    if newer:
        found = f"{len(newer)} of {len(boards)} boards speak a newer schema, the first {newer[0].name!a}"
        others = ",".join(f"schema!={each}" for each in sorted({each.schema for each in newer if each.schema}))
        remedy = f"update this tared, or leave them out by '{others}' in --select"
        raise CommandError("rollout.schema", found, "boards whose answers this tared can read", remedy)
