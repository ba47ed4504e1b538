"""What the daemon does about things: drift, candidates, and the operator's commands.

Everything in here runs in the supervisor's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent.candidate import Outcome
from agent.commands import Handler, Report
from agent.config import Config
from agent.errors import AgentError, CommandError
from agent.findings import ObserverState
from agent.job_report import JobReport
from agent.memory import Memory
from agent.messages import RecalibrateArgs, RollbackArgs, StatusArgs
from agent.news import News
from agent.pipeline import Pipeline
from agent.recalibration import DailyCap, Job, JobObserver, Post, Recalibration
from agent.regimes import RegimeBook, Regimes
from agent.reporting import Reporter
from agent.service import Service
from agent.summary import RunSummary, Swap
from agent.verdict import Verdict
from agent.view import BLIND, FROZEN
from calibrate.errors import TaredError
from calibrate.threshold import parse_method
from engines.backend import Engine
from engines.calibration import Calibration
from engines.store import Artefact


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
        book = RegimeBook(config.state_dir / "regimes.json", service.identity, config.regimes.most)

        def tell(error: AgentError) -> None:
            post(lambda: reporter.error(error))

        if pipeline.is_live:  # a recording that is played once more is news
            pipeline.observer.findings.remember(Memory(config.state_dir / "evidence.jsonl", config.camera.source, tell))
        self._regimes = Regimes(config, book, pipeline.observer.findings)
        self._jobs = Recalibration(config, service.model, pipeline.observer, post, self._on_candidate)
        self._swapping = False  # an engine waits for its first frame
        self._switch_after = 0.0  # monotonic time before which there is no switch
        self._capped = False  # and told so
        self._cap = DailyCap(config.recalibration.per_day)
        self._quiet_until = 0.0  # monotonic time before which no job starts by itself
        self.summary = RunSummary(str(service.serving.path))
        self._news = News(reporter, self.summary.alarms)
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

    def start(self) -> None:
        """Tell and watch what serves at the start."""
        if self._service.calibration is None:
            self._reporter.serves(self._service.serving.id, None)
        else:
            self._watch(self._service.serving.id, self._service.calibration, since=0.0, recall=True)

    def _watch(self, artefact: str, calibration: Calibration, since: float, recall: bool = False) -> None:
        """An artefact serves from capture time `since` on: fresh evidence for it."""
        self._news.serves_anew()
        self._reporter.serves(artefact, calibration.id)
        with self._reporting():
            self._regimes.watch(artefact, self._service.model, calibration, since, recall)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Tell of an error that does not keep the daemon from going on."""
        try:
            yield
        except TaredError as error:
            self._reporter.error(error)

    def tick(self, state: ObserverState) -> None:
        """Look at the observer's evidence, start what is due, move the running job on."""
        self._news.tell(state)
        drift = state.drift.state if state.drift is not None else ""
        self._learn(state)
        sees = not state.outage and state.view.trouble != FROZEN  # else there is nothing to collect
        idle = self._jobs.job is None and not self._swapping and sees
        if idle and time.monotonic() >= self._quiet_until:
            if self._service.degraded:
                self._start_job("first-start")
            elif state.drift is not None and state.drift.switch_to and time.monotonic() >= self._switch_after:
                self._switch(state.drift.switch_to)
            elif drift == "alarm" and self._config.recalibration.automatic and self._shows_something(state):
                self._answer_alarm()
        self._pipeline.observer.set_pace(alert=self._jobs.collecting or drift == "warning")
        self._jobs.tick(self._service.calibrated_path)

    def stop(self, reason: str) -> None:
        """Abandon the running job."""
        self._jobs.abandon(reason)

    def _shows_something(self, state: ObserverState) -> bool:
        """A covered lens is nothing to calibrate on, whatever a classifier calls it; a dark street with cars is."""
        found = self._config.model.task == "detect" and state.telling > 0
        return state.view.trouble != BLIND or found

    def _learn(self, state: ObserverState) -> None:
        with self._reporting():
            learnt = self._regimes.learns(state, self._pipeline.last_ts)
            if learnt:
                self._reporter.event("regime", artefact=learnt, known=self._regimes.known)

    def _switch(self, identity: str) -> None:
        """Put the artefact of another regime in service; one that cannot serve any more is forgotten."""
        since_s = time.monotonic()
        self._switch_after = since_s + self._config.regimes.cooldown_s
        try:
            artefact = self._service.find(identity)
            engine, calibration = self._service.load(artefact)
        except TaredError as error:
            self._reporter.error(error, trigger="switch")
            with self._reporting():
                self._regimes.forget(identity)
            return
        report = JobReport("switch", self._reporter, self._pause, None)
        self._exchange(artefact, engine, calibration, _Exchange("switch", since_s, report))

    def _answer_alarm(self) -> None:
        """Recalibrate, unless that was done too often today: a scene that never settles is for people to look at."""
        if self._cap.takes(time.monotonic()):
            self._capped = False
            self._start_job("alarm")
            return
        if self._capped:
            return
        self._capped = True
        per_day = self._config.recalibration.per_day
        found, remedy = f"an alarm after {per_day} recalibrations in a day", "look at the scene, or raise the cap"
        self._reporter.error(AgentError("recalibration.cap", found, "a scene that settles", remedy))

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
            self._watch(artefact.id, calibration, since)
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
                "fidelity_hour": state.fidelity_hour.as_dict(),
                "accuracy": self._pipeline.accuracy.estimate.as_dict(),
                "drift": asdict(state.drift) if state.drift else None,
                "regimes": self._regimes.known,
                "view": state.view.trouble or "good",
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
        self._pause()  # what the operator took back must not return by itself at once, nor be switched to later
        with self._reporting():
            self._regimes.forget(self._service.serving.id)
        self._exchange(previous, engine, calibration, _Exchange("rollback", time.monotonic(), report))
