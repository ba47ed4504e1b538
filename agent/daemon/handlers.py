"""The operator's commands to the engines: checked, and carried out by `Operations`, in the supervisor's thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from pydantic import JsonValue

from agent.commands import Handler, Report
from agent.delivery import Deliverer
from agent.errors import CommandError
from agent.findings import ObserverState, least_faithful
from agent.operations import Operations
from agent.pipeline import Pipeline
from agent.requests import CancelArgs, RecalibrateArgs, RollbackArgs, StatusArgs, SwitchArgs
from agent.service import Service
from calibrate.threshold import parse_method


class Orders:
    """`handlers` has one for each of them."""

    def __init__(
        self, operations: Operations, service: Service, pipeline: Pipeline, delivery: Deliverer | None = None
    ) -> None:
        self._operations = operations
        self._service = service
        self._pipeline = pipeline
        self._delivery = delivery
        self.handlers: Mapping[str, Handler] = {
            "status": self._on_status,
            "recalibrate": self._on_recalibrate,
            "rollback": self._on_rollback,
            "cancel": self._on_cancel,
            "switch": self._on_switch,
        }

    def _on_status(self, _args: StatusArgs, report: Report) -> None:
        """Of several cameras, the least faithful one's state beside that of all."""
        states, service, job = self._pipeline.observer.states(), self._service, self._operations.job
        camera = least_faithful(states)
        cameras: dict[str, JsonValue] = {name: self._camera_status(name, state) for name, state in states.items()}
        report.succeed(
            {
                "engine": service.serving.id,
                "degraded": service.degraded,
                "raised": service.raised,
                "frames": self._pipeline.served,
                **self._camera_status(camera, states[camera]),
                **({"cameras": cameras} if len(cameras) > 1 else {}),
                "regimes": len(self._operations.regimes),
                "regime_artefacts": list(self._operations.regimes),
                "observer": states[camera].outage or "observing",
                "automatic": not self._operations.stopped_by,
                "stopped_by": self._operations.stopped_by,
                "job": job.as_dict() if job is not None else None,
            }
        )

    def _camera_status(self, camera: str, state: ObserverState) -> dict[str, JsonValue]:
        feed = self._pipeline.feeds[camera]
        return {
            "camera": camera,
            "up": feed.up,
            "lost": feed.lost or None,
            "fidelity": asdict(state.fidelity),
            "fidelity_hour": state.fidelity_hour.as_dict(),
            "accuracy": feed.accuracy.estimate.as_dict(),
            "drift": asdict(state.drift) if state.drift else None,
            "view": (state.view.trouble or "good") if feed.up else None,  # what nobody sees now is not known now
        }

    def _on_recalibrate(self, args: RecalibrateArgs, report: Report) -> None:
        if args.method is not None:
            parse_method(args.method)
        outage = next(iter(self._pipeline.observer.states().values())).outage
        if outage:
            found = f"nothing is observed now: {outage}"
            raise CommandError("command.observer", found, "frames to collect", "see the events, then send it again")
        if not self._operations.recalibrate(report, args):
            self._refuse_while_stuck()
            found = f"a job at {job.words}" if (job := self._operations.job) is not None else "a swap under way"
            raise CommandError("command.busy", found, "no running job", "wait for it to end, then send it again")

    def _on_rollback(self, _args: RollbackArgs, report: Report) -> None:
        if self._operations.recall(report):
            return
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        self._refuse_while_stuck()
        previous = self._service.previous()
        if previous is None:
            raise CommandError("command.rollback", "no previous engine", "one to go back to", "recalibrate instead")
        self._operations.go_back(self._service.load(previous), report)

    def _on_cancel(self, _args: CancelArgs, report: Report) -> None:
        delivery = self._delivery is not None and self._delivery.end("the operator cancels it")
        if self._operations.cancel() or delivery:
            report.succeed()
            return
        if self._operations.recall(report):
            return
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        raise CommandError("command.nothing", "no running job", "one to cancel", "ask for the status first")

    def _on_switch(self, args: SwitchArgs, report: Report) -> None:
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        self._refuse_while_stuck()
        if args.regime == self._service.serving.id:
            raise CommandError("command.switch", "this regime serves", "another one", "ask for the status first")
        if args.regime not in self._operations.regimes:
            known = ", ".join(self._operations.regimes) or "none is known yet"
            raise CommandError("command.switch", f"no regime '{args.regime}'", known, "ask for the status first")
        self._operations.switch(self._service.load(self._service.find(args.regime)), report)

    def _refuse_while_stuck(self) -> None:
        if self._pipeline.stuck:
            found = "a candidate that still hangs, with the memory that it holds"
            raise CommandError("command.busy", found, "none", "wait for its end, or restart the daemon")
