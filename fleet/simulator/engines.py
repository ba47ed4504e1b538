"""The engines of a simulated board and the job that makes another: states, events and results as the agent's are."""

from __future__ import annotations

import math
import random
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from agent.commands.dispatcher import CANCELLED, CommandProgress
from agent.common.errors import AgentError, CommandError
from agent.contract.messages import Birth
from agent.jobs.job import JobState
from agent.uplink.reporter import Reporter
from fleet.simulator.event_loop import Loop, Timer
from fleet.simulator.options import BoardOptions
from fleet.simulator.scene import SimulatedEngine, SimulatedScene

# The steps of a job, how far it is when each begins, and what share of its time each takes.
_STEPS = (
    (JobState.COLLECTING, 0, 0.3),
    (JobState.CALIBRATING, 40, 0.1),
    (JobState.BUILDING, 50, 0.3),
    (JobState.VALIDATING, 90, 0.1),
    (JobState.PROBATION, 100, 0.2),
)
_SPREAD = 0.3  # of a job's time: the deviation of its logarithm


@dataclass
class SimulatedJob:
    """On its way to `engine`; at: the number of its step. fails_at: of the one that it fails in, if any."""

    trigger: str
    engine: SimulatedEngine
    seconds: float
    fails_at: int | None
    commands: list[CommandProgress]
    id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])
    at: int = -1
    timer: Timer | None = None

    @property
    def state(self) -> JobState:
        """Where it is."""
        return _STEPS[max(0, self.at)][0]

    @property
    def percent(self) -> int:
        """How far it is."""
        return _STEPS[max(0, self.at)][1]


class Engines:
    """What serves, what served before, those of other lights, and the job under way. They outlive a daemon."""

    def __init__(self, loop: Loop, scene: SimulatedScene, plan: BoardOptions, rng: random.Random) -> None:
        self._loop, self._scene, self._plan, self._rng = loop, scene, plan, rng
        self._reporter = Reporter(None, Birth(agent_version=""))  # nobody's: there is no daemon yet
        light = scene.light(plan.now_s())
        self.serving = self.new(light, db=0.0)
        self.other_lights = {other: self.new(other, db=0.0) for other in ("day", "night") if other != light}
        self.previous: SimulatedEngine | None = None
        self.since_s = plan.now_s()
        self.job: SimulatedJob | None = None

    def new(self, light: str, db: float, bad: bool = False) -> SimulatedEngine:
        """One that nobody has yet."""
        return SimulatedEngine(f"{self._rng.getrandbits(64):016x}", light, db, bad)

    def adopt(self, reporter: Reporter) -> None:
        """A daemon starts, and has another reporter: what serves goes on."""
        self._reporter = reporter
        self._serve(self.serving)

    def begin(self, trigger: str, bad: bool, command: CommandProgress | None = None) -> None:
        """Recalibrate, or try a new model. bad: what comes of it will be. Raises CommandError (`command.busy`)."""
        if self.job is not None:
            if trigger == "command" and self.job.trigger == "command" and self.job.at == 0 and command is not None:
                self.job.commands.append(command)
                command.progress(self.job.state.value, self.job.percent)
                return
            found = f"a job at {self.job.state.value} {self.job.percent} %"
            raise CommandError("command.busy", found, "no running job", "wait for it to end, then send it again")
        t_s = self._plan.now_s()
        engine = self.new(self._scene.light(t_s), self._scene.moved_db(t_s), bad)
        seconds = self._rng.lognormvariate(math.log(self._plan.wishes.job_s), _SPREAD)
        fails_at = self._rng.randrange(len(_STEPS)) if self._rng.random() < self._plan.wishes.failures else None
        self.job = SimulatedJob(trigger, engine, seconds, fails_at, [command] if command is not None else [])
        self._advance(self.job)

    def power_off(self) -> None:
        """Nobody hears of the job that ends with it; `current` serves at the next start."""
        job = self._drop_job()
        if job is not None and job.state is JobState.PROBATION and self.previous is not None:
            self.serving = self.previous

    def end_job(self, error: AgentError) -> None:
        """Whoever waits hears why; an engine on probation goes, the one before serves."""
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
        """To one that has served before: its first answer is enough."""
        before = self.serving
        if before.light != engine.light:
            self.other_lights.pop(engine.light, None)
            self.other_lights[before.light] = before
        self.previous = before
        self._serve(engine)
        self._tell_swap("rollback" if trigger == "rollback" else "swap", engine, trigger, 0.5)
        self._tell_commit(engine, trigger)
        if command is not None:
            command.succeed({"artefact": engine.id, "fidelity": None})

    def _drop_job(self) -> SimulatedJob | None:
        job, self.job = self.job, None
        if job is not None and job.timer is not None:
            job.timer.cancel()
        return job

    def _advance(self, job: SimulatedJob) -> None:
        """To its next step, or its end."""
        if job is not self.job:
            return
        if job.at == job.fails_at and job.at >= 0:
            found, remedy = f"{job.state.value}: it was drawn to fail", "simulate with fewer failures"
            self.end_job(AgentError("simulation.failure", found, "a job to its end", remedy))
            return
        job.at += 1
        if job.at == len(_STEPS):
            self._commit(job)
            return
        self._reporter.event("job", trigger=job.trigger, step=job.state.value, percent=job.percent)
        for command in job.commands:
            command.progress(job.state.value, float(job.percent))
        if job.state is JobState.PROBATION:
            self.previous = self.serving
            self._serve(job.engine)
            self._tell_swap("swap", job.engine, job.trigger, job.seconds)
        job.timer = self._loop.at(time.monotonic() + _STEPS[job.at][2] * job.seconds, lambda: self._advance(job))

    def _commit(self, job: SimulatedJob) -> None:
        self.job = None
        self._tell_commit(job.engine, job.trigger)
        self._reporter.event("job", trigger=job.trigger, step=JobState.COMMITTED.value)
        for command in job.commands:
            command.succeed({"artefact": job.engine.id, "fidelity": 0.99})

    def _serve(self, engine: SimulatedEngine) -> None:
        self.serving, self.since_s = engine, self._plan.now_s()
        self._reporter.serves(engine.id, f"cal-{engine.id}")

    def _tell_swap(self, kind: str, engine: SimulatedEngine, trigger: str, seconds: float) -> None:
        detail: dict[str, Any] = {"artefact": engine.id, "trigger": trigger, "seconds": round(seconds, 2)}
        self._reporter.event(
            kind, capture_ts=self._plan.now_s(), **detail, fidelity=0.99, fidelity_before=None, skipped=0
        )

    def _tell_commit(self, engine: SimulatedEngine, trigger: str) -> None:
        detail: dict[str, Any] = {"artefact": engine.id, "trigger": trigger, "frames": 300, "seconds": 10.0}
        self._reporter.event("commit", **detail, late=0, fidelity_frames=6, p99_judged=True)


def cancelled(found: str) -> AgentError:
    """Why a job goes that somebody does not want any more."""
    return AgentError(CANCELLED, found, "a job to its end", "send the command again")
