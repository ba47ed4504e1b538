"""Handle commands on a simulated board: the ops of which it has something to do, with the agent's checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.commands.dispatcher import CarryOut, CommandProgress, Result
from agent.commands.settings import Settings
from agent.common.errors import AgentError, CommandError
from agent.contract.board_status import BoardStatus, JobStatus
from agent.contract.commands import (
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
from agent.contract.messages import Accuracy, Bounds, FidelityReport
from agent.core.state import JobState
from calibrate.threshold import parse_method
from fleet.simulator.context import BoardContext
from fleet.simulator.engines import cancelled
from fleet.simulator.scene import CAMERA


@dataclass(frozen=True)
class SimulatedHandlers:
    """The ops that simulated boards carry out; `Unsimulated` has the others.

    restart_daemon: restarts the board's daemon.
    """

    context: BoardContext
    settings: Settings
    restart_daemon: Callable[[], None]

    def status(self, _args: StatusArgs, _progress: CommandProgress) -> Result:
        engines, scene, t_s = self.context.engines, self.context.scene, self.context.options.now_s()
        fidelity = scene.fidelity(engines.serving, engines.since_s, t_s).model_dump()
        regimes = [each.id for each in engines.other_lights.values()]
        automatic, job = self.settings.config.recalibration.automatic, engines.job
        status = BoardStatus(
            engine=engines.serving.id,
            backend="simulation",
            degraded=False,
            degraded_reason=None,
            held_back=None,
            held_back_code=None,
            raised=False,
            frames=round(30.0 * t_s),
            camera=CAMERA,
            up=True,
            lost=None,
            fidelity=Bounds(**fidelity),
            fidelity_hour=FidelityReport(**fidelity),
            accuracy=Accuracy(estimate=0.0, low=0.0, high=1.0, n=0, empty=0),
            drift=scene.drift(engines.serving, t_s),
            view="good",
            regimes=len(regimes),
            regime_artefacts=regimes,
            policy=None,
            policies={},
            observer="observing",
            automatic=automatic,
            stopped_by="" if automatic else "recalibration.automatic",
            job=JobStatus(id=job.id, trigger=job.trigger, state=job.state.value, percent=job.percent) if job else None,
            preview=None,
        )
        return status.as_result()

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
        found, expected = "a simulated board, which shows no answers", "a board whose answers a policy could leave out"
        raise CommandError("command.policy", found, expected, "send the policy to a board with a camera")

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
        return self.settings.reported().model_dump(include={"version", "values"})

    def log_level(self, args: LogLevelArgs, _progress: CommandProgress) -> Result:
        return {"level": args.level}

    def restart(self, _args: RestartArgs, progress: CommandProgress) -> None:
        """The result comes first: the daemon may leave the broker at once."""
        progress.succeed()
        self.restart_daemon()

    def _is_bad(self, requested: object) -> bool:
        """Return True if the engine of this request turns out bad."""
        return self.context.options.simulation.bad.includes(self.context.number, requested)


class Unsimulated:
    """Refuses every op, as a board of an older tared does."""

    def __getattr__(self, op: str) -> CarryOut:
        def refuse(_args: Any, _progress: CommandProgress) -> Result:
            found, expected = f"op '{op}', which is not simulated", "an op that simulated boards carry out"
            raise CommandError("command.unknown_op", found, expected, "send it to a board with a camera")

        return refuse
