"""Decide what a command's result, or its absence, makes of the board.

`apply_results` runs in the transaction of a step: it stores results of open commands, and the new states of their
boards. A command without a result in time gets one made here (`overdue_result`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agent.contract.commands import CommandResult, Failure
from agent.contract.messages import NEWER_SCHEMA
from agent.contract.wire import MessageError
from fleet.devices.devices import newer_schemas
from fleet.rollout import board_rows, command_rows
from fleet.rollout.board_rows import TargetChange, TargetRow, TargetState
from fleet.rollout.command_rows import CommandRole, CommandRow
from fleet.rollout.rollout_rows import Rollout, RolloutState
from fleet.rollout.spec import RolloutSpec
from fleet.store.transaction import Transaction
from fleet.untrusted import printable

MOST_ATTEMPTS = 8
UNREACHED, UNFINISHED, UNREAD = "rollout.unreached", "rollout.unfinished", "rollout.schema"
_UNSENT = "rollout.unsent"

_PAUSE_S = 5.0  # doubled with each attempt
_TEMPORARY = ("command.busy", "command.interrupted")  # refusals after which another attempt may succeed
_OF_OUR_KEY = ("command.unsigned", "command.signature")  # refusals that say nothing about the board
_KEY_REMEDY = (
    "let a controller run with a key that it knows, 'run --sign KEY', then 'tared fleet rollout resume'; "
    "or begin another rollout without this board"
)
_MOST_REASON, _MOST_ID = 300, 64  # characters
_LATE_S = 5.0  # for a result that was under way when its command expired


@dataclass
class AppliedResults:
    """The effect of results on a rollout.

    open_commands: those that are still open, by id. timed_out: boards whose deadline has passed. halt_reason: why no
    other board may get a command before an operator has seen to it; empty if there is no reason.
    """

    open_commands: dict[str, CommandRow]
    timed_out: set[int] = field(default_factory=set)
    halt_reason: str = ""


def apply_results(
    transaction: Transaction,
    rollout: Rollout,
    known: Mapping[str, CommandRow],
    results: Mapping[str, CommandResult],
    can_sign: bool,
    now: float,
) -> AppliedResults:
    """Store the results of open commands, and what they make of boards.

    Args:
        known: The open commands, by id.
        results: The newest results, by command.
        can_sign: Whether commands from now on are signed.
        now: Unix time in s.
    """
    started = {
        key for key, each in known.items() if each.accepted is None and key in results and not results[key].final
    }
    command_rows.mark_accepted(transaction, started, now)
    still_open = {key: replace(each, accepted=now) if key in started else each for key, each in known.items()}
    final = {key: results[key] for key in still_open if key in results and results[key].final}
    for key, command in still_open.items():
        if key not in final and (overdue := overdue_result(command, now, rollout.spec.deadline_s)) is not None:
            final[key] = overdue
    applied = AppliedResults(still_open)
    if not final:
        return applied
    devices = sorted({still_open[key].device for key in final})
    rows, newer = board_rows.by_device(transaction, rollout.id, devices), newer_schemas(transaction, devices)
    any_accepted, changes = command_rows.has_any_accepted(transaction, rollout.id), []
    for key, result in final.items():
        command = still_open.pop(key)
        may_retry = command.role is CommandRole.UNDO or rollout.state is not RolloutState.UNDOING
        change = target_change(rows[command.device], command, result, rollout.spec, may_retry, now)
        if change is not None and command.role is CommandRole.DO and _code(result) in _OF_OUR_KEY:
            # If no board has accepted our key, the key is wrong: the rollout halts, and the board waits. Otherwise this
            # board alone knows another key.
            is_signed = "signature" in json.loads(command.payload)
            is_our_fault = not is_signed or not any_accepted
            state = TargetState.WAITING if is_our_fault and may_retry else TargetState.UNREACHED
            change = replace(change, state=state)
            if is_our_fault and (is_signed or not can_sign):
                applied.halt_reason = f"{command.name}: {change.reason}; {_KEY_REMEDY}"
        if change is not None and (schema := newer.get(command.device)) is not None:
            change = unreadable_board(rows[command.device], command.role, schema)
        if change is not None:
            changes.append(change)
        if command.role is CommandRole.DO and _code(result) == UNFINISHED:
            applied.timed_out.add(command.device)
    board_rows.apply_changes(transaction, rollout.id, changes, now)
    command_rows.mark_ended(transaction, final.values(), now)
    return applied


def target_change(
    target: TargetRow, command: CommandRow, result: CommandResult, spec: RolloutSpec, may_retry: bool, now: float
) -> TargetChange | None:
    """Return what a final result makes of a board; None if it says nothing.

    may_retry: a busy board gets another command, and one that was away for a whole window gets one in the next.
    """
    expected = {CommandRole.DO: TargetState.SENT, CommandRole.UNDO: TargetState.UNDOING}.get(command.role)
    if target.state is not expected:
        return None  # such as the result of a cancellation: the cancelled command has a result of its own
    if result.status == "SUCCEEDED":
        return _success(target, command, result, spec)
    code = _code(result)
    message = f"{code}: {result.error.message}" if result.error is not None else result.status
    reason = printable(message, _MOST_REASON)
    if code == _UNSENT:
        return TargetChange(target.device, TargetState.WAITING)
    if code == UNREAD:
        return _unknown_outcome(target, command.role, reason)
    may_retry = may_retry and target.attempts < MOST_ATTEMPTS
    if may_retry and (code in _TEMPORARY or (command.role is CommandRole.UNDO and code in _OF_OUR_KEY)):
        state = TargetState.WAITING if command.role is CommandRole.DO else TargetState.DONE
        return TargetChange(target.device, state, reason, due=now + pause_s(target.attempts))
    if command.role is CommandRole.UNDO:
        return TargetChange(target.device, TargetState.KEPT, reason)
    if result.status == "EXPIRED" and command.accepted is None:
        state = TargetState.WAITING if may_retry and spec.windows else TargetState.UNREACHED
        return TargetChange(target.device, state, reason, due=now + pause_s(0))
    return TargetChange(target.device, TargetState.FAILED, reason)


def _success(target: TargetRow, command: CommandRow, result: CommandResult, spec: RolloutSpec) -> TargetChange:
    """Return what success makes of a board. A board that went back has to have gone back to the engine that it had."""
    artefact = (result.result or {}).get("artefact")
    made = printable(artefact, _MOST_ID) if isinstance(artefact, str) else None
    if command.role is CommandRole.DO:
        return TargetChange(target.device, TargetState.DONE, artefact=made, attempts=0)
    had = target.baseline.get("engine")
    if spec.op != "policy" and None not in (made, had) and made != had:
        return TargetChange(target.device, TargetState.KEPT, f"went back to {made}, not to {had}, which it had")
    return TargetChange(target.device, TargetState.UNDONE)


def unreadable_board(target: TargetRow, role: CommandRole, schema: int) -> TargetChange:
    """Return the change for a board that speaks a newer schema now: what it did, and how well, cannot be known."""
    reason = f"{UNREAD}: it speaks schema {schema}; expected one that is known here; update tared"
    return _unknown_outcome(target, role, reason)


def _unknown_outcome(target: TargetRow, role: CommandRole, reason: str) -> TargetChange:
    return TargetChange(target.device, TargetState.KEPT if role is CommandRole.UNDO else TargetState.UNREACHED, reason)


def parse_result(command: str, payload: bytes) -> CommandResult:
    """Parse a result of this command; one in a newer schema becomes a failure. Raises MessageError, ValueError."""
    try:
        return CommandResult.from_json(payload)
    except MessageError as error:
        if error.code != NEWER_SCHEMA:
            raise
        return CommandResult(id=command, status="FAILED", error=Failure(code=UNREAD, message=str(error)))


def unsent_result(command: str) -> CommandResult:
    """Return the result of a command that was recorded, never sent, and will not be."""
    return CommandResult(id=command, status="EXPIRED", error=Failure(code=_UNSENT, message="it was never sent"))


def overdue_result(command: CommandRow, now: float, deadline_s: float) -> CommandResult | None:
    """Return the result of a command that got none in time; None while there is time. now: Unix time in s."""
    if command.accepted is None and now > command.expires + _LATE_S:
        waited_s = command.expires - command.sent
        message = f"no answer in {waited_s:.0f} s; expected one; see whether the board is online"
        return CommandResult(id=command.id, status="EXPIRED", error=Failure(code=UNREACHED, message=message))
    if command.accepted is not None and now > max(command.accepted + deadline_s, command.expires):
        message = f"no end in {deadline_s:.0f} s; expected one; look at the board, or give it a longer --deadline"
        return CommandResult(id=command.id, status="FAILED", error=Failure(code=UNFINISHED, message=message))
    return None


def pause_s(attempts: int) -> float:
    """Return the pause before the next attempt."""
    return float(_PAUSE_S * 2 ** min(attempts, MOST_ATTEMPTS))


def _code(result: CommandResult) -> str:
    return result.error.code if result.error is not None else ""
