"""Parse a command from the bytes of a message, or refuse it with a reason for its sender."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from pydantic import ValidationError

from agent.commands.authority import Authority
from agent.commands.log import MEMORY_S
from agent.common.errors import AgentError, CommandError
from agent.contract.commands import OPS, Command, CommandStatus
from agent.contract.signing import canonical
from agent.contract.topics import check_name
from agent.contract.wire import MAX_PAYLOAD_BYTES, MessageError, describe_errors, read_object


class CommandRefused(CommandError):
    """A command that is not carried out; `command_id` is the sender's id, None if it could not be read."""

    def __init__(self, code: str, found: str, expected: str, remedy: str, command_id: str | None = None) -> None:
        super().__init__(code, found, expected, remedy)
        self.command_id = command_id

    @classmethod
    def from_error(cls, error: AgentError, command_id: str | None) -> CommandRefused:
        return cls(error.code, error.found, error.expected, error.remedy, command_id)

    @property
    def status(self) -> CommandStatus:
        """The status that its sender receives."""
        return "EXPIRED" if self.code == "command.expired" else "REJECTED"


@dataclass(frozen=True)
class ReceivedCommand:
    """A command as it arrived.

    key: the id of the operator's key that signed it, empty for an unsigned one. digest: of the content without the
    signature, whatever its spelling.
    """

    command: Command
    key: str
    digest: str


def parse_command(payload: bytes, now: float, authority: Authority | None = None) -> ReceivedCommand:
    """Parse a message; `now` is Unix time in seconds. authority: None admits everybody.

    Raises CommandRefused, with the command's id where it can be read: `message.too_large`, `.malformed`,
    `.not_object`, `.too_deep`; `command.unsigned`, `.signature`, `.target`, `.clock`; `command.unknown_op`, `.args`,
    `.invalid`, `.expired`, `.validity`.
    """
    try:
        document = read_object(payload)
    except MessageError as error:
        raise CommandRefused.from_error(error, _salvage_id(payload)) from None
    command_id = _valid_id(document.get("id"))
    try:
        digest = hashlib.sha256(canonical(document)).hexdigest()
    except ValueError as error:
        _refuse("invalid", str(error)[:200], "numbers that JSON holds exactly", "correct the sender", command_id)
    try:
        key = authority.admit(document) if authority is not None else ""
        command = _parse_fields(document, command_id)
        if authority is not None:
            authority.check_clock()
    except CommandRefused:
        raise
    except CommandError as error:
        raise CommandRefused.from_error(error, command_id) from None
    _check_times(command, now)
    return ReceivedCommand(command, key, digest)


def _parse_fields(document: dict[str, Any], command_id: str | None) -> Command:
    op = document.get("op")
    if not isinstance(op, str) or op not in OPS:
        found, remedy = f"op {str(op)[:64]!a}", "correct op, or update the agent"
        _refuse("unknown_op", found, "one of " + ", ".join(OPS), remedy, command_id)
    try:
        args = OPS[op].model_validate(document.get("args", {}))
    except ValidationError as error:
        known = ", ".join(OPS[op].model_fields) or "none"
        _refuse("args", describe_errors(error), f"the arguments of this op: {known}", "correct args", command_id)
    try:
        return Command.model_validate({**document, "args": args})
    except ValidationError as error:
        expected = "id, op, args, issued, expires and version as the contract has them"
        _refuse("invalid", describe_errors(error), expected, "correct the sender", command_id)


def _check_times(command: Command, now: float) -> None:
    """Check that the command is valid now, and expires before the command log forgets it."""
    if now >= command.expires:
        late_s = now - command.expires
        remedy = "send it anew, or set the clocks of device and sender"
        _refuse("expired", f"expired {late_s:.1f} s ago by this clock", "a valid command", remedy, command.id)
    valid_s = command.expires - min(command.issued, now)
    if valid_s > MEMORY_S:
        expected = f"at most {MEMORY_S / 86_400.0:.0f} days, for so long it is remembered"
        _refuse("validity", f"valid for {valid_s / 86_400.0:.1f} days", expected, "let it expire sooner", command.id)


def _refuse(code: str, found: str, expected: str, remedy: str, command_id: str | None) -> NoReturn:
    raise CommandRefused(f"command.{code}", found, expected, remedy, command_id) from None


def _valid_id(value: object) -> str | None:
    try:
        return check_name(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _salvage_id(payload: bytes) -> str | None:
    """Return the id in a command that is no readable JSON, so that its sender receives the refusal all the same."""
    match = re.search(rb'"id"\s{0,8}:\s{0,8}"([^"\\]{1,64})"', payload[:MAX_PAYLOAD_BYTES])
    return _valid_id(match[1].decode(errors="replace")) if match else None
