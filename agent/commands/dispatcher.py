"""Carry out each command once, however often its sender repeats it, and publish its results.

`parse_command` makes a command of the bytes of a message, or refuses it with a reason for its sender.
`CommandDispatcher.receive` admits it, answers it from memory if it is known, and else hands it to the handler of its op
together with a `CommandProgress`, through which the handler reports. Commands that change something are written to the
CommandLog before they are carried out. `bind` finds the handlers of ops.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

from pydantic import JsonValue, ValidationError

from agent.commands.authority import Authority
from agent.commands.log import MEMORY_S, CommandLog
from agent.common.errors import AgentError, CommandError
from agent.config import Config
from agent.contract.commands import OPS, Command, CommandResult, CommandStatus, Failure
from agent.contract.signing import canonical
from agent.contract.topics import check_name
from agent.contract.wire import MAX_PAYLOAD_BYTES, MessageError, describe_errors, read_object
from agent.mqtt.message import Reply
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

INTERRUPTED = "command.interrupted"
CANCELLED = "recalibration.cancelled"

Publish = Callable[[CommandResult], None]


@dataclass(frozen=True)
class Authorisation:
    """The version under which a document was sent, and the id of the key that signed it; empty for an unsigned one."""

    version: int = 1
    key: str = ""


class CommandRefused(CommandError):
    """A command that is not carried out; `command_id` is the sender's id, None if it could not be read."""

    def __init__(self, error: AgentError, command_id: str | None) -> None:
        super().__init__(error.code, error.found, error.expected, error.remedy)
        self.command_id = command_id

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


class CommandProgress:
    """Publish how one command proceeds, until it has succeeded or failed.

    Not thread-safe: it belongs to the dispatcher's thread. After the final result it is silent: a late update
    must not un-end the job for its sender.
    """

    def __init__(self, command_id: str, publish: Publish, authorisation: Authorisation | None = None) -> None:
        self.latest = CommandResult(id=command_id, status="ACCEPTED")
        self.authorisation = authorisation or Authorisation()
        self._publish = publish
        publish(self.latest)

    @classmethod
    def from_result(cls, result: CommandResult, publish: Publish) -> CommandProgress:
        """Return that of a command which ended in an earlier process; nothing is published."""
        progress = cls(result.id, lambda _: None)
        progress.latest, progress._publish = result, publish
        return progress

    def update(self, step: str, percent: float | None = None, result: dict[str, JsonValue] | None = None) -> None:
        """percent: of the whole, 0 to 100. result: what the sender has to know already."""
        self._update(CommandResult(id=self.latest.id, status="IN_PROGRESS", step=step, percent=percent, result=result))

    def succeed(self, result: dict[str, JsonValue] | None = None) -> None:
        self._update(CommandResult(id=self.latest.id, status="SUCCEEDED", result=result))

    def fail(self, error: TaredError) -> None:
        self._update(CommandResult(id=self.latest.id, status="FAILED", error=failure(error)))

    def _update(self, result: CommandResult) -> None:
        if not self.latest.final:
            self.latest = result
            self._publish(result)


Result = dict[str, JsonValue]
# Carries out one op, in the dispatcher's thread. Returns its result; or None, and reports by the CommandProgress later.
CarryOut = Callable[[Any, CommandProgress], Result | None]
Handler = Callable[[Any, CommandProgress], None]  # a TaredError raised here becomes FAILED


def bind(config: Callable[[], Config], *parts: object) -> dict[str, Handler]:
    """Return the handlers of the ops that these parts carry out, each by the method of the op's name.

    If several parts have it, the first one counts. config: returns the configuration in force. A handler raises
    CommandError (`command.privacy`) if it does not permit the op.
    """

    def bound(op: str, carry_out: CarryOut) -> Handler:
        def handle(args: Any, progress: CommandProgress) -> None:
            permission = OPS[op].permission
            if permission and not attrgetter(permission)(config()):
                found, remedy = f"{permission} is false", "let the board's owner set it in config.yaml"
                raise CommandError("command.privacy", found, "the permission of the board's owner", remedy)
            result = carry_out(args, progress)
            if result is not None:
                progress.succeed(result or None)

        return handle

    return {op: bound(op, getattr(each, op)) for each in reversed(parts) for op in OPS if hasattr(each, op)}


@dataclass
class CommandDispatcher:
    """Hand each new command to the handler of its op; answer a repeated one with its latest result.

    One thread uses it, the supervisor's.

    Args:
        handlers: One for every op of OPS, from `bind`.
        publish: Receives every result.
        memory: How many of the newest commands are remembered in memory.
        command_log: Keeps all commands that change something, each before it is carried out. None: the memory only.
        authority: Decides whose commands count; None admits everybody.
        reply: Receives each result of a command whose sender named a topic for it.
    """

    handlers: Mapping[str, Handler]
    publish: Publish
    memory: int = 1000
    command_log: CommandLog | None = None
    authority: Authority | None = None
    reply: Callable[[Reply, CommandResult], None] | None = None
    # By id, with the command's digest; the digest is empty for a command of an earlier process.
    _known: OrderedDict[str, tuple[str, CommandProgress]] = field(default_factory=OrderedDict, init=False)
    _replies: OrderedDict[str, Reply] = field(default_factory=OrderedDict, init=False)

    def __post_init__(self) -> None:
        if missing := sorted(OPS.keys() - self.handlers.keys()):
            raise ValueError(f"no handler for {', '.join(missing)}; expected a method of the op's name")

    def restore(self, known: Iterable[CommandResult], ended_now: Iterable[CommandResult] = ()) -> None:
        """End the commands that an earlier process left behind, and publish results that the broker may not have.

        An accepted command without a known result ends as `command.interrupted`.

        Args:
            known: Final results of earlier jobs.
            ended_now: Final results of jobs that end only now.
        """
        unpublished = {result.id: result for result in ended_now}
        results = {result.id: result for result in known} | unpublished
        for result in results.values():
            self._remember("", CommandProgress.from_result(result, self._send))
        if self.command_log is not None:
            for command_id in self.command_log.unfinished():
                self.command_log.end(results.get(command_id) or _interrupted(command_id))
            for result, reply in self.command_log.undelivered():
                self._remember_reply(result.id, reply)
                unpublished[result.id] = result
        for result in unpublished.values():
            self._send(result)

    def receive(self, payload: bytes, now: float, retained: bool = False, reply: Reply | None = None) -> None:
        """Handle a command as it arrived.

        Args:
            payload: The message, unchecked.
            now: Unix time in seconds.
            retained: Whether the broker had kept it. Such a command would be carried out again at every reconnect, long
                after its sender meant it. It is rejected, or answered if it was carried out when it was fresh.
            reply: Where the results of an admitted command go too, also when it is repeated. A refusal goes to the
                command's own topic alone, since its sender could be anybody.
        """
        try:
            received = parse_command(payload, now, self.authority)
            if self._answer_if_known(received, reply):
                return
            if retained:
                found, expected = "a retained command", "a command that the broker does not keep"
                remedy = "publish commands without the retain flag, and clear the retained one"
                error = CommandError("command.retained", found, expected, remedy)
                raise CommandRefused(error, received.command.id)
            progress = self._accept(received, now, reply)
        except CommandRefused as refusal:
            self._refuse(refusal)
            return
        try:
            self.handlers[received.command.op](received.command.args, progress)
        except TaredError as error:
            progress.fail(error)

    def _answer_if_known(self, received: ReceivedCommand, reply: Reply | None) -> bool:
        """Publish the latest result of a known command; False if it is not known.

        Raises CommandRefused: `state.read` if the log cannot be read.
        """
        command_id = received.command.id
        try:
            known = self._find(command_id)
        except AgentError as error:
            if OPS[received.command.op].changes:
                raise CommandRefused(error, command_id) from None
            return False
        if known is None:
            return False
        digest, latest = known
        if digest not in ("", received.digest):
            found, expected = "an id that another command has used", "a new id for each command"
            reused = CommandError("command.reused", found, expected, "send the command under a new id")
            self._publish_refusal(CommandRefused(reused, command_id))
            return True
        if digest:
            self._remember_reply(command_id, reply)
        self._send(latest)
        return True

    def _accept(self, received: ReceivedCommand, now: float, reply: Reply | None) -> CommandProgress:
        """Write down that the command is carried out. Raises CommandRefused as `CommandLog.accept` if it cannot."""
        command = received.command
        publish: Publish = self._send
        if self.command_log is not None and OPS[command.op].changes:
            try:
                issued = command.issued if received.key else None
                kept = reply if reply is not None and reply.fits else None
                self.command_log.accept(command.id, received.digest, command.expires, now, issued, kept)
            except AgentError as error:
                raise CommandRefused(error, command.id) from None
            publish = self._send_durably
        log.info("command=%s id=%s key=%s status=ACCEPTED", command.op, command.id, received.key or "none")
        self._replies.pop(command.id, None)  # a forgotten command may have had the same id
        self._remember_reply(command.id, reply)
        progress = CommandProgress(command.id, publish, Authorisation(command.version, received.key))
        self._remember(received.digest, progress)
        return progress

    def _find(self, command_id: str) -> tuple[str, CommandResult] | None:
        """Return the digest and the latest result of a command. Raises AgentError (`state.read`)."""
        digest, progress = self._known.get(command_id, ("", None))
        logged = self.command_log.find(command_id) if self.command_log is not None and not digest else None
        if progress is not None:
            return (logged[0] if logged is not None else digest), progress.latest
        return logged

    def _refuse(self, refusal: CommandRefused) -> None:
        """Publish the refusal, or the result of the command if it is known: what is done does not expire later."""
        if refusal.command_id is None:
            log.warning("command=unreadable id=none status=%s error=%r", refusal.status, str(refusal))
            return
        known = None
        if refusal.code != "state.read":
            with suppress(AgentError):
                known = self._find(refusal.command_id)
        if known is None:
            self._publish_refusal(refusal)
        else:
            self.publish(known[1])

    def _publish_refusal(self, refusal: CommandRefused) -> None:
        log.warning("command=refused id=%s status=%s error=%r", refusal.command_id, refusal.status, str(refusal))
        self.publish(CommandResult(id=refusal.command_id or "", status=refusal.status, error=failure(refusal)))

    def _send(self, result: CommandResult) -> None:
        self.publish(result)
        if self.reply is not None and (reply := self._replies.get(result.id)) is not None:
            self.reply(reply, result)

    def _send_durably(self, result: CommandResult) -> None:
        if self.command_log is not None and result.final:
            self.command_log.end(result)
        self._send(result)

    def _remember(self, digest: str, progress: CommandProgress) -> None:
        self._known[progress.latest.id] = digest, progress
        if len(self._known) > self.memory:
            self._known.popitem(last=False)

    def _remember_reply(self, command_id: str, reply: Reply | None) -> None:
        if reply is not None and reply.fits:
            self._replies[command_id] = reply
            if len(self._replies) > self.memory:
                self._replies.popitem(last=False)


def failure(error: TaredError) -> Failure:
    """Return the error as a command's sender receives it."""
    return Failure(code=error.code, message=f"{error.found}; expected {error.expected}; {error.remedy}")


def _interrupted(command_id: str) -> CommandResult:
    found = "the daemon ended while it carried out the command"
    expected = "a daemon that runs until the command has ended"
    remedy = "ask for the status first: the command may have taken effect or not"
    error = AgentError(INTERRUPTED, found, expected, remedy)
    return CommandResult(id=command_id, status="FAILED", error=failure(error))


def parse_command(payload: bytes, now: float, authority: Authority | None = None) -> ReceivedCommand:
    """Parse a message; `now` is Unix time in seconds. authority: None admits everybody.

    Raises CommandRefused, with the command's id where it can be read: `message.too_large`, `.malformed`,
    `.not_object`, `.too_deep`; `command.unsigned`, `.signature`, `.target`, `.clock`; `command.unknown_op`, `.args`,
    `.invalid`, `.expired`, `.validity`.
    """
    try:
        document = read_object(payload)
    except MessageError as error:
        raise CommandRefused(error, _salvage_id(payload)) from None
    try:
        digest = _digest(document)
        key = authority.admit(document) if authority is not None else ""
        command = _parse_fields(document)
        if authority is not None:
            authority.check_clock()
        _check_times(command, now)
    except CommandError as error:
        raise CommandRefused(error, _valid_id(document.get("id"))) from None
    return ReceivedCommand(command, key, digest)


def _digest(document: dict[str, Any]) -> str:
    try:
        return hashlib.sha256(canonical(document)).hexdigest()
    except ValueError as error:
        _refuse("invalid", str(error)[:200], "numbers that JSON holds exactly", "correct the sender")


def _parse_fields(document: dict[str, Any]) -> Command:
    op = document.get("op")
    if not isinstance(op, str) or op not in OPS:
        found, remedy = f"op {str(op)[:64]!a}", "correct op, or update the agent"
        _refuse("unknown_op", found, "one of " + ", ".join(OPS), remedy)
    try:
        args = OPS[op].args.model_validate(document.get("args", {}))
    except ValidationError as error:
        known = ", ".join(OPS[op].args.model_fields) or "none"
        _refuse("args", describe_errors(error), f"the arguments of this op: {known}", "correct args")
    try:
        return Command.model_validate({**document, "args": args})
    except ValidationError as error:
        expected = "id, op, args, issued, expires and version as the contract has them"
        _refuse("invalid", describe_errors(error), expected, "correct the sender")


def _check_times(command: Command, now: float) -> None:
    """Check that the command is valid now, and expires before the command log forgets it."""
    if now >= command.expires:
        late_s = now - command.expires
        remedy = "send the command again, or set the clocks of device and sender"
        _refuse("expired", f"expired {late_s:.1f} s ago by this clock", "a command whose expiry lies ahead", remedy)
    valid_s = command.expires - min(command.issued, now)
    if valid_s > MEMORY_S:
        expected = f"at most {MEMORY_S / 86_400.0:.0f} days, the time for which a board remembers a command"
        _refuse("validity", f"valid for {valid_s / 86_400.0:.1f} days", expected, "choose an earlier time of expiry")


def _refuse(code: str, found: str, expected: str, remedy: str) -> NoReturn:
    raise CommandError(f"command.{code}", found, expected, remedy) from None


def _valid_id(value: object) -> str | None:
    try:
        return check_name(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _salvage_id(payload: bytes) -> str | None:
    """Return the id in a command that is no readable JSON, so that its sender receives the refusal all the same."""
    match = re.search(rb'"id"\s{0,8}:\s{0,8}"([^"\\]{1,64})"', payload[:MAX_PAYLOAD_BYTES])
    return _valid_id(match[1].decode(errors="replace")) if match else None
