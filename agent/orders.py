"""The operator's commands: what they ask is checked, and carried out by `Operations`, in the supervisor's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from agent.commands import Handler, Report
from agent.errors import CommandError
from agent.messages import RecalibrateArgs, RollbackArgs, StatusArgs
from agent.operations import Operations
from agent.pipeline import Pipeline
from agent.service import Service
from calibrate.threshold import parse_method


class Orders:
    """`handlers` has one for every command."""

    def __init__(self, operations: Operations, service: Service, pipeline: Pipeline) -> None:
        self._operations = operations
        self._service = service
        self._pipeline = pipeline
        self.handlers: Mapping[str, Handler] = {
            "status": self._on_status,
            "recalibrate": self._on_recalibrate,
            "rollback": self._on_rollback,
        }

    def _on_status(self, _args: StatusArgs, report: Report) -> None:
        state, service = self._pipeline.observer.state(), self._service
        report.succeed(
            {
                "engine": service.serving.id,
                "degraded": service.degraded,
                "raised": service.raised,
                "frames": self._pipeline.served,
                "fidelity": asdict(state.fidelity),
                "fidelity_hour": state.fidelity_hour.as_dict(),
                "accuracy": self._pipeline.accuracy.estimate.as_dict(),
                "drift": asdict(state.drift) if state.drift else None,
                "regimes": self._operations.known_regimes,
                "view": state.view.trouble or "good",
                "observer": state.outage or "observing",
                "job": self._operations.doing or None,
            }
        )

    def _on_recalibrate(self, args: RecalibrateArgs, report: Report) -> None:
        if args.method is not None:
            parse_method(args.method)
        outage = self._pipeline.observer.state().outage
        if outage:
            found = f"nothing is observed now: {outage}"
            raise CommandError("command.observer", found, "frames to collect", "see the events, then send it again")
        if not self._operations.recalibrate(report, args.frames, args.method):
            found = f"a job at {self._operations.doing}"
            raise CommandError("command.busy", found, "no running job", "wait for it to end, then send it again")

    def _on_rollback(self, _args: RollbackArgs, report: Report) -> None:
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        previous = self._service.previous()
        if previous is None:
            raise CommandError("command.rollback", "no previous engine", "one to go back to", "recalibrate instead")
        self._operations.go_back(self._service.load(previous), report)
