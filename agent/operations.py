"""What the daemon does about things: drift, candidates, and the operator's commands.

Everything in here runs in the supervisor's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.candidate import Outcome
from agent.commands import Handler, Report
from agent.config import Config
from agent.errors import AgentError, CommandError
from agent.findings import ObserverState
from agent.messages import RecalibrateArgs, RollbackArgs, StatusArgs
from agent.pipeline import Pipeline
from agent.recalibration import CANCELLED, Job, JobObserver, Post, Recalibration
from agent.reporting import Reporter
from agent.service import Service
from agent.summary import Alarm, RunSummary, Swap
from agent.verdict import Verdict
from calibrate.errors import TaredError
from calibrate.threshold import parse_method
from engines.backend import Engine
from engines.calibration import Calibration
from engines.store import Artefact


class JobReport:
    """Tells the world how a job goes and, where a command asked for it, the operator."""

    def __init__(
        self, trigger: str, reporter: Reporter, on_failure: Callable[[], None], command: Report | None
    ) -> None:
        self._trigger = trigger
        self._reporter = reporter
        self._on_failure = on_failure
        self._command = command
        self._step = ""

    def progress(self, step: str, percent: int) -> None:
        level = logging.DEBUG if step == self._step else logging.INFO
        self._step = step
        self._reporter.event("job", level, trigger=self._trigger, step=step, percent=percent)
        if self._command is not None:
            self._command.progress(step, percent)

    def succeed(self, result: dict[str, Any]) -> None:
        if self._command is not None:
            self._command.succeed(result)

    def fail(self, error: TaredError) -> None:
        if error.code == CANCELLED:
            self._reporter.event("job", trigger=self._trigger, step="CANCELLED", message=error.found)
        else:
            self._reporter.error(error, trigger=self._trigger)
            self._on_failure()
        if self._command is not None:
            self._command.fail(error)


@dataclass(frozen=True)
class _Exchange:
    """Why an engine is put in service, since when (monotonic s) that is wanted, and who hears of it."""

    trigger: str
    since_s: float
    report: JobObserver
    verdict: Verdict | None = None


class Operations:
    """Decides and acts; `summary` is what it has done. `handlers` carry out the operator's commands."""

    def __init__(self, config: Config, service: Service, pipeline: Pipeline, reporter: Reporter, post: Post) -> None:
        self._config = config
        self._service = service
        self._pipeline = pipeline
        self._reporter = reporter
        self._post = post
        self._jobs = Recalibration(config, service.model, pipeline.observer, post, self._on_candidate)
        self._drift_state = "calm"
        self._nonfinite: tuple[str, ...] = ()
        self._swapping = False  # an engine waits for its first frame
        self._quiet_until = 0.0  # monotonic time before which no job starts by itself
        self.summary = RunSummary(str(service.serving.path))
        self.handlers: Mapping[str, Handler] = {
            "status": self._on_status,
            "recalibrate": self._on_recalibrate,
            "rollback": self._on_rollback,
        }

    @property
    def building(self) -> bool:
        """Whether a candidate is being built, for which no more frames are needed."""
        return self._jobs.building

    @property
    def doing(self) -> str:
        """The running job in a word or two, for displays; empty when there is none."""
        job = self._jobs.job
        return f"{job.step} {job.percent} %" if job else ""

    def tick(self, state: ObserverState) -> None:
        """Look at the observer's evidence, start what is due, move the running job on."""
        fresh = sorted(set(state.nonfinite) - set(self._nonfinite))
        if fresh:
            self._nonfinite = state.nonfinite
            self._reporter.event(
                "error", logging.ERROR, code="observer.nonfinite", message=f"NaN or infinite values in {fresh}"
            )
        self._follow_drift(state)
        idle = self._jobs.job is None and not self._swapping and not state.outage  # nothing to collect in an outage
        if idle and time.monotonic() >= self._quiet_until:
            if self._service.degraded:
                self._start_job("first-start")
            elif self._drift_state == "alarm" and self._config.recalibration.automatic:
                self._start_job("alarm")
        self._pipeline.observer.set_pace(alert=self._jobs.collecting or self._drift_state == "warning")
        self._jobs.tick(self._service.calibrated_path)

    def stop(self, reason: str) -> None:
        """Abandon the running job."""
        self._jobs.abandon(reason)

    def _follow_drift(self, state: ObserverState) -> None:
        drift = state.drift
        if drift is None or drift.state == self._drift_state:
            return
        self._drift_state = drift.state
        onset_ts = drift.onset_ts if drift.onset_ts is not None else state.drift_since
        detail = {
            "capture_ts": state.drift_since,
            "gain_db": round(drift.gain_db, 2),
            "e_value": round(drift.e_value, 1),
        }
        if drift.state != "alarm":
            self._reporter.event("drift", state=drift.state, **detail)
            return
        self._reporter.event("alarm", logging.WARNING, onset_ts=onset_ts, **detail)
        self.summary.alarms.append(Alarm(state.drift_since, onset_ts, drift.gain_db, drift.e_value))

    def _start_job(self, trigger: str, command: Report | None = None, **wishes: Any) -> Job | None:
        on_failure = self._pause if command is None else lambda: None
        report = JobReport(trigger, self._reporter, on_failure, command)
        return self._jobs.request(trigger, report, **wishes)

    def _pause(self) -> None:
        """No job starts by itself for a while: what failed one may pass, but not at once."""
        self._quiet_until = time.monotonic() + self._config.recalibration.cooldown_s

    def _on_candidate(self, job: Job, outcome: Outcome) -> None:
        """The child has built an engine that passed: put it in service."""
        try:
            artefact = self._service.read(outcome.artefact or Path())
            engine, calibration = self._service.load(artefact)
        except TaredError as error:
            job.report.fail(error)
            return
        self._exchange(
            artefact, engine, calibration, _Exchange(job.trigger, job.started_s, job.report, outcome.verdict)
        )

    def _exchange(self, artefact: Artefact, engine: Engine, calibration: Calibration, why: _Exchange) -> None:
        """Swap engines between two frames; commit once the new one has served."""

        def live(ts: float | None) -> None:
            self._swapping = False
            if self._pipeline.error is not None:
                why.report.fail(AgentError("swap.stopped", "the frame path has failed", "frames", "see the log"))
                return
            try:
                self._service.commit(artefact, calibration)
            except TaredError as error:
                self._reporter.error(error)
            since = self._pipeline.last_ts if ts is None else ts
            amax = self._service.model.amax(calibration)
            self._pipeline.observer.findings.watch(artefact.id, calibration, amax, since)
            self._drift_state = "calm"
            self._reporter.serves(artefact.id, calibration.id)
            self._tell_swap(ts, artefact, why)

        self._swapping = True
        self._pipeline.loop.swap(artefact.id, engine, lambda ts: self._post(lambda: live(ts)))

    def _tell_swap(self, ts: float | None, artefact: Artefact, why: _Exchange) -> None:
        verdict = why.verdict
        swap = Swap(
            ts,
            artefact.id,
            why.trigger,
            round(time.monotonic() - why.since_s, 2),
            verdict.fidelity if verdict else None,
            verdict.fidelity_serving if verdict else None,
        )
        self.summary.swaps.append(swap)
        self.summary.artefact = str(artefact.path)
        detail = {"capture_ts" if key == "ts" else key: value for key, value in asdict(swap).items()}
        self._reporter.event("rollback" if why.trigger == "rollback" else "swap", **detail)
        why.report.succeed({"artefact": artefact.id, "fidelity": swap.fidelity})

    def _on_status(self, _args: StatusArgs, report: Report) -> None:
        state = self._pipeline.observer.state()
        report.succeed(
            {
                "engine": self._service.serving.id,
                "degraded": self._service.degraded,
                "frames": self._pipeline.served,
                "fidelity": asdict(state.fidelity),
                "drift": asdict(state.drift) if state.drift else None,
                "observer": state.outage or "observing",
                "job": self.doing or None,
            }
        )

    def _on_recalibrate(self, args: RecalibrateArgs, report: Report) -> None:
        if args.method is not None:
            parse_method(args.method)
        outage = self._pipeline.observer.state().outage
        if outage:
            found = f"nothing is observed now: {outage}"
            raise CommandError("command.observer", found, "frames to collect", "see the events, then send it again")
        if self._start_job("command", report, frames=args.frames, method=args.method) is None:
            raise CommandError(
                "command.busy", f"a job at {self.doing}", "no running job", "wait for it to end, then send it again"
            )
        self._pipeline.observer.findings.collect_afresh()

    def _on_rollback(self, _args: RollbackArgs, report: Report) -> None:
        if self._swapping:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        previous = self._service.previous()
        if previous is None:
            raise CommandError("command.rollback", "no previous engine", "one to go back to", "recalibrate instead")
        engine, calibration = self._service.load(previous)
        self._jobs.abandon("the operator rolls back")
        self._pause()  # what the operator took back must not return by itself at once
        self._exchange(previous, engine, calibration, _Exchange("rollback", time.monotonic(), report))
