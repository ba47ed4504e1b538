"""What the daemon does about things: drift, low fidelity, candidates, and what the operator wants.

Everything in here runs in the supervisor's thread.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agent.candidate import Outcome
from agent.commands import Report
from agent.config import Config
from agent.errors import AgentError
from agent.exchange import Cause, Exchange
from agent.findings import ObserverState
from agent.job_report import JobReport
from agent.low_fidelity import AttemptReport, Attempts, is_low
from agent.memory import Memory
from agent.news import News
from agent.pipeline import Pipeline
from agent.raising import Raising
from agent.recalibration import Job, Post, Recalibration
from agent.regimes import RegimeBook, Regimes
from agent.reporting import Reporter
from agent.restraint import Restraint
from agent.service import Loaded, Service
from agent.summary import RunSummary
from agent.view import BLIND, FROZEN
from calibrate.errors import TaredError
from engines.calibration import Calibration

_RANKED_WITHIN = 1.0 / 3.0  # of the time that a job may take: the build and the verdict are still to come


class Operations:
    """Decides and acts; `summary` is what it has done."""

    def __init__(self, config: Config, service: Service, pipeline: Pipeline, reporter: Reporter, post: Post) -> None:
        self._config = config
        self._service = service
        self._pipeline = pipeline
        self._reporter = reporter
        book = RegimeBook(config.state_dir / "regimes.json", service.identity, config.regimes.most)

        def tell(error: AgentError) -> None:
            post(lambda: reporter.error(error))

        if pipeline.is_live:  # a recording that is played once more is news
            source = config.camera.source
            pipeline.observer.findings.remember(Memory(config.state_dir / "evidence.jsonl", source, tell))
            pipeline.accuracy.remember(Memory(config.state_dir / "accuracy.jsonl", source, tell))
        self._regimes = Regimes(config, book, pipeline.observer.findings)
        self._jobs = Recalibration(config, service, pipeline.observer, post, self._on_candidate)
        attempts = config.state_dir / "attempts.json" if pipeline.is_live else None
        self._attempts = Attempts(attempts, service.origin, tell)
        self._restraint = Restraint(
            config.state_dir / "restraint.json" if pipeline.is_live else None,
            config.recalibration.per_day,
            config.recalibration.cooldown_s,
            config.regimes.cooldown_s,
            tell,
        )
        self._capped = False  # and told so
        self._trouble = ""  # with the view, when it was last looked at
        self.summary = RunSummary(str(service.serving.path))
        self._news = News(reporter, self.summary.alarms, config)
        self._exchange = Exchange(service, pipeline, reporter, self.summary, post, self._serves)

    @property
    def building(self) -> bool:
        """Whether a candidate is being built, for which no more frames are needed."""
        return self._jobs.building

    @property
    def exchanging(self) -> bool:
        """Whether an engine waits for its first frame."""
        return self._exchange.under_way

    @property
    def known_regimes(self) -> int:
        return self._regimes.known

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

    def _serves(self, loaded: Loaded, since: float) -> None:
        self._watch(loaded.artefact.id, loaded.calibration, since)

    def _watch(self, artefact: str, calibration: Calibration, since: float, recall: bool = False) -> None:
        """An artefact serves from capture time `since` on: fresh evidence for it."""
        self._news.serves_anew()
        self._reporter.serves(artefact, calibration.id)
        with self._reporting():
            self._regimes.watch(artefact, self._service.planned, calibration, since, recall)

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
        self._learn(state)
        same_view = self._is_same_view(state.view.trouble)
        sees = not state.outage and state.view.trouble != FROZEN  # else there is nothing to collect
        idle = self._jobs.job is None and not self._exchange.under_way and sees
        if idle and same_view and self._restraint.may_start:
            if self._service.degraded:
                self._start_job("first-start")
            elif self._config.recalibration.automatic:
                self._answer(state)
        closely = state.drift is not None and state.drift.closely
        self._pipeline.observer.set_pace(alert=self._jobs.collecting or closely)
        self._pipeline.observer.findings.set_in_use(self._jobs.collecting)
        self._jobs.tick()

    def stop(self, reason: str) -> None:
        """Abandon the running job."""
        self._jobs.abandon(reason)

    def _answer(self, state: ObserverState) -> None:
        """Do about the scene what can be done, the quickest first."""
        recalibration, serving = self._config.recalibration, self._service.serving.id
        if state.drift is None or not self._shows_the_scene(state):
            return
        if state.drift.switch_to and self._restraint.may_switch:
            self._switch(state.drift.switch_to)
        elif state.drift.state == "alarm":
            if self._may_start_job("an alarm"):
                self._start_job("alarm")
        elif recalibration.raise_precision and is_low(state, self._config):
            rung = self._attempts.next_rung(serving)
            if rung and self._may_start_job("low fidelity"):
                failed = partial(self._attempts.failed, serving)
                report = AttemptReport(self._reporter, self._restraint.pause_jobs, failed)
                fidelity, budget_s = state.settled.interval.estimate, _RANKED_WITHIN * recalibration.timeout_s
                self._jobs.request("precision", report, raising=Raising(rung, fidelity, budget_s))

    def _shows_the_scene(self, state: ObserverState) -> bool:
        """No scales cure the view's trouble: whoever is at the camera does, or the operator says that it is meant so.

        A covered lens shows nothing, whatever a classifier calls it; a dark street with cars is something to go by.
        """
        found = self._config.model.task == "detect" and state.telling > 0
        return not state.view.trouble or (state.view.trouble == BLIND and found)

    def _is_same_view(self, trouble: str) -> bool:
        """Else what was collected is of another one, and no cure for this, nor a sign that something is seen now."""
        if trouble in (self._trouble, FROZEN):  # of a frozen one nothing is collected
            return True
        self._trouble = trouble
        if not self._jobs.collecting:
            self._pipeline.observer.findings.collect_afresh()
        return False

    def _learn(self, state: ObserverState) -> None:
        with self._reporting():
            learnt = self._regimes.learns(state, self._pipeline.last_ts)
            if learnt:
                self._reporter.event("regime", artefact=learnt, known=self._regimes.known)

    def _switch(self, identity: str) -> None:
        """Put the artefact of another regime in service; one that cannot serve any more is forgotten."""
        since_s = time.monotonic()
        self._restraint.pause_switches()
        try:
            artefact = self._service.find(identity)
            loaded = self._service.load(artefact)
        except TaredError as error:
            self._reporter.error(error, trigger="switch")
            with self._reporting():
                self._regimes.forget(identity)
            return
        report = JobReport("switch", self._reporter, self._restraint.pause_jobs, None)
        self._exchange.start(loaded, Cause("switch", since_s, report))

    def _may_start_job(self, why: str) -> bool:
        """Unless jobs were too many today, which is told once: a scene that never settles is for people to look at."""
        if self._restraint.takes_job():
            self._capped = False
            return True
        if self._capped:
            return False
        self._capped = True
        per_day = self._config.recalibration.per_day
        found, remedy = f"{why} after {per_day} jobs in a day", "look at the scene, or raise the cap"
        self._reporter.error(AgentError("recalibration.cap", found, "a scene that settles", remedy))
        return False

    def _start_job(self, trigger: str, command: Report | None = None, **wishes: Any) -> Job | None:
        on_failure = self._restraint.pause_jobs if command is None else lambda: None
        report = JobReport(trigger, self._reporter, on_failure, command)
        return self._jobs.request(trigger, report, **wishes)

    def _on_candidate(self, job: Job, outcome: Outcome) -> None:
        """The child has built an engine that passed: put it in service."""
        try:
            loaded = self._service.load(self._service.read(outcome.artefact or Path()))
        except TaredError as error:
            job.report.fail(error)
            return
        self._exchange.start(loaded, Cause(job.trigger, job.started_s, job.report, outcome.verdict))
        if job.trigger == "command":  # the operator's word that the camera shows what it is meant to show
            self._pipeline.observer.findings.renew_view()

    def recalibrate(self, report: Report, frames: int | None, method: str | None) -> bool:
        """Do so with fresh frames, because the operator says so; False while another job runs."""
        if self._start_job("command", report, frames=frames, method=method) is None:
            return False
        self._pipeline.observer.findings.collect_afresh()
        return True

    def go_back(self, loaded: Loaded, report: Report) -> None:
        """To this engine; what the operator took back must not return by itself at once, nor be switched to later."""
        self._jobs.abandon("the operator rolls back")
        self._restraint.pause_jobs()
        if self._service.raised and self._service.plan.floats.keys() - loaded.model.plan.floats.keys():
            self._attempts.forbid(loaded.artefact.id)
        with self._reporting():
            self._regimes.forget(self._service.serving.id)
        self._exchange.start(loaded, Cause("rollback", time.monotonic(), report))
