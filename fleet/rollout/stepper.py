"""Take one step of a rollout: apply the results that came, plan, send commands, and judge waves.

A step is one write transaction that renews the lease. What needs much reading, such as the facts of a wave's boards,
is read before another transaction, which gives up if the rollout was moved meanwhile. Commands are recorded in a
transaction, and sent after it: after a crash the next controller sends what is recorded, under the same ids.
"""

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

_JUDGE_EVERY_S, _JUDGED_PER_S = 2.0, 500  # a wave that cannot be judged yet is judged again; large ones less often
_COLLECTED_EVERY_S = 10.0  # between two searches for results that only a collector has received
_PATIENCE_S = 300.0  # with late telemetry: its period, a board's outbox, a broker that was away

ReportedSettings = Mapping[tuple[str, str], Reported]  # what boards last reported, by fleet and device


class RolloutStepper:
    """Take the steps of rollouts that `owner` has claimed."""

    def __init__(
        self,
        store: FleetStore,
        sender: CommandSender,
        owner: str,
        who: str,
        signer: Signer | None,
        settings: ReportedSettings,
        lease_s: float,
    ) -> None:
        """Prepare a stepper.

        Args:
            owner: Name of the controller in leases.
            who: Name of the controller in records.
            signer: The operator's key.
            settings: The settings of boards, kept up to date by the caller.
            lease_s: How long a lease lasts from each step on.
        """
        self._store, self._sender, self._owner, self._lease_s = store, sender, owner, lease_s
        self._signer, self._settings = signer, settings
        self._planner, self._devices, self._results = RolloutPlanner(signer, who), Devices(store), Results(store)
        self._open: dict[str, dict[str, CommandRow]] = {}  # by rollout and command
        self._unsent: dict[str, set[str]] = {}  # by rollout, commands that were never sent and will not be
        self._collected_s: dict[str, float] = {}  # by rollout, when collected results were last searched

    def step(self, identity: str, results: Mapping[str, CommandResult]) -> tuple[Rollout | None, bool]:
        """Take one step.

        Return the rollout after it, None if the lease is lost; and whether more is to be done at once.

        results: the newest results, by command; those of other rollouts are ignored. Raises AgentError as the store
        does; the same results must then be given again.
        """
        try:
            unsent = {key: unsent_result(key) for key in self._unsent.pop(identity, ())}
            return self._step(identity, {**unsent, **self._collected(identity), **results})
        except AgentError:
            self.forget(identity)  # whether the transaction was committed is not known: read everything again
            raise

    def forget(self, identity: str) -> None:
        """Forget a rollout that is finished, lost to another controller, or to be read again."""
        self._sender.drop(self._open.pop(identity, {}))
        self._collected_s.pop(identity, None)
        self._unsent.pop(identity, None)

    def has_open_command(self, identity: str, command: str) -> bool:
        """Return True if this is an open command of the rollout."""
        return command in self._open.get(identity, {})

    def _step(self, identity: str, results: Mapping[str, CommandResult]) -> tuple[Rollout | None, bool]:
        now = time.time()
        with self._store.transaction("write") as transaction:
            rollout = rollout_rows.renew_lease(transaction, identity, self._owner, now, now + self._lease_s)
            if rollout is None:
                self.forget(identity)
                return None, False
            known = self._open_commands(transaction, rollout)
            applied = apply_results(transaction, rollout, known, results, self._signer is not None, now)
            new = self._planner.cancel(transaction, rollout, applied.timed_out, now)
            if applied.halt_reason:
                rollout = self._planner.halt(transaction, rollout, applied.halt_reason)
            open_now = applied.open_commands
            plan = self._planner.plan(transaction, rollout, self._working(rollout, open_now), now)
        self._sender.drop(known.keys() - open_now.keys())
        self._open[identity] = open_now
        if plan.rollout.state is RolloutState.UNDOING:
            pending = [key for key, each in open_now.items() if each.role is CommandRole.DO and each.accepted is None]
            self._unsent[identity] = self._sender.withhold(pending)
        self._send(plan.rollout, [*new, *plan.new_commands])
        if plan.next == "judge":
            return self._judge(plan.rollout), False
        return (self._act(plan), True) if plan.next else (plan.rollout, plan.rollout != rollout)

    def _working(self, rollout: Rollout, commands: Mapping[str, CommandRow]) -> set[int]:
        """Return the boards that carry out a command, as far as is known.

        A board that is away does not. While the rollout is undone, only boards that have said so do.
        """
        doing = [each for each in commands.values() if each.role is CommandRole.DO]
        if rollout.state is RolloutState.UNDOING:
            return {each.device for each in doing if each.accepted is not None}
        away = {each.device for each in doing if self._sender.is_away(rollout.fleet, each.name)}
        return {each.device for each in doing if each.accepted is not None or each.device not in away}

    def _open_commands(self, transaction: Transaction, rollout: Rollout) -> dict[str, CommandRow]:
        """Return the open commands; the first time, those that an earlier controller recorded."""
        if rollout.id not in self._open:
            recorded = {each.id: each for each in command_rows.open_commands(transaction, rollout.id)}
            self._open[rollout.id] = recorded
            self._sender.put(rollout.fleet, recorded.values(), may_be_out=True)
        return self._open[rollout.id]

    def _collected(self, identity: str) -> dict[str, CommandResult]:
        """Return results that a collector has stored, now and then: they may have reached nobody else."""
        if time.monotonic() - self._collected_s.get(identity, 0.0) < _COLLECTED_EVERY_S:
            return {}
        self._collected_s[identity] = time.monotonic()
        keys = [(each.device, each.id) for each in self._open.get(identity, {}).values()]
        results = [CommandResult.from_json(each.encode()) for each in self._results.documents(keys).values()]
        return {result.id: result for result in results if result.status in ("SUCCEEDED", "FAILED")}

    def _judge(self, rollout: Rollout) -> Rollout | None:
        """Judge a wave. All is read before anything is locked: a wave may have a hundred thousand boards."""
        with self._store.transaction("read") as transaction:
            boards = board_rows.of_waves(transaction, rollout.id, rollout.wave, rollout.wave)
        devices = {each.id: each for each in self._devices.by_ids([board.device for board in boards])}
        now = time.time()
        verdicts = judge_wave(rollout.spec, boards, devices, now)
        with self._store.transaction("write") as transaction:
            current = self._renew_lease(transaction, rollout)
            if current != rollout:
                return current
            if verdicts is not None:
                return self._planner.apply_verdict(transaction, rollout, verdicts)
            later = replace(rollout, soak_until=now + _JUDGE_EVERY_S + len(boards) / _JUDGED_PER_S)
            rollout_rows.save_position(transaction, later)
            return later

    def _act(self, plan: RolloutPlan) -> Rollout | None:
        """Record and send the next commands, now that the boards' facts are known."""
        devices = {each.id: each for each in self._devices.by_ids([board.device for board in plan.boards])}
        rollout, now = plan.rollout, time.time()
        actions = Actions(rollout, self._signer, now)
        steps = [step for each in plan.boards if (step := self._board_step(plan, actions, each, devices, now))]
        with self._store.transaction("write") as transaction:
            current = self._renew_lease(transaction, rollout)
            if current != rollout:
                return current
            board_rows.apply_changes(transaction, rollout.id, [step.change for step in steps], now)
            new = [step.command for step in steps if step.command is not None]
            command_rows.record(transaction, rollout.id, new)
        self._send(rollout, new)
        return rollout

    def _renew_lease(self, transaction: Transaction, rollout: Rollout) -> Rollout | None:
        """Renew the lease, and return the rollout as it is now; it is equal to `rollout` unless somebody moved it."""
        now = time.time()
        current = rollout_rows.renew_lease(transaction, rollout.id, self._owner, now, now + self._lease_s)
        return None if current is None else replace(current, lease_until=rollout.lease_until)

    def _board_step(
        self, plan: RolloutPlan, actions: Actions, board: TargetRow, devices: Mapping[int, Device], now: float
    ) -> BoardStep | None:
        """Return the step of one board; None if its window has closed meanwhile. An error concerns this board alone."""
        settings = self._settings.get((plan.rollout.fleet, board.name))
        is_undo = plan.next == "undo"
        try:
            if is_undo:
                return actions.undo(board, devices[board.device], settings)
            until = open_until(plan.rollout.spec.parsed_windows, now, board.zone)
            return None if until is None else actions.do(board, devices[board.device], settings, until)
        except CommandError as error:
            state = TargetState.KEPT if is_undo else TargetState.FAILED
            return BoardStep(TargetChange(board.device, state, str(error)[:300]))

    def _send(self, rollout: Rollout, new: Sequence[CommandRow]) -> None:
        """Send commands that are recorded by now."""
        self._open[rollout.id].update({each.id: each for each in new})
        self._sender.put(rollout.fleet, new)


def judge_wave(
    spec: RolloutSpec, wave: Sequence[TargetRow], devices: Mapping[int, Device], now: float
) -> list[GateResult] | None:
    """Judge the boards of a whole wave; None if it is too early.

    It is too early while a gate needs telemetry that some boards have not sent since they settled. They have five
    minutes more than the soak for it. now: Unix time in s.
    """
    standings = [_standing(spec, each, devices[each.device], now) for each in wave]
    settled = max((each.settled or 0.0 for each in wave), default=0.0)
    waits = any(each.reached and not each.failure and each.after is None for each in standings)
    if waits and now < settled + spec.soak_s + _PATIENCE_S and not all(gate.is_on_wave for gate in spec.parsed_gates):
        return None
    return judge(spec.parsed_gates, standings)


def _standing(spec: RolloutSpec, target: TargetRow, device: Device, now: float) -> Standing:
    known = facts(device, now, spec.silent_s)
    has_reported = (
        device.telemetry_at is not None and target.settled is not None and device.telemetry_at > target.settled
    )
    reached = target.state is not TargetState.UNREACHED and not device.is_newer
    failure = target.reason or "failed" if target.state is TargetState.FAILED else ""
    if target.state is TargetState.DONE and reached:
        failure = _relapse(spec, target, device, known)
    return Standing(target.name, failure, reached, target.baseline, known if has_reported else None)


def _relapse(spec: RolloutSpec, target: TargetRow, device: Device, known: Mapping[str, Fact]) -> str:
    """Return why a board that succeeded counts as failed by now; empty if it does not.

    A board that has built yet another engine since, as after an alarm, does not count as failed.
    """
    if known["state"] in ("silent", "offline"):
        return f"{known['state']} since"
    if known["state"] == "degraded" and target.baseline.get("state") != "degraded":
        return "degraded since"
    if spec.is_job and target.artefact != target.baseline.get("engine") == device.engine:
        return f"back at {device.engine}, which it had before"
    return ""
