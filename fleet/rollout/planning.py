"""Where a rollout goes next, by what is on record of it: the next boards, a soak, a verdict, back, or the end."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from agent.signing import Signer
from fleet.records import audit
from fleet.rollout import orders, tables
from fleet.rollout.actions import Actions
from fleet.rollout.gates import Finding
from fleet.rollout.orders import Order
from fleet.rollout.states import Role, State, Target
from fleet.rollout.tables import Rollout, TargetRow
from fleet.rollout.windows import open_until
from fleet.store import Transaction

log = logging.getLogger(__name__)

_AT_ONCE = 200  # boards of a step


@dataclass(frozen=True)
class Plan:
    """Where the rollout is now. orders: new ones, on record. next: what comes, once more is known of these boards."""

    rollout: Rollout
    orders: Sequence[Order] = ()
    next: Literal["", "do", "judge", "undo"] = ""
    boards: Sequence[TargetRow] = ()


class Planner:
    """signer: the operator's key. who: as the record names it."""

    def __init__(self, signer: Signer | None, who: str) -> None:
        self._signer, self._who = signer, who

    def plan(self, transaction: Transaction, rollout: Rollout, now: float) -> Plan:
        """now: Unix time in s."""
        if rollout.state is State.UNDOING:
            return self._back(transaction, rollout, now)
        if rollout.state is not State.RUNNING:
            return Plan(rollout)
        wave = tables.counts(transaction, rollout.id)[rollout.wave]
        failed, unreached, total = wave[Target.FAILED], wave[Target.UNREACHED], sum(wave.values())
        for gate in rollout.spec.parsed_gates:
            if gate.is_lost(failed, unreached, total):
                words = f"{failed} failed and {unreached} unreached of {total} already"
                return Plan(self.judged(transaction, rollout, [Finding(gate.text, False, words)]))
        if not wave[Target.WAITING] and not wave[Target.SENT]:
            return self._soak(transaction, rollout, now)
        return self._on(transaction, rollout, wave[Target.SENT], now)

    def judged(self, transaction: Transaction, rollout: Rollout, findings: Sequence[Finding]) -> Rollout:
        """To the next wave, to the end, or back, as the gates say."""
        document: dict[str, object] = {"wave": rollout.wave + 1, "gates": [each.as_dict() for each in findings]}
        lost = [f"{each.gate}: {each.words}" for each in findings if not each.passed]
        if lost:
            back = replace(rollout, state=State.UNDOING, undo_from=rollout.wave, ends_as=State.ROLLED_BACK)
            return self._move(transaction, back, "gate failed", "; ".join(lost), **document)
        why = "; ".join(f"{each.gate}: {each.words}" for each in findings)
        if rollout.wave + 1 == rollout.waves:
            self._move(transaction, rollout, "gate passed", why, **document)
            over = replace(rollout, state=State.COMPLETED)
            return self._move(transaction, over, State.COMPLETED.value, _counted(transaction, rollout.id))
        after = replace(rollout, wave=rollout.wave + 1, soak_until=None)
        return self._move(transaction, after, "gate passed", why, **document)

    def _on(self, transaction: Transaction, rollout: Rollout, sent: int, now: float) -> Plan:
        """Whose turn it is."""
        spec, zones = rollout.spec, None
        room = min(spec.at_once - sent, _AT_ONCE)
        if room <= 0:
            return Plan(rollout)
        if spec.parsed_windows:
            zones = [
                zone
                for zone in tables.zones(transaction, rollout.id, rollout.wave)
                if open_until(spec.parsed_windows, now, zone) is not None
            ]
        span = rollout.wave, rollout.wave
        boards = tables.due(transaction, rollout.id, span, Target.WAITING, now, room, zones)
        return Plan(rollout, next="do", boards=boards) if boards else Plan(rollout)

    def _soak(self, transaction: Transaction, rollout: Rollout, now: float) -> Plan:
        """All of the wave is settled: it is looked at for a while, then judged."""
        if rollout.soak_until is None:
            soaking = replace(rollout, soak_until=now + rollout.spec.soak_s)
            why = f"wave {rollout.wave + 1} of {rollout.waves}, for {rollout.spec.soak_s:.0f} s"
            return Plan(self._move(transaction, soaking, "soaking", why))
        if now < rollout.soak_until:
            return Plan(rollout)
        boards = tables.targets(transaction, rollout.id, rollout.wave, rollout.wave)
        return Plan(rollout, next="judge", boards=boards)

    def _back(self, transaction: Transaction, rollout: Rollout, now: float) -> Plan:
        """Whoever is at it still is to leave it, and whoever has done it goes back; it is over when that is."""
        counts = tables.counts(transaction, rollout.id)
        everywhere = sum(counts.values(), Counter[Target]())
        new = self._cancel(transaction, rollout, now) if everywhere[Target.SENT] and rollout.spec.is_job else []
        done = sum(each[Target.DONE] for wave, each in counts.items() if wave >= rollout.undo_from)
        if not everywhere[Target.SENT] and not everywhere[Target.UNDOING] and not done:
            over = replace(rollout, state=rollout.ends_as)
            why = _counted(transaction, rollout.id)
            return Plan(self._move(transaction, over, rollout.ends_as.value, why), new)
        room = min(rollout.spec.at_once - everywhere[Target.UNDOING], _AT_ONCE)
        span = rollout.undo_from, rollout.waves - 1
        boards = tables.due(transaction, rollout.id, span, Target.DONE, now, max(0, room))
        return Plan(rollout, new, "undo", boards) if boards else Plan(rollout, new)

    def _cancel(self, transaction: Transaction, rollout: Rollout, now: float) -> list[Order]:
        told, actions = orders.told(transaction, rollout.id, Role.CANCEL), Actions(rollout, self._signer, now)
        under_way = tables.targets(transaction, rollout.id, 0, rollout.waves, Target.SENT)
        new = [actions.cancel(each) for each in under_way if each.device not in told]
        orders.record(transaction, rollout.id, new)
        return new

    def _move(self, transaction: Transaction, rollout: Rollout, what: str, why: str, **document: object) -> Rollout:
        """On record, with the wave that it is about: the present one unless the document names another."""
        tables.move(transaction, rollout)
        told = {"wave": rollout.wave + 1, **document}
        audit(transaction, self._who, what, why, rollout.id, json.dumps(told))
        log.info("rollout=%s step=%r wave=%d/%d why=%r", rollout.id, what, told["wave"], rollout.waves, why)
        return rollout


def told(counted: Iterable[Counter[Target]]) -> str:
    """How many boards are in which state, in words."""
    total = sum(counted, Counter[Target]())
    return ", ".join(f"{total[each]} {each.value}" for each in Target if total[each])


def _counted(transaction: Transaction, identity: str) -> str:
    return told(tables.counts(transaction, identity).values())
