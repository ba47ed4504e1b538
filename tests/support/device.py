"""A device's handlers without a device, and commands as they come over the wire."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from agent.commands.dispatcher import CommandProgress, bind
from agent.common.errors import AgentError
from agent.common.schema import Strict
from agent.config import Config, PrivacyConfig
from agent.contract.commands import OPS, CommandResult, RecalibrateArgs, RollbackArgs, StatusArgs
from agent.contract.topics import Topics

TOPICS = Topics("fleet", "board")
NOW = 1_700_000_000.0


class Device:
    """Handlers of all ops: recalibrate ends when the test ends it, rollback fails, the others succeed at once."""

    def __init__(self) -> None:
        self.jobs: list[tuple[RecalibrateArgs, CommandProgress]] = []
        self.status_calls = 0
        self.done_with: list[Strict] = []

    def handlers(self) -> dict[str, Any]:
        own = {op: getattr(self, op) for op in ("status", "recalibrate", "rollback")}
        return {**dict.fromkeys(OPS, self.done), **own}

    def status(self, _args: StatusArgs, report: CommandProgress) -> None:
        self.status_calls += 1
        report.succeed({"state": "online"})

    def recalibrate(self, args: RecalibrateArgs, report: CommandProgress) -> None:
        self.jobs.append((args, report))

    def rollback(self, _args: RollbackArgs, _report: CommandProgress) -> None:
        raise AgentError("store.no_previous", "no previous engine", "two engines", "recalibrate first")

    def done(self, args: Strict, report: CommandProgress) -> None:
        self.done_with.append(args)
        report.succeed()


def carry_out(part: object, op: str, args: Strict, publish: Callable[[CommandResult], None], name: str = "c1") -> None:
    """Carry out one command by the part's method of the op's name, on a board whose owner permits everything."""
    config = SimpleNamespace(privacy=PrivacyConfig(snapshot=True, histograms=True))
    bind(lambda: cast(Config, config), part)[op](args, CommandProgress(name, publish))


def payload(**changes: Any) -> bytes:
    fields = {"id": "c1", "op": "status", "args": {}, "issued": NOW, "expires": NOW + 60, "version": 1}
    return json.dumps({**fields, **changes}).encode()
