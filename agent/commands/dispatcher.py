"""From commands to results: each command is carried out once, however often its sender repeats it."""

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
from agent.contract.commands import OPS, READS, CommandResult, Failure
from agent.mqtt.message import Reply
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

INTERRUPTED = "command.interrupted"

Publish = Callable[[CommandResult], None]


@dataclass(frozen=True)
class Authorisation:
    """Under which version something was said, and by whose key; empty where it was not signed."""

    version: int = 1
    key: str = ""


class CommandProgress:
    """One command's voice: a job calls it as it advances, until it has succeeded or failed.

    Not thread-safe: it belongs to the thread of its desk. After the end it is silent, so that a late
    progress line does not un-end the job for its sender.
    """

    def __init__(self, command_id: str, publish: Publish, mandate: Authorisation | None = None) -> None:
        self.latest = CommandResult(id=command_id, status="ACCEPTED")
        self.mandate = mandate or Authorisation()
        self._publish = publish
        publish(self.latest)

    @classmethod
    def ended(cls, result: CommandResult, publish: Publish) -> CommandProgress:
        """Of a command that came to its end in another process; nothing is published."""
        report = cls(result.id, lambda _: None)
        report.latest, report._publish = result, publish
        return report

    def progress(self, step: str, percent: float | None = None, result: dict[str, JsonValue] | None = None) -> None:
        """The job is at `step`; `percent` of the whole, 0 to 100; result: what its sender has to know of it already."""
        self._say(CommandResult(id=self.latest.id, status="IN_PROGRESS", step=step, percent=percent, result=result))

    def succeed(self, result: dict[str, JsonValue] | None = None) -> None:
        self._say(CommandResult(id=self.latest.id, status="SUCCEEDED", result=result))

    def fail(self, error: TaredError) -> None:
        self._say(CommandResult(id=self.latest.id, status="FAILED", error=failure(error)))

    def _say(self, result: CommandResult) -> None:
        if not self.latest.final:
            self.latest = result
            self._publish(result)


# Carries out one op. A long job returns at once and reports later; a TaredError raised here is a FAILED.
Handler = Callable[[Any, CommandProgress], None]


class CommandDispatcher:
    """Hands each new command to the handler of its op, and answers a repeated one with its latest result.

    `handlers` has one entry for every op of OPS, called with the op's arguments and a CommandProgress. The newest
    `memory` are
    kept in memory, and in `journal` all that change something, each before it is carried out; without one only the
    memory counts. authority: whose commands count, None for everybody's. reply: takes each result of a command whose
    sender named a topic for it. One thread uses the desk, the supervisor's.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        publish: Publish,
        memory: int = 1000,
        journal: CommandLog | None = None,
        authority: Authority | None = None,
        reply: Callable[[Reply, CommandResult], None] | None = None,
    ) -> None:
        if handlers.keys() != OPS.keys():
            raise ValueError(f"handlers for {sorted(handlers)}, ops are {sorted(OPS)}")
        self._handlers = handlers
        self._publish = publish
        self._memory = memory
        self._journal = journal
        self._authority = authority
        self._reply = reply
        self._reports: OrderedDict[str, tuple[str, CommandProgress]] = (
            OrderedDict()
        )  # with the digest, where it is known
        self._replies: OrderedDict[str, Reply] = OrderedDict()

    def recall(self, known: Iterable[CommandResult], news: Iterable[CommandResult] = ()) -> None:
        """What a process that is gone left, and whoever asked is told.

        known: final results of jobs; news: of those that end only now. A command that was accepted, of which nobody
        knows an end, is at its end too. What the broker may not have is published again: its sender may still wait.
        """
        told = {result.id: result for result in news}
        ends = {result.id: result for result in known} | told
        for result in ends.values():
            self._remember("", CommandProgress.ended(result, self._send))
        if self._journal is not None:
            for command_id in self._journal.unfinished():
                self._journal.end(ends.get(command_id) or _interrupted(command_id))
            for result, reply in self._journal.undelivered():
                self._note_reply(result.id, reply)
                told[result.id] = result
        for result in told.values():
            self._send(result)

    def receive(self, payload: bytes, now: float, retained: bool = False, reply: Reply | None = None) -> None:
        """Take a command as it came off the wire; `now` is Unix time in seconds.

        A retained command would be carried out again at every reconnect, long after its sender meant it:
        it is rejected, or answered if it was carried out when it was fresh. reply: counts for a command that is
        admitted, and for the same one when it comes again; what is refused is answered on its own topic alone, for its
        sender could be anybody.
        """
        try:
            received = parse_command(payload, now, self._authority)
            if self._answer_again(received, reply):
                return
            if retained:
                remedy = "publish commands without the retain flag, and clear the retained one"
                identity = received.command.id
                raise CommandRefused("command.retained", "a retained command", "a fresh one", remedy, identity)
            report = self._accept(received, now, reply)
        except CommandRefused as refusal:
            self._refuse(refusal)
            return
        try:
            self._handlers[received.command.op](received.command.args, report)
        except TaredError as error:
            report.fail(error)

    def _accept(self, received: ReceivedCommand, now: float, reply: Reply | None) -> CommandProgress:
        """Write down that it is carried out. Raises CommandRefused as `CommandLog.accept` where it cannot."""
        command = received.command
        publish: Publish = self._send
        if self._journal is not None and command.op not in READS:
            try:
                issued = command.issued if received.key else None
                kept = reply if reply is not None and reply.fits else None
                self._journal.accept(command.id, received.digest, command.expires, now, issued, kept)
            except AgentError as error:
                raise _refused(error, command.id) from None
            publish = self._send_durably
        log.info("command=%s id=%s key=%s status=ACCEPTED", command.op, command.id, received.key or "none")
        self._replies.pop(command.id, None)  # of another command that had this id, and is forgotten
        self._note_reply(command.id, reply)
        report = CommandProgress(command.id, publish, Authorisation(command.version, received.key))
        self._remember(received.digest, report)
        return report

    def _send(self, result: CommandResult) -> None:
        self._publish(result)
        if self._reply is not None and (reply := self._replies.get(result.id)) is not None:
            self._reply(reply, result)

    def _send_durably(self, result: CommandResult) -> None:
        if self._journal is not None and result.final:
            self._journal.end(result)
        self._send(result)

    def _remember(self, digest: str, report: CommandProgress) -> None:
        self._reports[report.latest.id] = digest, report
        if len(self._reports) > self._memory:
            self._reports.popitem(last=False)

    def _note_reply(self, command_id: str, reply: Reply | None) -> None:
        if reply is not None and reply.fits:
            self._replies[command_id] = reply
            if len(self._replies) > self._memory:
                self._replies.popitem(last=False)

    def _answer_again(self, received: ReceivedCommand, reply: Reply | None) -> bool:
        """Publish the latest result of a command that is known; False if it is not.

        Raises CommandRefused: `command.log` where nobody can know.
        """
        command_id = received.command.id
        try:
            known = self._known(command_id)
        except AgentError as error:
            if received.command.op not in READS:
                raise _refused(error, command_id) from None
            return False
        if known is None:
            return False
        digest, latest = known
        if digest not in ("", received.digest):
            found, expected = "an id that another command had", "a new one for each command"
            self._tell(CommandRefused("command.reused", found, expected, "send it under a new id", command_id))
            return True
        if digest:
            self._note_reply(command_id, reply)
        self._send(latest)
        return True

    def _known(self, command_id: str) -> tuple[str, CommandResult] | None:
        """The digest and the latest result of a command. Raises AgentError (`command.log`)."""
        digest, report = self._reports.get(command_id, ("", None))
        written = self._journal.find(command_id) if self._journal is not None and not digest else None
        if report is not None:
            return (written[0] if written is not None else digest), report.latest
        return written

    def _refuse(self, refusal: CommandRefused) -> None:
        """Tell the sender, if it can be told; a command that was carried out does not expire afterwards."""
        if refusal.command_id is None:
            log.warning("command=unreadable id=none status=%s error=%r", refusal.status, str(refusal))
            return
        known = None
        if refusal.code != "command.log":
            with suppress(AgentError):
                known = self._known(refusal.command_id)
        if known is None:
            self._tell(refusal)
        else:
            self._publish(known[1])

    def _tell(self, refusal: CommandRefused) -> None:
        log.warning("command=refused id=%s status=%s error=%r", refusal.command_id, refusal.status, str(refusal))
        self._publish(CommandResult(id=refusal.command_id or "", status=refusal.status, error=failure(refusal)))


def failure(error: TaredError) -> Failure:
    """As a command's sender is told."""
    return Failure(code=error.code, message=f"{error.found}; expected {error.expected}; {error.remedy}")


def _refused(error: AgentError, command_id: str) -> CommandRefused:
    return CommandRefused(error.code, error.found, error.expected, error.remedy, command_id)


def _interrupted(command_id: str) -> CommandResult:
    found, expected = "the daemon ended while it was at it", "a daemon that runs until it is done"
    error = AgentError(INTERRUPTED, found, expected, "it may have been done or not: ask for the status first")
    return CommandResult(id=command_id, status="FAILED", error=failure(error))


CANCELLED = "recalibration.cancelled"
