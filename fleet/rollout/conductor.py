"""Moves rollouts on, a step at a time: what boards answered is written down, and what comes of it, in one transaction.

A step that needs to know how boards are looks that up between two transactions; it holds because nobody else moves the
rollout meanwhile, which the second one makes sure of. Commands are sent only after they are on record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from agent.requests import CommandResult
from agent.signing import Signer
from fleet.devices import Device, Devices
from fleet.records import Results
from fleet.rollout import orders, tables
from fleet.rollout.actions import Actions, Step
from fleet.rollout.answers import overdue, settle
from fleet.rollout.dispatch import Dispatch
from fleet.rollout.judging import judge_wave
from fleet.rollout.orders import Order
from fleet.rollout.planning import Plan, Planner
from fleet.rollout.states import Role, State
from fleet.rollout.tables import Rollout
from fleet.rollout.windows import open_until
from fleet.store import Store, Transaction

_LOOK_EVERY_S = 2.0
_ASKED_EVERY_S = 10.0  # whether a collector has an answer that nobody has heard here

Held = Mapping[tuple[str, str], Mapping[str, Any]]  # the settings that boards have told, by fleet and device


class Conductor:
    """Of those rollouts that `owner` has claimed. who: as the record names it. held: see Held."""

    def __init__(
        self, store: Store, dispatch: Dispatch, owner: str, who: str, signer: Signer | None, held: Held
    ) -> None:
        self._store, self._dispatch, self._owner = store, dispatch, owner
        self._signer, self._held = signer, held
        self._planner, self._devices, self._results = Planner(signer, who), Devices(store), Results(store)
        self._open: dict[str, dict[str, Order]] = {}  # by rollout and command
        self._asked_s: dict[str, float] = {}

    def step(self, identity: str, heard: Mapping[str, CommandResult]) -> Rollout | None:
        """What there is to do now; where it is afterwards, None where it is not the owner's any more.

        heard: the newest results, by command; what is none of its commands is left out. Raises AgentError as the store
        does: then they are to be told again.
        """
        heard = {**self._collected(identity), **heard}
        now = time.time()
        with self._store.begun("write") as transaction:
            rollout = tables.hold(transaction, identity, self._owner, now)
            if rollout is None:
                self.forget(identity)
                return None
            known = self._known(transaction, rollout)
            open_now = self._settle(transaction, rollout, known, heard, now)
            plan = self._planner.plan(transaction, rollout, now)
        self._dispatch.drop(known.keys() - open_now.keys())
        self._open[identity] = open_now
        self._send(plan.rollout, plan.orders)
        return self._act(plan) if plan.next else plan.rollout

    def forget(self, identity: str) -> None:
        """It is over, or somebody else's."""
        self._dispatch.drop(self._open.pop(identity, {}))
        self._asked_s.pop(identity, None)

    def _known(self, transaction: Transaction, rollout: Rollout) -> dict[str, Order]:
        """Its open commands; at the first look those that were recorded by somebody who could not go on."""
        if rollout.id not in self._open:
            found = {order.id: order for order in orders.open_orders(transaction, rollout.id)}
            self._open[rollout.id] = found
            self._dispatch.put(rollout.fleet, found.values())
        return self._open[rollout.id]

    def _collected(self, identity: str) -> dict[str, CommandResult]:
        """Results that a collector has stored, looked up now and then: they may have come to nobody else."""
        if time.monotonic() - self._asked_s.get(identity, 0.0) < _ASKED_EVERY_S:
            return {}
        self._asked_s[identity] = time.monotonic()
        keys = [(order.device, order.id) for order in self._open.get(identity, {}).values()]
        found = [CommandResult.from_json(document.encode()) for document in self._results.of(keys).values()]
        return {result.id: result for result in found if result.status in ("SUCCEEDED", "FAILED")}

    def _settle(
        self,
        transaction: Transaction,
        rollout: Rollout,
        known: Mapping[str, Order],
        heard: Mapping[str, CommandResult],
        now: float,
    ) -> dict[str, Order]:
        """Write down what has come of commands; those that are still open."""
        begun = {key for key, order in known.items() if order.accepted is None and key in heard}
        begun = {key for key in begun if not heard[key].final}
        orders.accepted(transaction, begun, now)
        open_now = {key: replace(order, accepted=now) if key in begun else order for key, order in known.items()}
        ends = {key: heard[key] for key in open_now if key in heard and heard[key].final}
        for key, order in open_now.items():
            if key not in ends and (late := overdue(order, now, rollout.spec.deadline_s)) is not None:
                ends[key] = late
        if ends:
            rows = tables.these(transaction, rollout.id, sorted({open_now[key].device for key in ends}))
            changes = []
            for key, result in ends.items():
                order = open_now.pop(key)
                may_retry = order.role is Role.UNDO or rollout.state is not State.UNDOING
                if (change := settle(rows[order.device], order, result, may_retry, now)) is not None:
                    changes.append(change)
            tables.change(transaction, rollout.id, changes, now)
            orders.ended(transaction, ends.values(), now)
        return open_now

    def _act(self, plan: Plan) -> Rollout | None:
        """What comes of knowing how the boards of the plan are."""
        devices = {each.id: each for each in self._devices.some([board.device for board in plan.boards])}
        rollout, now = plan.rollout, time.time()
        steps = self._steps(plan, devices, now) if plan.next != "judge" else []
        with self._store.begun("write") as transaction:
            held = tables.hold(transaction, rollout.id, self._owner, now)
            if held is None or replace(held, lease_until=rollout.lease_until) != rollout:
                return held  # somebody has paused it, or it is somebody else's: the next step sees
            if plan.next == "judge":
                findings = judge_wave(rollout.spec, plan.boards, devices, now)
                if findings is not None:
                    return self._planner.judged(transaction, rollout, findings)
                rollout = replace(rollout, soak_until=now + _LOOK_EVERY_S)
                tables.move(transaction, rollout)
                return rollout
            tables.change(transaction, rollout.id, [step.change for step in steps], now)
            new = [step.order for step in steps if step.order is not None]
            orders.record(transaction, rollout.id, new)
        self._send(rollout, new)
        return rollout

    def _steps(self, plan: Plan, devices: Mapping[int, Device], now: float) -> list[Step]:
        rollout, actions = plan.rollout, Actions(plan.rollout, self._signer, now)
        if plan.next == "undo":
            return [actions.undo(board, devices[board.device]) for board in plan.boards]
        steps = []
        for board in plan.boards:
            until = open_until(rollout.spec.parsed_windows, now, board.zone)
            if until is not None:  # it may have closed since
                held = self._held.get((rollout.fleet, board.name))
                steps.append(actions.do(board, devices[board.device], held, until))
        return steps

    def _send(self, rollout: Rollout, new: Sequence[Order]) -> None:
        """What is on record by now."""
        self._open[rollout.id].update({order.id: order for order in new})
        self._dispatch.put(rollout.fleet, new)
