"""How the boards of a wave stand once it has been looked at for long enough."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.common.errors import AgentError, CommandError
from agent.contract.commands import CommandResult, Reported
from agent.contract.signing import Signer
from fleet.devices.devices import Device, Devices
from fleet.devices.facts import Fact, facts
from fleet.devices.records import Results
from fleet.rollout import board_rows, command_rows, rollout_rows
from fleet.rollout.actions import Actions, BoardStep
from fleet.rollout.board_rows import TargetChange, TargetRow, TargetState
from fleet.rollout.command_rows import CommandRole, CommandRow
from fleet.rollout.gates import GateResult, Standing, judge
from fleet.rollout.outcomes import apply_results, unsent_result
from fleet.rollout.planner import RolloutPlan, RolloutPlanner
from fleet.rollout.rollout_rows import Rollout, RolloutState
from fleet.rollout.schedule import open_until
from fleet.rollout.sender import CommandSender
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import FleetStore, Transaction

_PATIENCE_S = 300.0  # with telemetry that is behind: its period, what an outbox gathers, a broker that was away


def judge_wave(
    spec: RolloutSpec, wave: Sequence[TargetRow], devices: Mapping[int, Device], now: float
) -> list[GateResult] | None:
    """wave: all of its boards, each with what the store knows of it. None: it is too early, for some have told nothing
    since; they have five minutes more than the soak."""
    standings = [_standing(spec, each, devices[each.device], now) for each in wave]
    settled = max((each.settled or 0.0 for each in wave), default=0.0)
    waits = any(each.reached and not each.failure and each.after is None for each in standings)
    if waits and now < settled + spec.soak_s + _PATIENCE_S and not all(gate.is_on_wave for gate in spec.parsed_gates):
        return None
    return judge(spec.parsed_gates, standings)


def _standing(spec: RolloutSpec, target: TargetRow, device: Device, now: float) -> Standing:
    known = facts(device, now, spec.silent_s)
    has_told = device.telemetry_at is not None and target.settled is not None and device.telemetry_at > target.settled
    reached = target.state is not TargetState.UNREACHED and not device.is_newer
    failure = target.reason or "failed" if target.state is TargetState.FAILED else ""
    if target.state is TargetState.DONE and reached:
        failure = _relapse(spec, target, device, known)
    return Standing(target.name, failure, reached, target.baseline, known if has_told else None)


def _relapse(spec: RolloutSpec, target: TargetRow, device: Device, known: Mapping[str, Fact]) -> str:
    """What has become of a board since it did what it was told, if that is no good. A board that has made itself yet
    another engine since, as after an alarm, is no worse for it."""
    if known["state"] in ("silent", "offline"):
        return f"{known['state']} since"
    if known["state"] == "degraded" and target.baseline.get("state") != "degraded":
        return "degraded since"
    if spec.is_job and target.artefact != target.baseline.get("engine") == device.engine:
        return f"back at {device.engine}, which it had before"
    return ""


_LOOK_EVERY_S, _LOOKED_PER_S = 2.0, 500  # at a wave that cannot be judged yet; the larger the more seldom
_ASKED_EVERY_S = 10.0  # whether a collector has an answer that nobody has heard here

Held = Mapping[tuple[str, str], Reported]  # the settings that boards have told, by fleet and device


class RolloutStepper:
    """Of those rollouts that `owner` has claimed, for `lease_s` from each step on. who: as the record names it. held:
    see Held."""

    def __init__(
        self,
        store: FleetStore,
        dispatch: CommandSender,
        owner: str,
        who: str,
        signer: Signer | None,
        held: Held,
        lease_s: float,
    ) -> None:
        self._store, self._dispatch, self._owner, self._lease_s = store, dispatch, owner, lease_s
        self._signer, self._held = signer, held
        self._planner, self._devices, self._results = RolloutPlanner(signer, who), Devices(store), Results(store)
        self._open: dict[str, dict[str, CommandRow]] = {}  # by rollout and command
        self._unsent: dict[str, set[str]] = {}  # the same, that will not be
        self._asked_s: dict[str, float] = {}

    def step(self, identity: str, heard: Mapping[str, CommandResult]) -> tuple[Rollout | None, bool]:
        """What there is to do now; where it is afterwards, None where it is not the owner's any more; and whether more
        is to be done at once.

        heard: the newest results, by command; what is none of its commands is left out. Raises AgentError as the store
        does: then they are to be told again.
        """
        try:
            unsent = {key: unsent_result(key) for key in self._unsent.pop(identity, ())}
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
        with self._store.transaction("write") as transaction:
            rollout = rollout_rows.renew_lease(transaction, identity, self._owner, now, now + self._lease_s)
            if rollout is None:
                self.forget(identity)
                return None, False
            known = self._known(transaction, rollout)
            ended = apply_results(transaction, rollout, known, heard, self._signer is not None, now)
            new = self._planner.cancel(transaction, rollout, ended.timed_out, now)
            if ended.halt_reason:
                rollout = self._planner.halt(transaction, rollout, ended.halt_reason)
            open_now = ended.open_commands
            plan = self._planner.plan(transaction, rollout, self._at_it(rollout, open_now), now)
        self._dispatch.drop(known.keys() - open_now.keys())
        self._open[identity] = open_now
        if plan.rollout.state is RolloutState.UNDOING:
            untold = [key for key, each in open_now.items() if each.role is CommandRole.DO and each.accepted is None]
            self._unsent[identity] = self._dispatch.withhold(untold)
        self._send(plan.rollout, [*new, *plan.new_commands])
        if plan.next == "judge":
            return self._judge(plan.rollout), False
        return (self._act(plan), True) if plan.next else (plan.rollout, plan.rollout != rollout)

    def _at_it(self, rollout: Rollout, known: Mapping[str, CommandRow]) -> set[int]:
        """Boards that are, as far as is known: who is away is not, nor, while all is undone, who has not said so."""
        doing = [each for each in known.values() if each.role is CommandRole.DO]
        if rollout.state is RolloutState.UNDOING:
            return {each.device for each in doing if each.accepted is not None}
        away = {each.device for each in doing if self._dispatch.is_away(rollout.fleet, each.name)}
        return {each.device for each in doing if each.accepted is not None or each.device not in away}

    def _known(self, transaction: Transaction, rollout: Rollout) -> dict[str, CommandRow]:
        """Its open commands; at the first look those that were recorded by somebody who could not go on."""
        if rollout.id not in self._open:
            found = {order.id: order for order in command_rows.open_commands(transaction, rollout.id)}
            self._open[rollout.id] = found
            self._dispatch.put(rollout.fleet, found.values(), may_be_out=True)
        return self._open[rollout.id]

    def _collected(self, identity: str) -> dict[str, CommandResult]:
        """Results that a collector has stored, looked up now and then: they may have come to nobody else."""
        if time.monotonic() - self._asked_s.get(identity, 0.0) < _ASKED_EVERY_S:
            return {}
        self._asked_s[identity] = time.monotonic()
        keys = [(order.device, order.id) for order in self._open.get(identity, {}).values()]
        found = [CommandResult.from_json(document.encode()) for document in self._results.documents(keys).values()]
        return {result.id: result for result in found if result.status in ("SUCCEEDED", "FAILED")}

    def _judge(self, rollout: Rollout) -> Rollout | None:
        """All is read before anything is locked: a wave may be of a hundred thousand boards."""
        with self._store.transaction("read") as transaction:
            boards = board_rows.of_waves(transaction, rollout.id, rollout.wave, rollout.wave)
        devices = {each.id: each for each in self._devices.by_ids([board.device for board in boards])}
        now = time.time()
        findings = judge_wave(rollout.spec, boards, devices, now)
        with self._store.transaction("write") as transaction:
            held = self._unmoved(transaction, rollout)
            if held != rollout:
                return held
            if findings is not None:
                return self._planner.apply_verdict(transaction, rollout, findings)
            later = replace(rollout, soak_until=now + _LOOK_EVERY_S + len(boards) / _LOOKED_PER_S)
            rollout_rows.save_position(transaction, later)
            return later

    def _act(self, plan: RolloutPlan) -> Rollout | None:
        """Tell these boards what comes next, now that it is known how they are."""
        devices = {each.id: each for each in self._devices.by_ids([board.device for board in plan.boards])}
        rollout, now = plan.rollout, time.time()
        actions = Actions(rollout, self._signer, now)
        steps = [step for each in plan.boards if (step := self._told(plan, actions, each, devices[each.device], now))]
        with self._store.transaction("write") as transaction:
            held = self._unmoved(transaction, rollout)
            if held != rollout:
                return held
            board_rows.apply_changes(transaction, rollout.id, [step.change for step in steps], now)
            new = [step.command for step in steps if step.command is not None]
            command_rows.record(transaction, rollout.id, new)
        self._send(rollout, new)
        return rollout

    def _unmoved(self, transaction: Transaction, rollout: Rollout) -> Rollout | None:
        """Where it is now: the same, unless an operator has moved it, or another controller has it."""
        now = time.time()
        held = rollout_rows.renew_lease(transaction, rollout.id, self._owner, now, now + self._lease_s)
        return None if held is None else replace(held, lease_until=rollout.lease_until)

    def _told(
        self, plan: RolloutPlan, actions: Actions, board: TargetRow, device: Device, now: float
    ) -> BoardStep | None:
        """What cannot be told to one board is no other's affair. None where its window has closed since."""
        held = self._held.get((plan.rollout.fleet, board.name))
        try:
            if plan.next == "undo":
                return actions.undo(board, device, held)
            until = open_until(plan.rollout.spec.parsed_windows, now, board.zone)
            return None if until is None else actions.do(board, device, held, until)
        except CommandError as error:
            return BoardStep(
                TargetChange(
                    board.device, TargetState.KEPT if plan.next == "undo" else TargetState.FAILED, str(error)[:300]
                )
            )

    def _send(self, rollout: Rollout, new: Sequence[CommandRow]) -> None:
        """What is on record by now."""
        self._open[rollout.id].update({order.id: order for order in new})
        self._dispatch.put(rollout.fleet, new)
