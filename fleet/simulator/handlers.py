"""Handle commands on a simulated board: each op of the contract, with the agent's checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import JsonValue

from agent.commands.dispatcher import CommandProgress, Handler
from agent.commands.settings import Settings
from agent.common.errors import AgentError, CommandError
from agent.common.schema import Strict
from agent.contract.commands import CalibrationArgs, LogLevelArgs, ModelArgs, RecalibrateArgs, SetArgs, SwitchArgs
from agent.contract.messages import Accuracy
from agent.core.state import JobState
from calibrate.threshold import parse_method
from fleet.simulator.context import BoardContext
from fleet.simulator.engines import cancelled
from fleet.simulator.scene import CAMERA


class SimulatedHandlers:
    """The handlers of all ops, in `handlers`. restart: restarts the board's daemon."""

    def __init__(self, context: BoardContext, settings: Settings, restart: Callable[[], None]) -> None:
        self._context, self._engines, self._settings, self._restart = context, context.engines, settings, restart
        self.handlers: Mapping[str, Handler] = {
            "status": self._on_status,
            "recalibrate": self._on_recalibrate,
            "rollback": self._on_rollback,
            "cancel": self._on_cancel,
            "switch": self._on_switch,
            "policy": self._on_policy,
            "set": self._on_set,
            "log_level": self._on_log_level,
            "restart": self._on_restart,
            "snapshot": self._on_snapshot,
            "model": self._on_model,
            "histograms": self._on_histograms,
            "calibration": self._on_calibration,
        }

    def _on_status(self, _args: Strict, progress: CommandProgress) -> None:
        engines, t_s = self._engines, self._context.options.now_s()
        fidelity = self._context.scene.fidelity(engines.serving, engines.since_s, t_s).model_dump()
        regimes: list[JsonValue] = [each.id for each in engines.other_lights.values()]
        automatic, job = self._settings.config.recalibration.automatic, engines.job
        status: dict[str, Any] = {
            "engine": engines.serving.id,
            "degraded": False,
            "degraded_reason": None,
            "held_back": None,
            "held_back_code": None,
            "raised": False,
            "frames": round(30.0 * t_s),
            "camera": CAMERA,
            "up": True,
            "lost": None,
            "fidelity": fidelity,
            "fidelity_hour": fidelity,
            "accuracy": Accuracy(estimate=0.0, low=0.0, high=1.0, n=0).model_dump(),
            "drift": self._context.scene.drift(engines.serving, t_s),
            "regimes": len(regimes),
            "regime_artefacts": regimes,
            "view": "good",
            "observer": "observing",
            "automatic": automatic,
            "stopped_by": "" if automatic else "recalibration.automatic",
            "job": job and {"id": job.id, "trigger": job.trigger, "state": job.state.value, "percent": job.percent},
        }
        progress.succeed(status)

    def _on_recalibrate(self, args: RecalibrateArgs, progress: CommandProgress) -> None:
        if args.method is not None:
            parse_method(args.method)
        self._engines.start_job("command", self._is_bad(args.method), progress)

    def _on_model(self, args: ModelArgs, progress: CommandProgress) -> None:
        """Take the file as delivered: transfers are not simulated."""
        self._engines.start_job("model", self._is_bad(args.sha256), progress)

    def _on_histograms(self, _args: Strict, _progress: CommandProgress) -> None:
        """Refuse: these boards count nothing, so their configuration forbids it."""
        found, remedy = "privacy.histograms is false", "let the board's owner set it in config.yaml"
        raise CommandError("command.privacy", found, "permission to send histograms", remedy)

    def _on_calibration(self, args: CalibrationArgs, progress: CommandProgress) -> None:
        """Take the file as delivered, as a model's."""
        self._engines.start_job("command", self._is_bad(args.sha256), progress)

    def _on_switch(self, args: SwitchArgs, progress: CommandProgress) -> None:
        known = {each.id: each for each in self._engines.other_lights.values()}
        if args.regime == self._engines.serving.id:
            raise CommandError("command.switch", "the regime in service", "another one", "ask for the status first")
        if args.regime not in known:
            found = f"no regime '{args.regime}'"
            raise CommandError("command.switch", found, ", ".join(known), "ask for the status first")
        self._engines.switch(known[args.regime], "switch", progress)

    def _on_policy(self, _args: Strict, _progress: CommandProgress) -> None:
        """Refuse: these boards show no answers."""
        found, remedy = "a simulated board, which shows no answers", "send the policy to a board with a camera"
        raise CommandError(
            "command.policy", found, "a board that shows answers, of which a policy leaves some out", remedy
        )

    def _on_rollback(self, _args: Strict, progress: CommandProgress) -> None:
        engines = self._engines
        if engines.job is not None and engines.job.state is JobState.PROBATION:
            found, remedy = "the operator's rollback", "recalibrate from other frames"
            engines.end_job(AgentError("probation.recalled", found, "a probation that runs to its end", remedy))
            progress.succeed({"artefact": engines.serving.id})
        elif engines.previous is None:
            raise CommandError(
                "command.rollback", "no previous engine", "a previous engine to return to", "recalibrate instead"
            )
        else:
            engines.end_job(cancelled("the operator rolls back"))
            engines.switch(engines.previous, "rollback", progress)

    def _on_cancel(self, _args: Strict, progress: CommandProgress) -> None:
        if self._engines.job is None:
            raise CommandError(
                "command.nothing", "no running job", "a running job to cancel", "ask for the status first"
            )
        self._engines.end_job(cancelled("the operator cancels it"))
        progress.succeed()

    def _is_bad(self, requested: object) -> bool:
        """Return True if the engine of this request turns out bad."""
        return self._context.options.simulation.bad.includes(self._context.number, requested)

    def _on_set(self, args: SetArgs, progress: CommandProgress) -> None:
        self._context.folder.mkdir(parents=True, exist_ok=True)
        self._settings.set(args.values, progress.authorisation)
        reported = self._settings.reported()
        progress.succeed({"version": reported.version, "values": reported.values})

    def _on_log_level(self, args: LogLevelArgs, progress: CommandProgress) -> None:
        progress.succeed({"level": args.level})

    def _on_restart(self, _args: Strict, progress: CommandProgress) -> None:
        progress.succeed()
        self._restart()

    def _on_snapshot(self, _args: Strict, _progress: CommandProgress) -> None:
        found, remedy = "privacy.snapshot is false", "let the board's owner set it in config.yaml"
        raise CommandError("command.privacy", found, "permission to send a picture", remedy)
