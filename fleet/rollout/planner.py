"""Decide where a rollout goes next, by what is stored of it: the next boards, a soak, a verdict, back, or the end.

The planner runs in a transaction and only reads and writes rollout tables. What needs more knowledge about boards is
left to the stepper: a plan says what comes next, and for which boards. Each move of a rollout is recorded.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agent.contract.commands import CommandResult
from agent.contract.signing import Signer
from fleet.devices.records import audit
from fleet.rollout import board_rows, command_rows, rollout_rows
from fleet.rollout.actions import Actions
from fleet.rollout.board_rows import TargetChange, TargetRow, TargetState
from fleet.rollout.command_rows import CommandRole, CommandRow
from fleet.rollout.gates import GateResult
from fleet.rollout.rollout_rows import Rollout, RolloutState
from fleet.rollout.schedule import open_until
from fleet.store.transaction import Transaction
from fleet.untrusted import printable

log = logging.getLogger(__package__)

_AT_ONCE = 200  # boards of a step


@dataclass(frozen=True)
class RolloutPlan:
    """Where the rollout is now, and what comes next for `boards`. new_commands: recorded, and to be sent."""

    rollout: Rollout
    new_commands: Sequence[CommandRow] = ()
    next: Literal["", "do", "judge", "undo"] = ""
    boards: Sequence[TargetRow] = ()


class RolloutPlanner:
    """Plan the next step of rollouts. signer: the operator's key. who: the controller, as the record names it."""

    def __init__(self, signer: Signer | None, who: str) -> None:
        self._signer, self._who = signer, who

    def plan(self, transaction: Transaction, rollout: Rollout, working: Collection[int], now: float) -> RolloutPlan:
        """Plan the next step. working: boards that carry out a command, as far as is known. now: Unix time in s."""
        if rollout.state is RolloutState.UNDOING:
            return self._undo(transaction, rollout, working, now)
        if rollout.state is not RolloutState.RUNNING:
            return RolloutPlan(rollout)
        wave = board_rows.counts(transaction, rollout.id)[rollout.wave]
        failed, unreached, total = wave[TargetState.FAILED], wave[TargetState.UNREACHED], sum(wave.values())
        for gate in rollout.spec.parsed_gates:
            if gate.is_out_of_reach(failed, unreached, total):
                words = f"{failed} failed and {unreached} unreached of {total} already"
                return RolloutPlan(self.apply_verdict(transaction, rollout, [GateResult(gate.text, False, words)]))
        if not wave[TargetState.WAITING] and not wave[TargetState.SENT]:
            return self._soak(transaction, rollout, now)
        return self._next_boards(transaction, rollout, len(working), now)

    def apply_verdict(self, transaction: Transaction, rollout: Rollout, findings: Sequence[GateResult]) -> Rollout:
        """Move the rollout to the next wave, to the end, or back, as the gates say."""
        document: dict[str, object] = {"wave": rollout.wave + 1, "gates": [each.as_dict() for each in findings]}
        lost = [f"{each.gate}: {each.words}" for each in findings if not each.passed]
        if lost:
            back = replace(
                rollout, state=RolloutState.UNDOING, undo_from=rollout.wave, ends_as=RolloutState.ROLLED_BACK
            )
            return self._move(transaction, back, "gate failed", "; ".join(lost), **document)
        why = "; ".join(f"{each.gate}: {each.words}" for each in findings)
        if rollout.wave + 1 == rollout.waves:
            self._move(transaction, rollout, "gate passed", why, **document)
            finished = replace(rollout, state=RolloutState.COMPLETED)
            return self._move(transaction, finished, RolloutState.COMPLETED.value, _counted(transaction, rollout.id))
        after = replace(rollout, wave=rollout.wave + 1, soak_until=None)
        return self._move(transaction, after, "gate passed", why, **document)

    def halt(self, transaction: Transaction, rollout: Rollout, why: str) -> Rollout:
        """Pause the rollout until an operator resumes it."""
        if rollout.state is not RolloutState.RUNNING:
            return rollout
        return self._move(transaction, replace(rollout, state=RolloutState.PAUSED), "halted", why)

    def _next_boards(self, transaction: Transaction, rollout: Rollout, working: int, now: float) -> RolloutPlan:
        """Plan commands for the boards whose turn it is."""
        spec, zones = rollout.spec, None
        room = min(spec.at_once - working, _AT_ONCE)
        if room <= 0:
            return RolloutPlan(rollout)
        if spec.parsed_windows:
            zones = [
                zone
                for zone in board_rows.waiting_zones(transaction, rollout.id, rollout.wave)
                if open_until(spec.parsed_windows, now, zone) is not None
            ]
        span = rollout.wave, rollout.wave
        boards = board_rows.due(transaction, rollout.id, span, TargetState.WAITING, now, room, zones)
        return RolloutPlan(rollout, next="do", boards=boards) if boards else RolloutPlan(rollout)

    def _soak(self, transaction: Transaction, rollout: Rollout, now: float) -> RolloutPlan:
        """Soak a wave whose boards are all settled, then let it be judged."""
        if rollout.soak_until is None:
            soaking = replace(rollout, soak_until=now + rollout.spec.soak_s)
            why = f"wave {rollout.wave + 1} of {rollout.waves}, for {rollout.spec.soak_s:.0f} s"
            return RolloutPlan(self._move(transaction, soaking, "soaking", why))
        if now < rollout.soak_until:
            return RolloutPlan(rollout)
        return RolloutPlan(rollout, next="judge")

    def _undo(self, transaction: Transaction, rollout: Rollout, working: Collection[int], now: float) -> RolloutPlan:
        """Cancel what boards still do, and send changed boards back; finish when all of that is done."""
        new = self.cancel(transaction, rollout, working, now) if working else []
        counts = board_rows.counts(transaction, rollout.id)
        everywhere = sum(counts.values(), Counter[TargetState]())
        done = sum(each[TargetState.DONE] for wave, each in counts.items() if wave >= rollout.undo_from)
        if not everywhere[TargetState.SENT] and not everywhere[TargetState.UNDOING] and not done:
            done = self._reopen_late(transaction, rollout, now)
        if not everywhere[TargetState.SENT] and not everywhere[TargetState.UNDOING] and not done:
            finished = replace(rollout, state=rollout.ends_as)
            why = _counted(transaction, rollout.id)
            return RolloutPlan(self._move(transaction, finished, rollout.ends_as.value, why), new)
        room = min(rollout.spec.at_once - everywhere[TargetState.UNDOING], _AT_ONCE)
        span = rollout.undo_from, rollout.waves - 1
        boards = board_rows.due(transaction, rollout.id, span, TargetState.DONE, now, max(0, room))
        return RolloutPlan(rollout, new, "undo", boards) if boards else RolloutPlan(rollout, new)

    def cancel(
        self, transaction: Transaction, rollout: Rollout, boards: Collection[int], now: float
    ) -> list[CommandRow]:
        """Record a cancellation for these boards, once each, and return the new commands. Only jobs are cancelled."""
        if not rollout.spec.is_job:
            return []
        left = sorted(set(boards) - command_rows.devices_with_role(transaction, rollout.id, CommandRole.CANCEL))
        actions = Actions(rollout, self._signer, now)
        new = [actions.cancel(each) for each in board_rows.by_device(transaction, rollout.id, left).values()]
        command_rows.record(transaction, rollout.id, new)
        return new

    def _reopen_late(self, transaction: Transaction, rollout: Rollout, now: float) -> int:
        """Make lost boards DONE that have succeeded after all, so that they go back too; return how many."""
        changes = []
        for device, document in board_rows.late_successes(transaction, rollout.id, rollout.undo_from):
            made = (CommandResult.from_json(document.encode()).result or {}).get("artefact")
            artefact = printable(made, 64) if isinstance(made, str) else None
            changes.append(TargetChange(device, TargetState.DONE, "was late", artefact))
        board_rows.apply_changes(transaction, rollout.id, changes, now)
        return len(changes)

    def _move(self, transaction: Transaction, rollout: Rollout, what: str, why: str, **document: object) -> Rollout:
        """Store and record a move. The record names the present wave, unless `document` names another."""
        rollout_rows.save_position(transaction, rollout)
        recorded = {"wave": rollout.wave + 1, **document}
        audit(transaction, self._who, what, why, rollout.id, json.dumps(recorded))
        log.info("rollout=%s step=%r wave=%d/%d why=%r", rollout.id, what, recorded["wave"], rollout.waves, why)
        return rollout


def state_counts(counted: Iterable[Counter[TargetState]]) -> str:
    """Return in words how many boards are in which state."""
    total = sum(counted, Counter[TargetState]())
    return ", ".join(f"{total[each]} {each.value}" for each in TargetState if total[each])


def _counted(transaction: Transaction, identity: str) -> str:
    return state_counts(board_rows.counts(transaction, identity).values())
