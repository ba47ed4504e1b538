"""Carry out each command once, however often its sender repeats it, and publish its results.

`CommandDispatcher.receive` parses and admits a command, answers it from memory if it is known, and else hands it to the
handler of its op together with a `CommandProgress`, through which the handler reports. Commands that change something
are written to the CommandLog before they are carried out.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import JsonValue

from agent.commands.authority import Authority
from agent.commands.log import CommandLog
from agent.commands.parser import CommandRefused, ReceivedCommand, parse_command
from agent.common.errors import AgentError
from agent.contract.commands import OPS, READ_ONLY_OPS, CommandResult, Failure
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


# Carries out one op. A long job returns at once and reports later; a TaredError raised here becomes FAILED.
Handler = Callable[[Any, CommandProgress], None]


class CommandDispatcher:
    """Hand each new command to the handler of its op; answer a repeated one with its latest result.

    One thread uses it, the supervisor's.

    Args:
        handlers: One for every op of OPS, called with the op's arguments and a CommandProgress.
        publish: Receives every result.
        memory: How many of the newest commands are remembered in memory.
        command_log: Keeps all commands that change something, each before it is carried out. None: the memory only.
        authority: Decides whose commands count; None admits everybody.
        reply: Receives each result of a command whose sender named a topic for it.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        publish: Publish,
        memory: int = 1000,
        command_log: CommandLog | None = None,
        authority: Authority | None = None,
        reply: Callable[[Reply, CommandResult], None] | None = None,
    ) -> None:
        if handlers.keys() != OPS.keys():
            raise ValueError(f"handlers for {sorted(handlers)}, ops are {sorted(OPS)}")
        self._handlers = handlers
        self._publish = publish
        self._memory = memory
        self._log = command_log
        self._authority = authority
        self._reply = reply
        # By id, with the command's digest; the digest is empty for a command of an earlier process.
        self._known: OrderedDict[str, tuple[str, CommandProgress]] = OrderedDict()
        self._replies: OrderedDict[str, Reply] = OrderedDict()

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
        if self._log is not None:
            for command_id in self._log.unfinished():
                self._log.end(results.get(command_id) or _interrupted(command_id))
            for result, reply in self._log.undelivered():
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
            received = parse_command(payload, now, self._authority)
            if self._answer_if_known(received, reply):
                return
            if retained:
                remedy = "publish commands without the retain flag, and clear the retained one"
                command_id = received.command.id
                raise CommandRefused("command.retained", "a retained command", "a fresh one", remedy, command_id)
            progress = self._accept(received, now, reply)
        except CommandRefused as refusal:
            self._refuse(refusal)
            return
        try:
            self._handlers[received.command.op](received.command.args, progress)
        except TaredError as error:
            progress.fail(error)

    def _answer_if_known(self, received: ReceivedCommand, reply: Reply | None) -> bool:
        """Publish the latest result of a known command; False if it is not known.

        Raises CommandRefused: `command.log` if the log cannot be read.
        """
        command_id = received.command.id
        try:
            known = self._find(command_id)
        except AgentError as error:
            if received.command.op not in READ_ONLY_OPS:
                raise CommandRefused.from_error(error, command_id) from None
            return False
        if known is None:
            return False
        digest, latest = known
        if digest not in ("", received.digest):
            found, expected = "an id that another command had", "a new one for each command"
            refusal = CommandRefused("command.reused", found, expected, "send it under a new id", command_id)
            self._publish_refusal(refusal)
            return True
        if digest:
            self._remember_reply(command_id, reply)
        self._send(latest)
        return True

    def _accept(self, received: ReceivedCommand, now: float, reply: Reply | None) -> CommandProgress:
        """Write down that the command is carried out. Raises CommandRefused as `CommandLog.accept` if it cannot."""
        command = received.command
        publish: Publish = self._send
        if self._log is not None and command.op not in READ_ONLY_OPS:
            try:
                issued = command.issued if received.key else None
                kept = reply if reply is not None and reply.fits else None
                self._log.accept(command.id, received.digest, command.expires, now, issued, kept)
            except AgentError as error:
                raise CommandRefused.from_error(error, command.id) from None
            publish = self._send_durably
        log.info("command=%s id=%s key=%s status=ACCEPTED", command.op, command.id, received.key or "none")
        self._replies.pop(command.id, None)  # of a forgotten command that had the same id
        self._remember_reply(command.id, reply)
        progress = CommandProgress(command.id, publish, Authorisation(command.version, received.key))
        self._remember(received.digest, progress)
        return progress

    def _find(self, command_id: str) -> tuple[str, CommandResult] | None:
        """Return the digest and the latest result of a command. Raises AgentError (`command.log`)."""
        digest, progress = self._known.get(command_id, ("", None))
        logged = self._log.find(command_id) if self._log is not None and not digest else None
        if progress is not None:
            return (logged[0] if logged is not None else digest), progress.latest
        return logged

    def _refuse(self, refusal: CommandRefused) -> None:
        """Publish the refusal, or the result of the command if it is known: what is done does not expire later."""
        if refusal.command_id is None:
            log.warning("command=unreadable id=none status=%s error=%r", refusal.status, str(refusal))
            return
        known = None
        if refusal.code != "command.log":
            with suppress(AgentError):
                known = self._find(refusal.command_id)
        if known is None:
            self._publish_refusal(refusal)
        else:
            self._publish(known[1])

    def _publish_refusal(self, refusal: CommandRefused) -> None:
        log.warning("command=refused id=%s status=%s error=%r", refusal.command_id, refusal.status, str(refusal))
        self._publish(CommandResult(id=refusal.command_id or "", status=refusal.status, error=failure(refusal)))

    def _send(self, result: CommandResult) -> None:
        self._publish(result)
        if self._reply is not None and (reply := self._replies.get(result.id)) is not None:
            self._reply(reply, result)

    def _send_durably(self, result: CommandResult) -> None:
        if self._log is not None and result.final:
            self._log.end(result)
        self._send(result)

    def _remember(self, digest: str, progress: CommandProgress) -> None:
        self._known[progress.latest.id] = digest, progress
        if len(self._known) > self._memory:
            self._known.popitem(last=False)

    def _remember_reply(self, command_id: str, reply: Reply | None) -> None:
        if reply is not None and reply.fits:
            self._replies[command_id] = reply
            if len(self._replies) > self._memory:
                self._replies.popitem(last=False)


def failure(error: TaredError) -> Failure:
    """Return the error as a command's sender receives it."""
    return Failure(code=error.code, message=f"{error.found}; expected {error.expected}; {error.remedy}")


def _interrupted(command_id: str) -> CommandResult:
    found, expected = "the daemon ended while it was at it", "a daemon that runs until it is done"
    error = AgentError(INTERRUPTED, found, expected, "it may have been done or not: ask for the status first")
    return CommandResult(id=command_id, status="FAILED", error=failure(error))
