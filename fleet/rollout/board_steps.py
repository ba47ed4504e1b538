"""Decide the next state of one board: by the command that it gets, and by that command's result or its absence.

`Actions` makes the commands: change a board, cancel its job, send it back to what it had. `change_by_result` says what
a final result makes of the board. A command without a result in time gets one made here (`overdue_result`).
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from agent.common.schema import Strict
from agent.contract import commands
from agent.contract.commands import CancelArgs, CommandResult, Failure, Reported, RollbackArgs
from agent.contract.messages import NEWER_SCHEMA
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from agent.contract.wire import MessageError
from fleet.devices.devices import Device
from fleet.devices.facts import facts
from fleet.operator import command_from_args, encode_command, new_command
from fleet.rollout.rows import BoardChange, BoardRow, BoardStage, CommandRole, CommandRow, Rollout
from fleet.rollout.spec import OPS, RolloutSpec, policy_arguments
from fleet.untrusted import printable

MOST_ATTEMPTS = 8
UNFINISHED = "rollout.unfinished"
OF_OUR_KEY = ("command.unsigned", "command.signature")  # refusals that say nothing about the board

_UNREACHED, _UNREAD, _UNSENT = "rollout.unreached", "rollout.schema", "rollout.unsent"
_REPORT_S = 60.0  # until a board's report of its engine has arrived here
_HELD = "held"  # key of a baseline: the values that a policy replaces
_PAUSE_S = 5.0  # doubled with each attempt
_TEMPORARY = ("command.busy", "command.interrupted")  # refusals after which another attempt may succeed
_MOST_REASON, _MOST_ID = 300, 64  # characters
_LATE_S = 5.0  # for a result that was under way when its command expired


class Actions:
    """Make commands of one rollout at one moment. signer: the operator's key. now: Unix time in s."""

    def __init__(self, rollout: Rollout, signer: Signer | None, now: float) -> None:
        self._rollout, self._spec, self._signer, self._now = rollout, rollout.spec, signer, now

    def do(self, board: BoardRow, device: Device, settings: Reported | None, until: float) -> BoardChange:
        """Return the step that changes a board.

        The baseline is kept from the first attempt, because a second one may find the board changed already.

        Args:
            settings: The settings that the board last reported.
            until: When its window closes, Unix time in s.
        """
        if device.is_newer:
            return unreadable_board(board, CommandRole.DO, device.schema)
        spec, known = self._spec, facts(device, self._now, self._spec.silent_s)
        baseline: dict[str, Any] = {**known, **board.baseline}
        if spec.op == "regime" and device.engine == spec.arguments["regime"]:
            return BoardChange(board.device, BoardStage.DONE, "served it already", device.engine, baseline)
        if spec.op == "policy":
            if settings is None:
                reason, attempts = "has not reported its settings, to which it might have to go back", board.attempts
                if attempts >= MOST_ATTEMPTS:
                    return BoardChange(board.device, BoardStage.FAILED, reason)
                due = self._now + _pause_s(0)
                return BoardChange(board.device, BoardStage.WAITING, reason, due=due, attempts=attempts + 1)
            replaced = {key: settings.values.get(key) for key in spec.arguments}
            baseline.setdefault(_HELD, policy_arguments(replaced).values)
        valid_s = min(spec.valid_s, until - self._now)
        command = self._command(board, CommandRole.DO, OPS[spec.op], spec.args, valid_s, settings)
        attempts = board.attempts + 1
        return BoardChange(board.device, BoardStage.SENT, baseline=baseline, attempts=attempts, command=command)

    def cancel(self, board: BoardRow) -> CommandRow:
        """Return a command that cancels what the board is doing for the rollout."""
        return self._command(board, CommandRole.CANCEL, "cancel", CancelArgs(), self._spec.valid_s)

    def undo(self, board: BoardRow, device: Device, settings: Reported | None) -> BoardChange:
        """Return the step that sends a board back. A board that was changed since by anyone else is left alone."""
        if device.is_newer:
            return unreadable_board(board, CommandRole.UNDO, device.schema)
        spec, baseline, op = self._spec, board.baseline, "rollback"
        args: Strict = RollbackArgs()
        if spec.op == "policy":
            requested = {key: value for key, value in spec.arguments.items() if value is not None}
            known = requested if settings is None else settings.values
            other = [key for key, value in requested.items() if known.get(key) != value]
            if other:
                return BoardChange(board.device, BoardStage.KEPT, f"was set to another {other[0]} since")
            op, args = "set", policy_arguments(baseline[_HELD])
        elif device.engine != board.artefact:
            if self._now - (board.settled or 0.0) < _REPORT_S:
                return BoardChange(board.device, BoardStage.DONE, due=self._now + 1.0)
            if device.engine == baseline.get("engine"):
                return BoardChange(board.device, BoardStage.UNDONE, "was back already")
            return BoardChange(board.device, BoardStage.KEPT, f"serves {device.engine}, not what it made of this")
        elif spec.op == "regime":
            if baseline["engine"] == board.artefact:
                return BoardChange(board.device, BoardStage.KEPT, "served it before")
            op = "switch"
            args = new_command(op, {"regime": str(baseline["engine"])}, self._now).args
        command = self._command(board, CommandRole.UNDO, op, args, spec.valid_s, settings)
        return BoardChange(board.device, BoardStage.UNDOING, attempts=board.attempts + 1, command=command)

    def _command(
        self,
        board: BoardRow,
        role: CommandRole,
        op: str,
        args: Strict,
        valid_s: float,
        settings: Reported | None = None,
    ) -> CommandRow:
        version = 1
        if commands.OPS[op].versioned:  # above any that the board knows, whatever this machine's clock says
            version = max(int(self._now * 1000.0), settings.version + 1 if settings is not None else 1)
        to = Topics(self._rollout.fleet, board.name) if self._signer is not None else None
        command = command_from_args(op, args, self._now, valid_s, to, version)
        payload = encode_command(command, self._signer).decode()
        return CommandRow(command.id, board.device, board.name, role, payload, self._now, command.expires)


def change_by_result(
    board: BoardRow, command: CommandRow, result: CommandResult, spec: RolloutSpec, may_retry: bool, now: float
) -> BoardChange | None:
    """Return what a final result makes of a board; None if it says nothing.

    may_retry: a busy board gets another command, and one that was away for a whole window gets one in the next.
    """
    expected = {CommandRole.DO: BoardStage.SENT, CommandRole.UNDO: BoardStage.UNDOING}.get(command.role)
    if board.state is not expected:
        return None  # such as the result of a cancellation: the cancelled command has a result of its own
    if result.status == "SUCCEEDED":
        return _success(board, command, result, spec)
    code = error_code(result)
    message = f"{code}: {result.error.message}" if result.error is not None else result.status
    reason = printable(message, _MOST_REASON)
    if code == _UNSENT:
        return BoardChange(board.device, BoardStage.WAITING)
    if code == _UNREAD:
        return _unknown_outcome(board, command.role, reason)
    may_retry = may_retry and board.attempts < MOST_ATTEMPTS
    if may_retry and (code in _TEMPORARY or (command.role is CommandRole.UNDO and code in OF_OUR_KEY)):
        state = BoardStage.WAITING if command.role is CommandRole.DO else BoardStage.DONE
        return BoardChange(board.device, state, reason, due=now + _pause_s(board.attempts))
    if command.role is CommandRole.UNDO:
        return BoardChange(board.device, BoardStage.KEPT, reason)
    if result.status == "EXPIRED" and command.accepted is None:
        state = BoardStage.WAITING if may_retry and spec.windows else BoardStage.UNREACHED
        return BoardChange(board.device, state, reason, due=now + _pause_s(0))
    return BoardChange(board.device, BoardStage.FAILED, reason)


def refuse_key(
    change: BoardChange, command: CommandRow, any_accepted: bool, can_sign: bool, may_retry: bool
) -> tuple[BoardChange, bool]:
    """Return the change for a board that refuses a command for its signature, and whether the rollout has to halt.

    If no board has accepted our key, the key is wrong: the rollout halts, and the board waits. Otherwise this board
    alone knows another key.

    Args:
        any_accepted: Whether any board has accepted a command of the rollout.
        can_sign: Whether commands from now on are signed.
    """
    is_signed = "signature" in json.loads(command.payload)
    is_our_fault = not is_signed or not any_accepted
    stage = BoardStage.WAITING if is_our_fault and may_retry else BoardStage.UNREACHED
    return replace(change, state=stage), is_our_fault and (is_signed or not can_sign)


def _success(board: BoardRow, command: CommandRow, result: CommandResult, spec: RolloutSpec) -> BoardChange:
    """Return what success makes of a board. A board that went back has to have gone back to the engine that it had."""
    made = made_artefact(result)
    if command.role is CommandRole.DO:
        return BoardChange(board.device, BoardStage.DONE, artefact=made, attempts=0)
    had = board.baseline.get("engine")
    if spec.op != "policy" and None not in (made, had) and made != had:
        return BoardChange(board.device, BoardStage.KEPT, f"went back to {made}, not to {had}, which it had")
    return BoardChange(board.device, BoardStage.UNDONE)


def unreadable_board(board: BoardRow, role: CommandRole, schema: int | None) -> BoardChange:
    """Return the change for a board that speaks a newer schema now: what it did, and how well, cannot be known."""
    reason = f"{_UNREAD}: it speaks schema {schema}; expected one that is known here; update tared"
    return _unknown_outcome(board, role, reason)


def _unknown_outcome(board: BoardRow, role: CommandRole, reason: str) -> BoardChange:
    return BoardChange(board.device, BoardStage.KEPT if role is CommandRole.UNDO else BoardStage.UNREACHED, reason)


def made_artefact(result: CommandResult) -> str | None:
    """Return the engine that a command made, by its result."""
    artefact = (result.result or {}).get("artefact")
    return printable(artefact, _MOST_ID) if isinstance(artefact, str) else None


def error_code(result: CommandResult) -> str:
    """Return the code of a result's error; empty without one."""
    return result.error.code if result.error is not None else ""


def parse_result(command: str, payload: bytes) -> CommandResult:
    """Parse a result of this command; one in a newer schema becomes a failure. Raises MessageError, ValueError."""
    try:
        return CommandResult.from_json(payload)
    except MessageError as error:
        if error.code != NEWER_SCHEMA:
            raise
        return CommandResult(id=command, status="FAILED", error=Failure(code=_UNREAD, message=str(error)))


def unsent_result(command: str) -> CommandResult:
    """Return the result of a command that was recorded, never sent, and will not be."""
    return CommandResult(id=command, status="EXPIRED", error=Failure(code=_UNSENT, message="it was never sent"))


def overdue_result(command: CommandRow, now: float, deadline_s: float) -> CommandResult | None:
    """Return the result of a command that got none in time; None while there is time. now: Unix time in s."""
    if command.accepted is None and now > command.expires + _LATE_S:
        waited_s = command.expires - command.sent
        message = f"no answer in {waited_s:.0f} s; expected one; see whether the board is online"
        return CommandResult(id=command.id, status="EXPIRED", error=Failure(code=_UNREACHED, message=message))
    if command.accepted is not None and now > max(command.accepted + deadline_s, command.expires):
        message = f"no end in {deadline_s:.0f} s; expected one; look at the board, or give it a longer --deadline"
        return CommandResult(id=command.id, status="FAILED", error=Failure(code=UNFINISHED, message=message))
    return None


def _pause_s(attempts: int) -> float:
    """Return the pause before the next attempt."""
    return float(_PAUSE_S * 2 ** min(attempts, MOST_ATTEMPTS))
