"""From commands to results: each command is carried out once, however often its sender repeats it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import JsonValue

from agent.parsing import CommandRefused, parse_command
from agent.requests import OPS, CommandResult, Failure
from calibrate.errors import TaredError

log = logging.getLogger(__name__)

Publish = Callable[[CommandResult], None]


class Report:
    """One command's voice: a job calls it as it advances, until it has succeeded or failed.

    Not thread-safe: it belongs to the thread of its desk. After the end it is silent, so that a late
    progress line does not un-end the job for its sender.
    """

    def __init__(self, command_id: str, publish: Publish) -> None:
        self.latest = CommandResult(id=command_id, status="ACCEPTED")
        self._publish = publish
        publish(self.latest)

    @classmethod
    def ended(cls, result: CommandResult, publish: Publish) -> Report:
        """Of a command that came to its end in another process; nothing is published."""
        report = cls(result.id, lambda _: None)
        report.latest, report._publish = result, publish
        return report

    def progress(self, step: str, percent: float | None = None) -> None:
        """The job is at `step`; `percent` of the whole, 0 to 100."""
        self._say(CommandResult(id=self.latest.id, status="IN_PROGRESS", step=step, percent=percent))

    def succeed(self, result: dict[str, JsonValue] | None = None) -> None:
        self._say(CommandResult(id=self.latest.id, status="SUCCEEDED", result=result))

    def fail(self, error: TaredError) -> None:
        self._say(CommandResult(id=self.latest.id, status="FAILED", error=failure(error)))

    def _say(self, result: CommandResult) -> None:
        if not self.latest.final:
            self.latest = result
            self._publish(result)


# Carries out one op. A long job returns at once and reports later; a TaredError raised here is a FAILED.
Handler = Callable[[Any, Report], None]


class CommandDesk:
    """Hands each new command to the handler of its op, and answers a repeated one with its latest result.

    `handlers` has one entry for every op of OPS, called with the op's arguments and a Report. The newest
    `memory` ids are remembered. One thread uses the desk, the supervisor's.
    """

    def __init__(self, handlers: Mapping[str, Handler], publish: Publish, memory: int = 1000) -> None:
        if handlers.keys() != OPS.keys():
            raise ValueError(f"handlers for {sorted(handlers)}, ops are {sorted(OPS)}")
        self._handlers = handlers
        self._publish = publish
        self._memory = memory
        self._reports: OrderedDict[str, Report] = OrderedDict()

    def recall(self, results: Iterable[CommandResult], tell: bool = False) -> None:
        """Final results of a process that is gone: whoever repeats such a command is answered, and told of it at once
        where the results are news."""
        for result in results:
            self._remember(Report.ended(result, self._publish))
            if tell:
                self._publish(result)

    def receive(self, payload: bytes, now: float, retained: bool = False) -> None:
        """Take a command as it came off the wire; `now` is Unix time in seconds.

        A retained command would be carried out again at every reconnect, long after its sender meant it:
        it is rejected, or answered if it was carried out when it was fresh.
        """
        try:
            command = parse_command(payload, now)
            if retained and command.id not in self._reports:
                remedy = "publish commands without the retain flag, and clear the retained one"
                raise CommandRefused("command.retained", "a retained command", "a fresh one", remedy, command.id)
        except CommandRefused as refusal:
            self._refuse(refusal)
            return
        if self._answer_again(command.id):
            return
        log.info("command=%s id=%s status=ACCEPTED", command.op, command.id)
        report = Report(command.id, self._publish)
        self._remember(report)
        try:
            self._handlers[command.op](command.args, report)
        except TaredError as error:
            report.fail(error)

    def _remember(self, report: Report) -> None:
        self._reports[report.latest.id] = report
        if len(self._reports) > self._memory:
            self._reports.popitem(last=False)

    def _answer_again(self, command_id: str) -> bool:
        """Publish the latest result of a command that is known; False if it is not."""
        report = self._reports.get(command_id)
        if report is not None:
            self._publish(report.latest)
        return report is not None

    def _refuse(self, refusal: CommandRefused) -> None:
        """Tell the sender, if it can be told; a command that was carried out does not expire afterwards."""
        if refusal.command_id is None:
            log.warning("command=unreadable id=none status=%s error=%r", refusal.status, str(refusal))
        elif not self._answer_again(refusal.command_id):
            log.warning("command=refused id=%s status=%s error=%r", refusal.command_id, refusal.status, str(refusal))
            self._publish(CommandResult(id=refusal.command_id, status=refusal.status, error=failure(refusal)))


def failure(error: TaredError) -> Failure:
    """As a command's sender is told."""
    return Failure(code=error.code, message=f"{error.found}; expected {error.expected}; {error.remedy}")
