"""Take one step of a rollout: apply the results that came, plan, send commands, and judge waves.

A step is one write transaction that renews the lease. It stores results, and decides by what is stored where the
rollout goes next: the next boards, a soak, a verdict, back, or the end. Each move of a rollout is recorded. What needs
much reading, such as the facts of a wave's boards, is read before another transaction, which gives up if the rollout
was moved meanwhile. Commands are recorded in a transaction, and sent after it: after a crash the next controller sends
what is recorded, under the same ids.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, CommandError
from agent.contract.commands import CommandResult, Reported
from agent.contract.signing import Signer
from fleet.devices.devices import Device, Devices, newer_schemas
from fleet.devices.facts import Fact, facts
from fleet.devices.records import audit, result_documents
from fleet.rollout import board_steps, rows
from fleet.rollout.board_steps import Actions, error_code
from fleet.rollout.gates import GateResult, Standing, judge
from fleet.rollout.rows import BoardChange, BoardRow, BoardStage, CommandRole, CommandRow, Rollout, RolloutState
from fleet.rollout.sender import CommandSender
from fleet.rollout.spec import RolloutSpec, open_until
from fleet.store.transaction import FleetStore, Transaction

log = logging.getLogger(__package__)

GATE_FAILED = "gate failed"  # as it is recorded

_AT_ONCE = 200  # boards of a step
_JUDGE_EVERY_S, _JUDGED_PER_S = 2.0, 500  # a wave that cannot be judged yet is judged again; large ones less often
_COLLECTED_EVERY_S = 10.0  # between two searches for results that only a collector has received
_PATIENCE_S = 300.0  # with late telemetry: its period, a board's outbox, a broker that was away
_KEY_REMEDY = (
    "run a controller with a key that the board knows ('run --sign KEY'), then 'tared fleet rollout resume'; "
    "or create another rollout without this board"
)

CommandsById = Mapping[str, CommandRow]  # by their ids
ResultsById = Mapping[str, CommandResult]  # by the ids of their commands
ReportedSettings = Mapping[tuple[str, str], Reported]  # the newest of each board, by fleet and device


@dataclass(frozen=True)
class _Plan:
    """The present state of a rollout, and the next step for `boards`. new_commands: recorded, and to be sent."""

    rollout: Rollout
    new_commands: Sequence[CommandRow] = ()
    next: Literal["", "do", "judge", "undo"] = ""
    boards: Sequence[BoardRow] = ()


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
        clock: Clock = SYSTEM_CLOCK,
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
        self._who, self._signer, self._settings, self._clock = who, signer, settings, clock
        self._devices = Devices(store)
        self._open: dict[str, dict[str, CommandRow]] = {}  # by rollout and command
        self._unsent: dict[str, set[str]] = {}  # by rollout, commands that were never sent and will not be
        self._collected_s: dict[str, float] = {}  # by rollout, when collected results were last searched

    def step(self, identity: str, results: ResultsById) -> tuple[Rollout | None, bool]:
        """Take one step.

        Return the rollout after it, None if the lease is lost; and whether more is to be done at once.

        results: the newest results, by command; those of other rollouts are ignored. Raises AgentError as the store
        does; the same results must then be given again.
        """
        try:
            unsent = {key: board_steps.unsent_result(key) for key in self._unsent.pop(identity, ())}
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

    def _step(self, identity: str, results: ResultsById) -> tuple[Rollout | None, bool]:
        now = self._clock.wall_s()
        with self._store.transaction("write") as transaction:
            rollout = self._renew_lease(transaction, identity)
            if rollout is None:
                self.forget(identity)
                return None, False
            if identity not in self._open:  # an earlier controller may have recorded some
                self._open[identity] = rows.open_commands(transaction, identity)
                self._sender.put(rollout.fleet, self._open[identity].values(), may_be_out=True)
            known = self._open[identity]
            open_now, timed_out, halt_reason = self._apply_results(transaction, rollout, known, results, now)
            new = self._cancel(transaction, rollout, timed_out, now)
            if halt_reason and rollout.state is RolloutState.RUNNING:  # until an operator resumes it
                paused = replace(rollout, state=RolloutState.PAUSED)
                rollout = self._move(transaction, paused, "halted", halt_reason)
            plan = self._plan(transaction, rollout, self._working(rollout, open_now), now)
        self._sender.drop(known.keys() - open_now.keys())
        self._open[identity] = open_now
        if plan.rollout.state is RolloutState.UNDOING:
            pending = [key for key, each in open_now.items() if each.role is CommandRole.DO and each.accepted is None]
            self._unsent[identity] = self._sender.withhold(pending)
        self._send(plan.rollout, [*new, *plan.new_commands])
        if plan.next == "judge":
            return self._judge(plan.rollout), False
        return (self._act(plan), True) if plan.boards else (plan.rollout, plan.rollout != rollout)

    def _renew_lease(self, transaction: Transaction, identity: str) -> Rollout | None:
        """Renew the lease, and return the rollout as it is now; None if the lease is lost."""
        now = self._clock.wall_s()
        return rows.renew_lease(transaction, identity, self._owner, now, now + self._lease_s)

    def _working(self, rollout: Rollout, commands: CommandsById) -> set[int]:
        """Return the boards that carry out a command, as far as is known.

        A board that is away does not. While the rollout is undone, only boards that have said so do.
        """
        is_undone = rollout.state is RolloutState.UNDOING
        return {
            each.device
            for each in commands.values()
            if each.role is CommandRole.DO
            and (each.accepted is not None or not (is_undone or self._sender.is_away(rollout.fleet, each.name)))
        }

    def _collected(self, identity: str) -> dict[str, CommandResult]:
        """Return results that a collector has stored, now and then: they may have reached nobody else."""
        if self._clock.monotonic_s() - self._collected_s.get(identity, -math.inf) < _COLLECTED_EVERY_S:
            return {}
        self._collected_s[identity] = self._clock.monotonic_s()
        keys = [(each.device, each.id) for each in self._open.get(identity, {}).values()]
        results = [CommandResult.from_json(each.encode()) for each in result_documents(self._store, keys)]
        return {result.id: result for result in results if result.status in ("SUCCEEDED", "FAILED")}

    def _apply_results(
        self, transaction: Transaction, rollout: Rollout, known: CommandsById, results: ResultsById, now: float
    ) -> tuple[dict[str, CommandRow], set[int], str]:
        """Store the results of open commands, and what they make of boards.

        Return the commands that are still open, by id; the boards whose deadline has passed; and why no other board may
        get a command before an operator has seen to it, "" if there is no reason.

        Args:
            results: The newest results, by command.
        """
        still_open, final = self._sort_results(transaction, rollout, known, results, now)
        timed_out, halt_reason = set[int](), ""
        if not final:
            return still_open, timed_out, halt_reason
        devices = sorted({still_open[key].device for key in final})
        boards, newer = rows.boards_by_device(transaction, rollout.id, devices), newer_schemas(transaction, devices)
        any_accepted, changes = rows.has_any_accepted(transaction, rollout.id), []
        for key, result in final.items():
            command = still_open.pop(key)
            board, is_do, code = boards[command.device], command.role is CommandRole.DO, error_code(result)
            if is_do and code == board_steps.UNFINISHED:
                timed_out.add(command.device)
            may_retry = command.role is CommandRole.UNDO or rollout.state is not RolloutState.UNDOING
            change = board_steps.change_by_result(board, command, result, rollout.spec, may_retry, now)
            if change is None:
                continue
            if is_do and code in board_steps.OF_OUR_KEY:
                can_sign = self._signer is not None
                change, must_halt = board_steps.refuse_key(change, command, any_accepted, can_sign, may_retry)
                if must_halt:
                    halt_reason = f"{command.name}: {change.reason}; {_KEY_REMEDY}"
            if (schema := newer.get(command.device)) is not None:
                change = board_steps.unreadable_board(board, command.role, schema)
            changes.append(change)
        rows.change_boards(transaction, rollout.id, changes, now)
        rows.mark_ended(transaction, final.values(), now)
        return still_open, timed_out, halt_reason

    def _sort_results(
        self, transaction: Transaction, rollout: Rollout, known: CommandsById, results: ResultsById, now: float
    ) -> tuple[dict[str, CommandRow], dict[str, CommandResult]]:
        """Return the open commands, noting which are accepted now; and the final results, also for overdue commands."""
        came = {key: results[key] for key in known if key in results}
        started = {key for key, each in came.items() if known[key].accepted is None and not each.final}
        rows.mark_accepted(transaction, started, now)
        commands = {key: replace(each, accepted=now) if key in started else each for key, each in known.items()}
        final = {key: each for key, each in came.items() if each.final}
        for key, command in commands.items():
            overdue = board_steps.overdue_result(command, now, rollout.spec.deadline_s)
            if key not in final and overdue is not None:
                final[key] = overdue
        return commands, final

    def _cancel(
        self, transaction: Transaction, rollout: Rollout, boards: Collection[int], now: float
    ) -> list[CommandRow]:
        """Record a cancellation for these boards, once each, and return the new commands. Only jobs are cancelled."""
        if not rollout.spec.is_job:
            return []
        left = sorted(set(boards) - rows.devices_with_role(transaction, rollout.id, CommandRole.CANCEL))
        actions = Actions(rollout, self._signer, now)
        new = [actions.cancel(each) for each in rows.boards_by_device(transaction, rollout.id, left).values()]
        rows.record_commands(transaction, rollout.id, new)
        return new

    def _plan(self, transaction: Transaction, rollout: Rollout, working: Collection[int], now: float) -> _Plan:
        """Plan what comes next. working: boards that carry out a command, as far as is known."""
        if rollout.state is RolloutState.UNDOING:
            return self._plan_undo(transaction, rollout, working, now)
        if rollout.state is not RolloutState.RUNNING:
            return _Plan(rollout)
        spec, wave = rollout.spec, rows.board_counts(transaction, rollout.id)[rollout.wave]
        failed, unreached, total = wave[BoardStage.FAILED], wave[BoardStage.UNREACHED], sum(wave.values())
        for gate in spec.parsed_gates:
            if gate.is_out_of_reach(failed, unreached, total):
                words = f"{failed} failed and {unreached} unreached of {total} already"
                return _Plan(self._apply_verdict(transaction, rollout, [GateResult(gate.text, False, words)]))
        if not wave[BoardStage.WAITING] and not wave[BoardStage.SENT]:
            if rollout.soak_until is None:
                soaking = replace(rollout, soak_until=now + spec.soak_s)
                why = f"wave {rollout.wave + 1} of {rollout.waves}, for {spec.soak_s:.0f} s"
                return _Plan(self._move(transaction, soaking, "soaking", why))
            return _Plan(rollout, next="judge") if now >= rollout.soak_until else _Plan(rollout)
        room, zones, span = min(spec.at_once - len(working), _AT_ONCE), None, (rollout.wave, rollout.wave)
        if room <= 0:
            return _Plan(rollout)
        if spec.parsed_windows:
            waiting = rows.waiting_zones(transaction, rollout.id, span)
            zones = [zone for zone in waiting if open_until(spec.parsed_windows, now, zone) is not None]
        boards = rows.due_boards(transaction, rollout.id, span, BoardStage.WAITING, now, room, zones)
        return _Plan(rollout, next="do", boards=boards)

    def _plan_undo(self, transaction: Transaction, rollout: Rollout, working: Collection[int], now: float) -> _Plan:
        """Cancel what boards still do, and send changed boards back; finish when all of that is done."""
        new = self._cancel(transaction, rollout, working, now) if working else []
        counts = rows.board_counts(transaction, rollout.id)
        everywhere = sum(counts.values(), Counter[BoardStage]())
        done = sum(each[BoardStage.DONE] for wave, each in counts.items() if wave >= rollout.undo_from)
        if not everywhere[BoardStage.SENT] and not everywhere[BoardStage.UNDOING] and not done:
            late = [
                BoardChange(device, BoardStage.DONE, "was late", board_steps.made_artefact(result))
                for device, result in rows.late_successes(transaction, rollout.id, rollout.undo_from)
            ]  # they have succeeded after all, and go back too
            if not late:
                return _Plan(self._finish(transaction, rollout, rollout.ends_as), new)
            rows.change_boards(transaction, rollout.id, late, now)
        room = min(rollout.spec.at_once - everywhere[BoardStage.UNDOING], _AT_ONCE)
        span = rollout.undo_from, rollout.waves - 1
        boards = rows.due_boards(transaction, rollout.id, span, BoardStage.DONE, now, max(0, room))
        return _Plan(rollout, new, "undo", boards)

    def _apply_verdict(self, transaction: Transaction, rollout: Rollout, findings: Sequence[GateResult]) -> Rollout:
        """Move the rollout to the next wave, to the end, or back, as the gates say."""
        document: dict[str, object] = {"wave": rollout.wave + 1, "gates": [asdict(each) for each in findings]}
        lost = [each for each in findings if not each.passed]
        why = "; ".join(f"{each.gate}: {each.found}" for each in lost or findings)
        if lost:
            ends_as = RolloutState.ROLLED_BACK
            back = replace(rollout, state=RolloutState.UNDOING, undo_from=rollout.wave, ends_as=ends_as)
            return self._move(transaction, back, GATE_FAILED, why, **document)
        if rollout.wave + 1 == rollout.waves:
            self._move(transaction, rollout, "gate passed", why, **document)
            return self._finish(transaction, rollout, RolloutState.COMPLETED)
        after = replace(rollout, wave=rollout.wave + 1, soak_until=None)
        return self._move(transaction, after, "gate passed", why, **document)

    def _finish(self, transaction: Transaction, rollout: Rollout, state: RolloutState) -> Rollout:
        why = rows.count_words(rows.board_counts(transaction, rollout.id).values())
        return self._move(transaction, replace(rollout, state=state), state.value, why)

    def _move(self, transaction: Transaction, rollout: Rollout, what: str, why: str, **document: object) -> Rollout:
        """Store and record a move. The record names the present wave, unless `document` names another."""
        rows.save_position(transaction, rollout)
        recorded = {"wave": rollout.wave + 1, **document}
        audit(transaction, self._who, what, why, rollout.id, json.dumps(recorded))
        log.info("rollout=%s step=%r wave=%d/%d why=%r", rollout.id, what, recorded["wave"], rollout.waves, why)
        return rollout

    def _judge(self, rollout: Rollout) -> Rollout | None:
        """Judge a wave. All is read before anything is locked: a wave may have a hundred thousand boards."""
        with self._store.transaction("read") as transaction:
            boards = rows.boards_of_waves(transaction, rollout.id, rollout.wave, rollout.wave)
        devices = {each.id: each for each in self._devices.by_ids([board.device for board in boards])}
        now = self._clock.wall_s()
        verdicts = judge_wave(rollout.spec, boards, devices, now)
        with self._store.transaction("write") as transaction:
            current = self._renew_lease(transaction, rollout.id)
            if current != rollout:  # somebody has moved it
                return current
            if verdicts is not None:
                return self._apply_verdict(transaction, rollout, verdicts)
            later = replace(rollout, soak_until=now + _JUDGE_EVERY_S + len(boards) / _JUDGED_PER_S)
            rows.save_position(transaction, later)
            return later

    def _act(self, plan: _Plan) -> Rollout | None:
        """Record and send the next commands, now that the boards' facts are known."""
        devices = {each.id: each for each in self._devices.by_ids([board.device for board in plan.boards])}
        rollout, now = plan.rollout, self._clock.wall_s()
        actions = Actions(rollout, self._signer, now)
        steps = [self._board_step(plan, actions, each, devices[each.device], now) for each in plan.boards]
        changes = [each for each in steps if each is not None]
        with self._store.transaction("write") as transaction:
            current = self._renew_lease(transaction, rollout.id)
            if current != rollout:  # somebody has moved it
                return current
            rows.change_boards(transaction, rollout.id, changes, now)
            new = [each.command for each in changes if each.command is not None]
            rows.record_commands(transaction, rollout.id, new)
        self._send(rollout, new)
        return rollout

    def _board_step(
        self, plan: _Plan, actions: Actions, board: BoardRow, device: Device, now: float
    ) -> BoardChange | None:
        """Return the step of one board; None if its window has closed meanwhile. An error concerns this board alone."""
        settings = self._settings.get((plan.rollout.fleet, board.name))
        is_undo = plan.next == "undo"
        try:
            if is_undo:
                return actions.undo(board, device, settings)
            until = open_until(plan.rollout.spec.parsed_windows, now, board.zone)
            return None if until is None else actions.do(board, device, settings, until)
        except CommandError as error:
            return BoardChange(board.device, BoardStage.KEPT if is_undo else BoardStage.FAILED, str(error)[:300])

    def _send(self, rollout: Rollout, new: Sequence[CommandRow]) -> None:
        """Send commands that are recorded by now."""
        self._open[rollout.id].update({each.id: each for each in new})
        self._sender.put(rollout.fleet, new)


def judge_wave(
    spec: RolloutSpec, wave: Sequence[BoardRow], devices: Mapping[int, Device], now: float
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


def _standing(spec: RolloutSpec, board: BoardRow, device: Device, now: float) -> Standing:
    known = facts(device, now, spec.silent_s)
    has_reported = device.telemetry_at is not None and board.settled is not None and device.telemetry_at > board.settled
    reached = board.state is not BoardStage.UNREACHED and not device.is_newer
    failure = board.reason or "failed" if board.state is BoardStage.FAILED else ""
    if board.state is BoardStage.DONE and reached:
        failure = _relapse(spec, board, device, known)
    return Standing(board.name, failure, reached, board.baseline, known if has_reported else None)


def _relapse(spec: RolloutSpec, board: BoardRow, device: Device, known: Mapping[str, Fact]) -> str:
    """Return why a board that succeeded counts as failed by now; empty if it does not.

    A board that has built yet another engine since, as after an alarm, does not count as failed.
    """
    if known["state"] in ("silent", "offline"):
        return f"{known['state']} since"
    if known["state"] == "degraded" and board.baseline.get("state") != "degraded":
        return "degraded since"
    if spec.is_job and board.artefact != board.baseline.get("engine") == device.engine:
        return f"back at {device.engine}, which it had before"
    return ""
