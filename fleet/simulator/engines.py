"""Simulate a board's engines and the job that makes another, with the agent's states, events and results."""

from __future__ import annotations

import math
import random
import uuid
from asyncio import TimerHandle
from dataclasses import dataclass, field
from typing import Any, Literal

from agent.commands.dispatcher import CANCELLED, CommandProgress
from agent.common.errors import AgentError, CommandError
from agent.contract.messages import Birth
from agent.core.state import JobState
from agent.uplink.reporter import Reporter
from fleet.simulator.options import BoardOptions
from fleet.simulator.scene import SimulatedEngine, SimulatedScene

# The steps of a job: its state, its progress in percent at the start of the step, the share of its time.
_STEPS = (
    (JobState.COLLECTING, 0, 0.3),
    (JobState.CALIBRATING, 40, 0.1),
    (JobState.BUILDING, 50, 0.3),
    (JobState.VALIDATING, 90, 0.1),
    (JobState.PROBATION, 100, 0.2),
)
_SPREAD = 0.3  # standard deviation of the logarithm of a job's time


@dataclass
class SimulatedJob:
    """A job that makes `engine`.

    Args:
        seconds: The time it takes.
        fails_at: The step that it fails in; None: it succeeds.
        commands: Those that wait for its result.
        step: The present step, an index of `_STEPS`; -1 before the first.
    """

    trigger: str
    engine: SimulatedEngine
    seconds: float
    fails_at: int | None
    commands: list[CommandProgress]
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    step: int = -1
    timer: TimerHandle | None = None

    @property
    def state(self) -> JobState:
        """The state of the present step."""
        return _STEPS[max(0, self.step)][0]

    @property
    def percent(self) -> int:
        """The progress at the start of the present step."""
        return _STEPS[max(0, self.step)][1]


class Engines:
    """The serving engine, the previous one, those of other lights, and the job under way; they outlive a daemon."""

    def __init__(self, options: BoardOptions, scene: SimulatedScene, rng: random.Random) -> None:
        self._options, self._scene, self._rng = options, scene, rng
        self._reporter = Reporter(None, Birth(agent_version=""))  # publishes nothing: there is no daemon yet
        light = scene.light(options.now_s())
        self.serving = self.new(light, db=0.0)
        self.other_lights = {other: self.new(other, db=0.0) for other in ("day", "night") if other != light}
        self.previous: SimulatedEngine | None = None
        self.since_s = options.now_s()
        self.job: SimulatedJob | None = None

    def new(self, light: str, db: float, bad: bool = False) -> SimulatedEngine:
        """Return an engine with a new id."""
        return SimulatedEngine(f"{self._rng.getrandbits(64):016x}", light, db, bad)

    def attach_reporter(self, reporter: Reporter) -> None:
        """Report to a daemon that starts; the serving engine goes on serving."""
        self._reporter = reporter
        self._serve(self.serving)

    def start_job(self, trigger: str, bad: bool, command: CommandProgress | None = None) -> None:
        """Start a recalibration, or a job for a new model.

        Args:
            trigger: "alarm", "command" or "model".
            bad: The new engine will be bad.
            command: Waits for the result.

        Raises CommandError: `command.busy`  a job runs that the command cannot join.
        """
        if self.job is not None:
            if trigger == "command" and self.job.trigger == "command" and self.job.step == 0 and command is not None:
                self.job.commands.append(command)
                command.update(self.job.state.value, self.job.percent)
                return
            found = f"a job at {self.job.state.value} {self.job.percent} %"
            raise CommandError("command.busy", found, "no running job", "wait for its end, then send the command again")
        t_s = self._options.now_s()
        engine = self.new(self._scene.light(t_s), self._scene.moved_db(t_s), bad)
        seconds = self._rng.lognormvariate(math.log(self._options.simulation.job_s), _SPREAD)
        fails_at = self._rng.randrange(len(_STEPS)) if self._rng.random() < self._options.simulation.failures else None
        self.job = SimulatedJob(trigger, engine, seconds, fails_at, [command] if command is not None else [])
        self._advance(self.job)

    def power_off(self) -> None:
        """End the job without a report; at the next start the committed engine serves."""
        job = self._drop_job()
        if job is not None and job.state is JobState.PROBATION and self.previous is not None:
            self.serving = self.previous

    def end_job(self, error: AgentError) -> None:
        """End the job with an error, which its commands get; from a probation the previous engine takes over."""
        job = self._drop_job()
        if job is None:
            return
        if job.state is JobState.PROBATION:
            self._serve(self.previous or self.serving)
            detail = {"artefact": job.engine.id, "trigger": job.trigger, "reason": error.code}
            self._reporter.event("rollback", **detail, frames=100, suffered=1, missed=0, message=str(error))
        if error.code == CANCELLED:
            self._reporter.event("job", trigger=job.trigger, step=JobState.CANCELLED.value, message=error.found)
        else:
            state = JobState.ROLLED_BACK if job.state is JobState.PROBATION else JobState.FAILED
            self._reporter.error(error, trigger=job.trigger, step=state.value)
        for command in job.commands:
            command.fail(error)

    def switch(self, engine: SimulatedEngine, trigger: str, command: CommandProgress | None = None) -> None:
        """Switch to an engine that has served earlier, without a probation."""
        self.previous = self.serving
        if self.previous.light != engine.light:
            self.other_lights.pop(engine.light, None)
            self.other_lights[self.previous.light] = self.previous
        self._serve(engine)
        self._report_swap("rollback" if trigger == "rollback" else "swap", engine, trigger, 0.5)
        self._report_commit(engine, trigger)
        if command is not None:
            command.succeed({"artefact": engine.id, "fidelity": None})

    def _drop_job(self) -> SimulatedJob | None:
        job, self.job = self.job, None
        if job is not None and job.timer is not None:
            job.timer.cancel()
        return job

    def _advance(self, job: SimulatedJob) -> None:
        """Take the job to its next step, or its end."""
        if job is not self.job:
            return
        if job.step == job.fails_at and job.step >= 0:
            found, remedy = f"{job.state.value}: it was drawn to fail", "simulate with fewer failures"
            self.end_job(AgentError("simulation.failure", found, "a job that runs to its end", remedy))
            return
        job.step += 1
        if job.step == len(_STEPS):
            self.job = None
            self._report_commit(job.engine, job.trigger)
            self._reporter.event("job", trigger=job.trigger, step=JobState.COMMITTED.value)
            for command in job.commands:
                command.succeed({"artefact": job.engine.id, "fidelity": 0.99})
            return
        self._reporter.event("job", trigger=job.trigger, step=job.state.value, percent=job.percent)
        for command in job.commands:
            command.update(job.state.value, float(job.percent))
        if job.state is JobState.PROBATION:
            self.previous = self.serving
            self._serve(job.engine)
            self._report_swap("swap", job.engine, job.trigger, job.seconds)
        job.timer = self._options.loop.call_later(_STEPS[job.step][2] * job.seconds, self._advance, job)

    def _serve(self, engine: SimulatedEngine) -> None:
        self.serving, self.since_s = engine, self._options.now_s()
        self._reporter.serves(engine.id, f"cal-{engine.id}")

    def _report_swap(
        self, kind: Literal["swap", "rollback"], engine: SimulatedEngine, trigger: str, seconds: float
    ) -> None:
        detail: dict[str, Any] = {"artefact": engine.id, "trigger": trigger, "seconds": round(seconds, 2)}
        self._reporter.event(
            kind, capture_ts=self._options.now_s(), **detail, fidelity=0.99, fidelity_before=None, skipped=0
        )

    def _report_commit(self, engine: SimulatedEngine, trigger: str) -> None:
        detail: dict[str, Any] = {"artefact": engine.id, "trigger": trigger, "frames": 300, "seconds": 10.0}
        self._reporter.event("commit", **detail, late=0, fidelity_frames=6, p99_judged=True)


def cancelled(found: str) -> AgentError:
    """Return the error of a job that an operator cancels."""
    return AgentError(CANCELLED, found, "a job that runs to its end", "send the command again")
