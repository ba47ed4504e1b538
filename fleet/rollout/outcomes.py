"""What an answer to a command, or none, makes of its board."""

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

_PAUSE_S = 5.0  # doubled each time
_PASSING = ("command.busy", "command.interrupted")  # refusals after which it is worth to ask again
_OF_OUR_KEY = ("command.unsigned", "command.signature")  # refusals that say nothing of the board
_KEY_REMEDY = (
    "let a controller run with a key that it knows, 'run --sign KEY', then 'tared fleet rollout resume'; "
    "or begin another rollout without this board"
)
_MOST_REASON, _MOST_ID = 300, 64  # characters
_LATE_S = 5.0  # for an answer that was under way when its command expired


@dataclass
class AppliedResults:
    """left: the commands that are still open. lost: boards that were at it too long. halt: why nobody else is to be
    told before somebody has seen to it, empty where nothing is the matter."""

    open_commands: dict[str, CommandRow]
    timed_out: set[int] = field(default_factory=set)
    halt_reason: str = ""


def apply_results(
    transaction: Transaction,
    rollout: Rollout,
    known: Mapping[str, CommandRow],
    heard: Mapping[str, CommandResult],
    can_sign: bool,
    now: float,
) -> AppliedResults:
    """Write down what has come of open commands. can_sign: whether what is sent from now on is signed."""
    begun = {key for key, each in known.items() if each.accepted is None and key in heard and not heard[key].final}
    command_rows.mark_accepted(transaction, begun, now)
    still_open = {key: replace(each, accepted=now) if key in begun else each for key, each in known.items()}
    ends = {key: heard[key] for key in still_open if key in heard and heard[key].final}
    for key, order in still_open.items():
        if key not in ends and (none := overdue_result(order, now, rollout.spec.deadline_s)) is not None:
            ends[key] = none
    ended = AppliedResults(still_open)
    if not ends:
        return ended
    devices = sorted({still_open[key].device for key in ends})
    rows, strange = board_rows.by_device(transaction, rollout.id, devices), newer_schemas(transaction, devices)
    is_obeyed, changes = command_rows.has_any_accepted(transaction, rollout.id), []
    for key, result in ends.items():
        order = still_open.pop(key)
        may_retry = order.role is CommandRole.UNDO or rollout.state is not RolloutState.UNDOING
        change = target_change(rows[order.device], order, result, rollout.spec, may_retry, now)
        if change is not None and order.role is CommandRole.DO and _code(result) in _OF_OUR_KEY:
            is_signed = "signature" in json.loads(order.payload)
            is_ours = not is_signed or not is_obeyed
            change = _unheeded(change, is_ours and may_retry)
            if is_ours and (is_signed or not can_sign):
                ended.halt_reason = f"{order.name}: {change.reason}; {_KEY_REMEDY}"
        if change is not None and (schema := strange.get(order.device)) is not None:
            change = unreadable_board(rows[order.device], order.role, schema)
        if change is not None:
            changes.append(change)
        if order.role is CommandRole.DO and _code(result) == UNFINISHED:
            ended.timed_out.add(order.device)
    board_rows.apply_changes(transaction, rollout.id, changes, now)
    command_rows.mark_ended(transaction, ends.values(), now)
    return ended


def unreadable_board(target: TargetRow, role: CommandRole, schema: int) -> TargetChange:
    """Of a board that has come to speak a newer schema: what it has done, and whether it is any good, nobody knows."""
    return _unknown(target, role, f"{UNREAD}: it speaks schema {schema}; expected one that is known here; update tared")


def parse_result(command: str, payload: bytes) -> CommandResult:
    """A result of this command; one in a newer schema is a failure to read it. Raises MessageError, ValueError."""
    try:
        return CommandResult.from_json(payload)
    except MessageError as error:
        if error.code != NEWER_SCHEMA:
            raise
        return CommandResult(id=command, status="FAILED", error=Failure(code=UNREAD, message=str(error)))


def unsent_result(command: str) -> CommandResult:
    """Of a command that was on record, and is not to be sent any more."""
    return CommandResult(id=command, status="EXPIRED", error=Failure(code=_UNSENT, message="it was never sent"))


def overdue_result(order: CommandRow, now: float, deadline_s: float) -> CommandResult | None:
    """What is taken for the result of a command that nobody has answered in time, once it is so."""
    if order.accepted is None and now > order.expires + _LATE_S:
        waited_s = order.expires - order.sent
        return _none(order, UNREACHED, f"no answer in {waited_s:.0f} s; expected one; see whether the board is online")
    if order.accepted is not None and now > max(order.accepted + deadline_s, order.expires):
        message = f"no end in {deadline_s:.0f} s; expected one; look at the board, or give it a longer --deadline"
        return _none(order, UNFINISHED, message)
    return None


def target_change(
    target: TargetRow, order: CommandRow, result: CommandResult, spec: RolloutSpec, may_retry: bool, now: float
) -> TargetChange | None:
    """result: a final one. may_retry: a board that is busy is asked again, and one that was away for all of a window in
    the next. None: nothing is known by this."""
    awaited = {CommandRole.DO: TargetState.SENT, CommandRole.UNDO: TargetState.UNDOING}.get(order.role)
    if target.state is not awaited:
        return None  # of a command that is cancelled its own answer tells, not the cancellation's
    if result.status == "SUCCEEDED":
        return _done(target, order, result, spec)
    reason, code = _reason(result), _code(result)
    if code == _UNSENT:
        return TargetChange(target.device, TargetState.WAITING)
    if code == UNREAD:
        return _unknown(target, order.role, reason)
    may_retry = may_retry and target.attempts < MOST_ATTEMPTS
    if may_retry and (code in _PASSING or (order.role is CommandRole.UNDO and code in _OF_OUR_KEY)):
        before = TargetState.WAITING if order.role is CommandRole.DO else TargetState.DONE
        return TargetChange(target.device, before, reason, due=now + pause_s(target.attempts))
    if order.role is CommandRole.UNDO:
        return TargetChange(target.device, TargetState.KEPT, reason)
    if result.status == "EXPIRED" and order.accepted is None:
        state = TargetState.WAITING if may_retry and spec.windows else TargetState.UNREACHED
        return TargetChange(target.device, state, reason, due=now + pause_s(0))
    return TargetChange(target.device, TargetState.FAILED, reason)


def _done(target: TargetRow, order: CommandRow, result: CommandResult, spec: RolloutSpec) -> TargetChange:
    """An engine that a board has gone back to has to be the one that it had."""
    found = (result.result or {}).get("artefact")
    made = printable(found, _MOST_ID) if isinstance(found, str) else None
    if order.role is CommandRole.DO:
        return TargetChange(target.device, TargetState.DONE, artefact=made, attempts=0)
    had = target.baseline.get("engine")
    if spec.op != "policy" and None not in (made, had) and made != had:
        return TargetChange(target.device, TargetState.KEPT, f"went back to {made}, not to {had}, which it had")
    return TargetChange(target.device, TargetState.UNDONE)


def pause_s(attempts: int) -> float:
    """Until the next attempt."""
    return float(_PAUSE_S * 2 ** min(attempts, MOST_ATTEMPTS))


def _unknown(target: TargetRow, role: CommandRole, reason: str) -> TargetChange:
    return TargetChange(target.device, TargetState.KEPT if role is CommandRole.UNDO else TargetState.UNREACHED, reason)


def _unheeded(change: TargetChange, is_ours: bool) -> TargetChange:
    """Of a board that does not take our word for an order, and has done nothing. is_ours: that is to be seen to here,
    and the board told again; else it is this board alone that knows another key."""
    return replace(change, state=TargetState.WAITING if is_ours else TargetState.UNREACHED)


def _code(result: CommandResult) -> str:
    return result.error.code if result.error is not None else ""


def _reason(result: CommandResult) -> str:
    """Any board's text."""
    told = f"{result.error.code}: {result.error.message}" if result.error is not None else result.status
    return printable(told, _MOST_REASON)


def _none(order: CommandRow, code: str, message: str) -> CommandResult:
    error = Failure(code=code, message=message)
    return CommandResult(id=order.id, status="EXPIRED" if code == UNREACHED else "FAILED", error=error)
