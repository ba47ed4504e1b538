"""Moves rollouts on, a step at a time: what boards answered is written down, and what comes of it, in one transaction.

A step that needs to know how boards are looks that up between two transactions; it holds because nobody else moves the
rollout meanwhile, which the second one makes sure of. Commands are sent only after they are on record.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.errors import AgentError, CommandError
from agent.requests import CommandResult, Reported
from agent.signing import Signer
from fleet.devices import Device, Devices
from fleet.records import Results
from fleet.rollout import orders, tables, targets
from fleet.rollout.actions import Actions, Step
from fleet.rollout.answers import end_all, unsent_answer
from fleet.rollout.dispatch import Dispatch
from fleet.rollout.judging import judge_wave
from fleet.rollout.orders import Order
from fleet.rollout.planning import Plan, Planner
from fleet.rollout.states import Role, State, Target
from fleet.rollout.tables import Rollout
from fleet.rollout.targets import Change, TargetRow
from fleet.rollout.windows import open_until
from fleet.store import Store, Transaction

_LOOK_EVERY_S, _LOOKED_PER_S = 2.0, 500  # at a wave that cannot be judged yet; the larger the more seldom
_ASKED_EVERY_S = 10.0  # whether a collector has an answer that nobody has heard here

Held = Mapping[tuple[str, str], Reported]  # the settings that boards have told, by fleet and device


class Conductor:
    """Of those rollouts that `owner` has claimed, for `lease_s` from each step on. who: as the record names it. held:
    see Held."""

    def __init__(
        self,
        store: Store,
        dispatch: Dispatch,
        owner: str,
        who: str,
        signer: Signer | None,
        held: Held,
        lease_s: float,
    ) -> None:
        self._store, self._dispatch, self._owner, self._lease_s = store, dispatch, owner, lease_s
        self._signer, self._held = signer, held
        self._planner, self._devices, self._results = Planner(signer, who), Devices(store), Results(store)
        self._open: dict[str, dict[str, Order]] = {}  # by rollout and command
        self._unsent: dict[str, set[str]] = {}  # the same, that will not be
        self._asked_s: dict[str, float] = {}

    def step(self, identity: str, heard: Mapping[str, CommandResult]) -> tuple[Rollout | None, bool]:
        """What there is to do now; where it is afterwards, None where it is not the owner's any more; and whether more
        is to be done at once.

        heard: the newest results, by command; what is none of its commands is left out. Raises AgentError as the store
        does: then they are to be told again.
        """
        try:
            unsent = {key: unsent_answer(key) for key in self._unsent.pop(identity, ())}
            return self._step(identity, {**unsent, **self._collected(identity), **heard})
        except AgentError:
            self.forget(identity)  # it may be on record, or not
            raise

    def forget(self, identity: str) -> None:
        """It is over, or somebody else's, or to be read anew."""
        self._dispatch.drop(self._open.pop(identity, {}))
        self._asked_s.pop(identity, None)
        self._unsent.pop(identity, None)

    def has(self, identity: str, command: str) -> bool:
        """Whether it is an open command of this rollout."""
        return command in self._open.get(identity, {})

    def _step(self, identity: str, heard: Mapping[str, CommandResult]) -> tuple[Rollout | None, bool]:
        now = time.time()
        with self._store.begun("write") as transaction:
            rollout = tables.hold(transaction, identity, self._owner, now, now + self._lease_s)
            if rollout is None:
                self.forget(identity)
                return None, False
            known = self._known(transaction, rollout)
            ended = end_all(transaction, rollout, known, heard, self._signer is not None, now)
            new = self._planner.cancel(transaction, rollout, ended.lost, now)
            if ended.halt:
                rollout = self._planner.halt(transaction, rollout, ended.halt)
            open_now = ended.left
            plan = self._planner.plan(transaction, rollout, self._at_it(rollout, open_now), now)
        self._dispatch.drop(known.keys() - open_now.keys())
        self._open[identity] = open_now
        if plan.rollout.state is State.UNDOING:
            untold = [key for key, each in open_now.items() if each.role is Role.DO and each.accepted is None]
            self._unsent[identity] = self._dispatch.withhold(untold)
        self._send(plan.rollout, [*new, *plan.orders])
        if plan.next == "judge":
            return self._judge(plan.rollout), False
        return (self._act(plan), True) if plan.next else (plan.rollout, plan.rollout != rollout)

    def _at_it(self, rollout: Rollout, known: Mapping[str, Order]) -> set[int]:
        """Boards that are, as far as is known: who is away is not, nor, while all is undone, who has not said so."""
        doing = [each for each in known.values() if each.role is Role.DO]
        if rollout.state is State.UNDOING:
            return {each.device for each in doing if each.accepted is not None}
        away = {each.device for each in doing if self._dispatch.is_away(rollout.fleet, each.name)}
        return {each.device for each in doing if each.accepted is not None or each.device not in away}

    def _known(self, transaction: Transaction, rollout: Rollout) -> dict[str, Order]:
        """Its open commands; at the first look those that were recorded by somebody who could not go on."""
        if rollout.id not in self._open:
            found = {order.id: order for order in orders.open_orders(transaction, rollout.id)}
            self._open[rollout.id] = found
            self._dispatch.put(rollout.fleet, found.values(), may_be_out=True)
        return self._open[rollout.id]

    def _collected(self, identity: str) -> dict[str, CommandResult]:
        """Results that a collector has stored, looked up now and then: they may have come to nobody else."""
        if time.monotonic() - self._asked_s.get(identity, 0.0) < _ASKED_EVERY_S:
            return {}
        self._asked_s[identity] = time.monotonic()
        keys = [(order.device, order.id) for order in self._open.get(identity, {}).values()]
        found = [CommandResult.from_json(document.encode()) for document in self._results.of(keys).values()]
        return {result.id: result for result in found if result.status in ("SUCCEEDED", "FAILED")}

    def _judge(self, rollout: Rollout) -> Rollout | None:
        """All is read before anything is locked: a wave may be of a hundred thousand boards."""
        with self._store.begun("read") as transaction:
            boards = targets.targets(transaction, rollout.id, rollout.wave, rollout.wave)
        devices = {each.id: each for each in self._devices.some([board.device for board in boards])}
        now = time.time()
        findings = judge_wave(rollout.spec, boards, devices, now)
        with self._store.begun("write") as transaction:
            held = self._unmoved(transaction, rollout)
            if held != rollout:
                return held
            if findings is not None:
                return self._planner.judged(transaction, rollout, findings)
            later = replace(rollout, soak_until=now + _LOOK_EVERY_S + len(boards) / _LOOKED_PER_S)
            tables.move(transaction, later)
            return later

    def _act(self, plan: Plan) -> Rollout | None:
        """Tell these boards what comes next, now that it is known how they are."""
        devices = {each.id: each for each in self._devices.some([board.device for board in plan.boards])}
        rollout, now = plan.rollout, time.time()
        actions = Actions(rollout, self._signer, now)
        steps = [step for each in plan.boards if (step := self._told(plan, actions, each, devices[each.device], now))]
        with self._store.begun("write") as transaction:
            held = self._unmoved(transaction, rollout)
            if held != rollout:
                return held
            targets.change(transaction, rollout.id, [step.change for step in steps], now)
            new = [step.order for step in steps if step.order is not None]
            orders.record(transaction, rollout.id, new)
        self._send(rollout, new)
        return rollout

    def _unmoved(self, transaction: Transaction, rollout: Rollout) -> Rollout | None:
        """Where it is now: the same, unless an operator has moved it, or another controller has it."""
        now = time.time()
        held = tables.hold(transaction, rollout.id, self._owner, now, now + self._lease_s)
        return None if held is None else replace(held, lease_until=rollout.lease_until)

    def _told(self, plan: Plan, actions: Actions, board: TargetRow, device: Device, now: float) -> Step | None:
        """What cannot be told to one board is no other's affair. None where its window has closed since."""
        held = self._held.get((plan.rollout.fleet, board.name))
        try:
            if plan.next == "undo":
                return actions.undo(board, device, held)
            until = open_until(plan.rollout.spec.parsed_windows, now, board.zone)
            return None if until is None else actions.do(board, device, held, until)
        except CommandError as error:
            return Step(Change(board.device, Target.KEPT if plan.next == "undo" else Target.FAILED, str(error)[:300]))

    def _send(self, rollout: Rollout, new: Sequence[Order]) -> None:
        """What is on record by now."""
        self._open[rollout.id].update({order.id: order for order in new})
        self._dispatch.put(rollout.fleet, new)
