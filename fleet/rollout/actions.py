"""Make the commands of a rollout: change a board, cancel its job, send it back to what it had."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agent.contract.commands import Command, Reported
from agent.contract.signing import Signer
from agent.contract.topics import Topics
from fleet.devices.devices import Device
from fleet.devices.facts import facts
from fleet.operator import command_from_args, encode_command, new_command
from fleet.rollout.board_rows import TargetChange, TargetRow, TargetState
from fleet.rollout.command_rows import CommandRole, CommandRow
from fleet.rollout.outcomes import MOST_ATTEMPTS, pause_s, unreadable_board
from fleet.rollout.rollout_rows import Rollout
from fleet.rollout.spec import OPS, policy_arguments

_REPORT_S = 60.0  # until a board's report of its engine has arrived here
_HELD = "held"  # key of a baseline: the values that a policy replaces


@dataclass(frozen=True)
class BoardStep:
    """The change of a board's row, and the command that it gets, if any."""

    change: TargetChange
    command: CommandRow | None = None


class Actions:
    """Make commands of one rollout at one moment. signer: the operator's key. now: Unix time in s."""

    def __init__(self, rollout: Rollout, signer: Signer | None, now: float) -> None:
        self._rollout, self._spec, self._signer, self._now = rollout, rollout.spec, signer, now

    def do(self, target: TargetRow, device: Device, settings: Reported | None, until: float) -> BoardStep:
        """Return the step that changes a board.

        The baseline is kept from the first attempt, because a second one may find the board changed already.

        Args:
            settings: The settings that the board last reported.
            until: When its window closes, Unix time in s.
        """
        if device.schema is not None and device.is_newer:
            return BoardStep(unreadable_board(target, CommandRole.DO, device.schema))
        spec, known = self._spec, facts(device, self._now, self._spec.silent_s)
        baseline: dict[str, Any] = {**known, **target.baseline}
        if spec.op == "regime" and device.engine == spec.arguments["regime"]:
            return BoardStep(
                TargetChange(target.device, TargetState.DONE, "served it already", device.engine, baseline)
            )
        if spec.op == "policy":
            if settings is None:
                reason, attempts = "has not reported its settings, to which it might have to go back", target.attempts
                if attempts >= MOST_ATTEMPTS:
                    return BoardStep(TargetChange(target.device, TargetState.FAILED, reason))
                due, waiting = self._now + pause_s(0), TargetState.WAITING
                return BoardStep(TargetChange(target.device, waiting, reason, due=due, attempts=attempts + 1))
            replaced = {key: settings.values.get(key) for key in spec.arguments}
            baseline.setdefault(_HELD, policy_arguments(replaced).values)
        version = self._version(settings) if spec.op == "policy" else 1
        valid_s = min(spec.valid_s, until - self._now)
        command = command_from_args(OPS[spec.op], spec.args, self._now, valid_s, self._to(target), version)
        change = TargetChange(target.device, TargetState.SENT, baseline=baseline, attempts=target.attempts + 1)
        return BoardStep(change, self._row(target, CommandRole.DO, command))

    def cancel(self, target: TargetRow) -> CommandRow:
        """Return a command that cancels what the board is doing for the rollout."""
        command = new_command("cancel", {}, self._now, self._spec.valid_s, self._to(target))
        return self._row(target, CommandRole.CANCEL, command)

    def undo(self, target: TargetRow, device: Device, settings: Reported | None) -> BoardStep:
        """Return the step that sends a board back. A board that was changed since by anyone else is left alone."""
        if device.schema is not None and device.is_newer:
            return BoardStep(unreadable_board(target, CommandRole.UNDO, device.schema))
        spec, to, baseline = self._spec, self._to(target), target.baseline
        if spec.op == "policy":
            requested = {key: value for key, value in spec.arguments.items() if value is not None}
            known = requested if settings is None else settings.values
            other = [key for key, value in requested.items() if known.get(key) != value]
            if other:
                return BoardStep(TargetChange(target.device, TargetState.KEPT, f"was set to another {other[0]} since"))
            version = self._version(settings)
            command = command_from_args("set", policy_arguments(baseline[_HELD]), self._now, spec.valid_s, to, version)
        elif device.engine != target.artefact:
            if self._now - (target.settled or 0.0) < _REPORT_S:
                return BoardStep(TargetChange(target.device, TargetState.DONE, due=self._now + 1.0))
            if device.engine == baseline.get("engine"):
                return BoardStep(TargetChange(target.device, TargetState.UNDONE, "was back already"))
            return BoardStep(
                TargetChange(target.device, TargetState.KEPT, f"serves {device.engine}, not what it made of this")
            )
        elif spec.op == "regime" and baseline["engine"] == target.artefact:
            return BoardStep(TargetChange(target.device, TargetState.KEPT, "served it before"))
        elif spec.op == "regime":
            command = new_command("switch", {"regime": str(baseline["engine"])}, self._now, spec.valid_s, to)
        else:
            command = new_command("rollback", {}, self._now, spec.valid_s, to)
        change = TargetChange(target.device, TargetState.UNDOING, attempts=target.attempts + 1)
        return BoardStep(change, self._row(target, CommandRole.UNDO, command))

    def _version(self, settings: Reported | None) -> int:
        """Return a version above any that the board knows, whatever this machine's clock says."""
        return max(int(self._now * 1000.0), settings.version + 1 if settings is not None else 1)

    def _to(self, target: TargetRow) -> Topics | None:
        return Topics(self._rollout.fleet, target.name) if self._signer is not None else None

    def _row(self, target: TargetRow, role: CommandRole, command: Command) -> CommandRow:
        payload = encode_command(command, self._signer).decode()
        return CommandRow(command.id, target.device, target.name, role, payload, self._now, command.expires)
