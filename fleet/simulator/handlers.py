"""Handle commands on a simulated board: the ops of which it has something to do, with the agent's checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pydantic import JsonValue

from agent.commands.dispatcher import CommandProgress, Handler, Result, bound
from agent.commands.settings import Settings
from agent.common.errors import AgentError, CommandError
from agent.common.schema import Strict
from agent.config import Config
from agent.contract.commands import (
    OPS,
    CalibrationArgs,
    CancelArgs,
    LogLevelArgs,
    ModelArgs,
    PolicyArgs,
    RecalibrateArgs,
    RestartArgs,
    RollbackArgs,
    SetArgs,
    StatusArgs,
    SwitchArgs,
)
from agent.contract.messages import Accuracy
from agent.jobs.job import JobState
from calibrate.threshold import parse_method
from fleet.simulator.context import BoardContext
from fleet.simulator.engines import cancelled
from fleet.simulator.scene import CAMERA


@dataclass(frozen=True)
class SimulatedHandlers:
    """The ops that simulated boards carry out, each in the method of its name; `bind` returns handlers of all ops.

    restart_daemon: restarts the board's daemon.
    """

    context: BoardContext
    settings: Settings
    restart_daemon: Callable[[], None]

    def bind(self) -> dict[str, Handler]:
        """Return the handlers. An op without a method is refused, as by a board of an older tared."""

        def config() -> Config:
            return self.settings.config

        return {op: bound(op, getattr(self, op, partial(_refuse, op)), config) for op in OPS}

    def status(self, _args: StatusArgs, _progress: CommandProgress) -> Result:
        engines, t_s = self.context.engines, self.context.options.now_s()
        fidelity = self.context.scene.fidelity(engines.serving, engines.since_s, t_s).model_dump()
        regimes: list[JsonValue] = [each.id for each in engines.other_lights.values()]
        automatic, job = self.settings.config.recalibration.automatic, engines.job
        return {
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
            "drift": self.context.scene.drift(engines.serving, t_s),
            "regimes": len(regimes),
            "regime_artefacts": regimes,
            "view": "good",
            "observer": "observing",
            "automatic": automatic,
            "stopped_by": "" if automatic else "recalibration.automatic",
            "job": job.as_dict() if job is not None else None,
        }

    def recalibrate(self, args: RecalibrateArgs, progress: CommandProgress) -> None:
        if args.method is not None:
            parse_method(args.method)
        self.context.engines.start_job("command", self._is_bad(args.method), progress)

    def model(self, args: ModelArgs, progress: CommandProgress) -> None:
        """Take the file as delivered: transfers are not simulated."""
        self.context.engines.start_job("model", self._is_bad(args.sha256), progress)

    def calibration(self, args: CalibrationArgs, progress: CommandProgress) -> None:
        """Take the file as delivered, as a model's."""
        self.context.engines.start_job("command", self._is_bad(args.sha256), progress)

    def switch(self, args: SwitchArgs, progress: CommandProgress) -> None:
        known = {each.id: each for each in self.context.engines.other_lights.values()}
        args.check(self.context.engines.serving.id, known)
        self.context.engines.switch(known[args.regime], "switch", progress)

    def policy(self, _args: PolicyArgs, _progress: CommandProgress) -> None:
        """Refuse: these boards show no answers."""
        found, remedy = "a simulated board, which shows no answers", "send the policy to a board with a camera"
        raise CommandError(
            "command.policy", found, "a board that shows answers, of which a policy leaves some out", remedy
        )

    def rollback(self, _args: RollbackArgs, progress: CommandProgress) -> Result | None:
        engines = self.context.engines
        if engines.job is not None and engines.job.state is JobState.PROBATION:
            found, remedy = "the operator's rollback", "recalibrate from other frames"
            engines.end_job(AgentError("probation.recalled", found, "a probation that runs to its end", remedy))
            return {"artefact": engines.serving.id}
        if engines.previous is None:
            expected = "a previous engine to return to"
            raise CommandError("command.rollback", "no previous engine", expected, "recalibrate instead")
        engines.end_job(cancelled("the operator rolls back"))
        engines.switch(engines.previous, "rollback", progress)
        return None

    def cancel(self, _args: CancelArgs, _progress: CommandProgress) -> Result:
        if self.context.engines.job is None:
            expected = "a running job to cancel"
            raise CommandError("command.nothing", "no running job", expected, "ask for the status first")
        self.context.engines.end_job(cancelled("the operator cancels it"))
        return {}

    def set(self, args: SetArgs, progress: CommandProgress) -> Result:
        self.context.folder.mkdir(parents=True, exist_ok=True)
        self.settings.set(args.values, progress.authorisation)
        reported = self.settings.reported()
        return {"version": reported.version, "values": reported.values}

    def log_level(self, args: LogLevelArgs, _progress: CommandProgress) -> Result:
        return {"level": args.level}

    def restart(self, _args: RestartArgs, progress: CommandProgress) -> None:
        """The result comes first: the daemon may leave the broker at once."""
        progress.succeed()
        self.restart_daemon()

    def _is_bad(self, requested: object) -> bool:
        """Return True if the engine of this request turns out bad."""
        return self.context.options.simulation.bad.includes(self.context.number, requested)


def _refuse(op: str, _args: Strict, _progress: CommandProgress) -> None:
    found, expected = f"op '{op}', which is not simulated", "an op that simulated boards carry out"
    raise CommandError("command.unknown_op", found, expected, "send it to a board with a camera")
