"""A device's handlers without a device, and commands as they come over the wire."""

from __future__ import annotations

import json
from typing import Any

from agent.commands.dispatcher import CommandProgress
from agent.common.errors import AgentError
from agent.common.schema import Strict
from agent.contract.commands import CancelArgs, RecalibrateArgs, RollbackArgs, StatusArgs
from agent.contract.topics import Topics

TOPICS = Topics("fleet", "board")
NOW = 1_700_000_000.0


class Device:
    """Handlers as a supervisor has them: status answers at once, recalibrate when the test lets it, rollback fails."""

    def __init__(self) -> None:
        self.jobs: list[tuple[RecalibrateArgs, CommandProgress]] = []
        self.status_calls = 0
        self.done_with: list[Strict] = []

    def handlers(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "recalibrate": self.recalibrate,
            "rollback": self.rollback,
            "cancel": self.cancel,
            **dict.fromkeys(
                ("switch", "policy", "set", "log_level", "restart", "snapshot", "model", "histograms", "calibration"),
                self.done,
            ),
        }

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

    def cancel(self, _args: CancelArgs, report: CommandProgress) -> None:
        report.succeed()


def payload(**changes: Any) -> bytes:
    fields = {"id": "c1", "op": "status", "args": {}, "issued": NOW, "expires": NOW + 60, "version": 1}
    return json.dumps({**fields, **changes}).encode()
