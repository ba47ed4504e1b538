"""What the frames of a run have shown, for its summary: of all cameras together, and of several of each."""

from __future__ import annotations

import time
from collections.abc import Mapping

from agent.commands.authority import Authority
from agent.commands.labels import LabelsInbox
from agent.commands.settings import Settings
from agent.common.console import Task, progress
from agent.common.errors import AgentError, CameraError
from agent.common.main_thread import MainThreadQueue
from agent.common.timing import PeriodicTimer
from agent.config import Config
from agent.contract.messages import Birth
from agent.control.operations import Operations
from agent.control.summary import CameraSummary, RunSummary
from agent.daemon.handlers import set_log_level
from agent.daemon.inbox import CommandInbox, open_remote
from agent.daemon.startup import RuntimeRebuildJob, StartupProgress
from agent.daemon.status import DaemonSnapshot, StatusReporter
from agent.jobs.job import MODEL
from agent.jobs.recovery import CrashRecovery
from agent.models.engine_service import EngineService
from agent.models.model import Model
from agent.models.model_watch import ModelWatch
from agent.monitoring.accuracy import Truth
from agent.monitoring.camera_monitor import least_faithful
from agent.results.writer import ResultsWriter
from agent.serving.pipeline import Pipeline, total_frames
from agent.system.process import handling_signals, notify_service_manager
from agent.uplink.link import MqttLink
from agent.uplink.reporter import Reporter
from calibrate.errors import TaredError
from engines.interface import Backend
from engines.store.signing import find_key
from engines.store.store import Store


def sum_up(summary: RunSummary, pipeline: Pipeline) -> None:
    """Fidelity and what goes with it are those of the least faithful camera."""
    states, findings = pipeline.observer.states(), pipeline.observer.findings
    cameras = {
        name: CameraSummary(feed.run_meter.sample(), states[name].fidelity, feed.labelled)
        for name, feed in pipeline.feeds.items()
    }
    camera = least_faithful(states)
    summary.loop, summary.last_ts = pipeline.run_meter.sample(), pipeline.last_ts
    summary.fidelity, summary.fidelity_since = states[camera].fidelity, states[camera].fidelity_since
    summary.fidelity_history = findings[camera].history()
    summary.live_accuracy = cameras[camera].live_accuracy
    summary.cameras = cameras if len(cameras) > 1 else {}


_TICK_S = 0.1


class Supervisor:
    """One run of the daemon.

    Everything in here, and in Operations, happens in the thread that calls `run`; other threads hand it functions.
    """

    def __init__(
        self,
        config: Config,
        model: Model,
        backend: Backend,
        link: MqttLink | None,
        birth: Birth,
        frame_limit: int = 0,
        labels: Mapping[str, Mapping[int, Truth]] | None = None,
        content: str = "",
        authority: Authority | None = None,
        results: ResultsWriter | None = None,
    ) -> None:
        """labels: of recordings, by camera and frame number. content: of the model's file, as `content_of` has it;
        where it is known, another one beside live cameras ends the run. authority: whose commands count, None for
        everybody's. results: who is given every answer.

        Raises CameraError, ConfigError, EngineError: what cannot start says so before anything runs.
        """
        self._link = link
        self._posted = MainThreadQueue()
        self._stop_reason = ""
        sources = [camera.opened() for camera in config.every_camera]
        reporter = self._reporter = Reporter(link, birth)
        trusts = authority.trusts if authority is not None else lambda _key: True
        settings = Settings(config, config.state_dir / "settings.json", trusts, self._configure, reporter.error)
        if settings.config.log_level != config.log_level:
            set_log_level(settings.config.log_level)
        self._config = config = settings.config
        self._telemetry = PeriodicTimer(config.mqtt.telemetry_period_s, time.monotonic())
        past = CrashRecovery(config.state_dir, reporter)
        self._service = EngineService(model, backend, Store(config.state_dir, find_key()))
        runtime = RuntimeRebuildJob(past.journal, reporter, past.current)
        with progress("preparing", 100) as bar:
            starting = StartupProgress("engine", reporter, bar.update)
            engine = self._service.start(runtime.on_error, starting, past.proven, not past.rebuild_interrupted)
        runtime.serves(self._service.serving.id, self._service.degraded)
        self._built_percent = 0  # of the reference; the observer's thread counts it up
        self._pipeline = Pipeline(
            config,
            sources,
            model,
            self._service.serving.id,
            engine,
            frame_limit,
            lambda name, error: self._posted.put(lambda: self._on_camera(name, error)),
            lambda error: self._posted.put(lambda: self._on_observer(error)),
            StartupProgress("reference", reporter, self._on_building, self._posted.put),
            [results.offer] if results is not None else [],
        )
        self._results = results
        if results is not None:
            results.follow(lambda name, error: self._posted.put(lambda: self._on_results(name, error)))
        self._readings = StatusReporter(config, self._service, self._pipeline, results)
        self._operations = Operations(config, self._service, self._pipeline, reporter, self._posted.put, past.journal)
        watched = self._pipeline.is_live and bool(content)
        self._watch = ModelWatch(model.spec.path, content, self._on_model) if watched else None
        concluded = past.conclude(content)
        self._rolled_back = concluded.rolled_back
        accuracies = {camera: feed.accuracy for camera, feed in self._pipeline.feeds.items()}
        self._labels_desk = LabelsInbox(accuracies, model.spec, self._on_bad_labels)
        self._recorded_labels = labels or {}
        self._remote: CommandInbox | None = None
        if link is not None:
            self._remote = open_remote(
                link,
                settings,
                self._service,
                self._pipeline,
                self._operations,
                self._labels_desk,
                authority,
                reporter,
                watched,
                self._posted.put,
                self._stop,
            )
            self._remote.recall(past.known, concluded.news)
        self._total = total_frames(sources, frame_limit)

    def run(self) -> RunSummary:
        """Serve until the source ends, the frame limit is reached, or SIGTERM or SIGINT comes.

        Raises what stopped the frame path, after everything else has been stopped cleanly.
        """
        self._operations.start(self._rolled_back)
        if self._watch is not None:
            self._watch.start()
        with handling_signals(self._on_signal):
            with progress("preparing", 100) as bar:
                self._pipeline.start(lambda: self._waits(bar))
            notify_service_manager("READY=1")
            try:
                with progress("serving", self._total) as bar:
                    self._serve(bar)
            finally:
                if self._watch is not None:
                    self._watch.stop()
                if self._stop_reason != MODEL:  # after which the daemon goes on
                    notify_service_manager("STOPPING=1")
                    if self._link is not None:
                        self._link.set_state("stopping")
                self._pipeline.stop()
                self._operations.stop(self._stop_reason or "the source has ended")
                if self._remote is not None:
                    self._remote.stop(self._stop_reason or "the source has ended")
            self._pipeline.join()
            if self._results is not None:
                self._results.settle()
            self._run_posted()  # a swap that only the end of the stream completed
            self._take_labels()
        return self._sum_up(self._operations.summary)

    def _sum_up(self, summary: RunSummary) -> RunSummary:
        """What the run was, once all has ended."""
        sum_up(summary, self._pipeline)
        summary.stopped_by = self._stop_reason
        summary.calibrated = not self._service.degraded
        summary.results_dropped = self._results_dropped
        return summary

    def moment(self) -> DaemonSnapshot:
        """The daemon now, for who scrapes it; any thread may ask."""
        return self._readings.moment(self._operations.job, self._link)

    def _serve(self, bar: Task) -> None:
        """Until frames have ended, and with them a candidate whose frames had all been collected."""
        pinged = state_told = None
        while self._pipeline.error is None and not self._stop_reason and not self._results_failed:
            if not self._pipeline.running and not self._operations.building:
                break
            self._run_posted()
            self._take_labels()
            self._pipeline.look()
            states = self._pipeline.observer.states()
            self._operations.tick(states)
            if self._operations.new_model.usable:
                self._stop_reason = self._stop_reason or MODEL
            if self._pipeline.pulse != pinged:
                pinged = self._pipeline.pulse
                notify_service_manager("WATCHDOG=1")
            if self._link is not None and self._service.degraded != state_told:
                state_told = self._service.degraded
                self._link.set_state("degraded" if state_told else "online")
            bar.update(self._pipeline.served, self._readings.note(states, self._operations.job, self._built_percent))
            if self._telemetry.due(time.monotonic()):
                self._reporter.telemetry(self._readings.samples(states), self._results_dropped)
        self._run_posted()

    @property
    def _results_dropped(self) -> Mapping[str, int]:
        return self._results.dropped if self._results is not None else {}

    @property
    def _results_failed(self) -> bool:
        return self._results is not None and self._results.failed is not None

    def _take_labels(self) -> None:
        """Those of recordings, for what was answered since the last call, and what has to be told of others."""
        for camera, labels in self._recorded_labels.items():
            self._pipeline.feeds[camera].accuracy.label_recorded(labels)
        self._labels_desk.tick(time.monotonic())

    def _run_posted(self) -> None:
        """Wait a tick for functions from other threads, run them, and take what came from the broker."""
        self._posted.run(_TICK_S)
        if self._remote is not None:
            self._remote.tick()

    def _on_camera(self, name: str, error: CameraError | None) -> None:
        if error is not None:
            self._reporter.error(error, camera=name)
        else:
            self._reporter.event("camera", camera=name, name=name, state="back")

    def _on_observer(self, error: TaredError | None) -> None:
        if error is not None:
            self._reporter.error(error, part="observer")
        else:
            self._reporter.event("observer", state="back")

    def _on_results(self, output: str, error: AgentError | None) -> None:
        if error is not None:
            self._reporter.error(error, part="results", output=output)
        else:
            self._reporter.event("results", output=output, state="back")

    def _on_model(self, content: str) -> None:
        self._posted.put(lambda: self._operations.new_model.found(content))

    def _on_bad_labels(self, error: TaredError, count: int) -> None:
        self._reporter.error(error, part="labels", count=count)

    def _on_building(self, percent: int, _doing: str) -> None:
        self._built_percent = percent

    def _waits(self, bar: Task) -> bool:
        """While a recording waits for its observer."""
        self._run_posted()
        bar.update(self._built_percent, "reference")
        return not self._stop_reason

    def _configure(self, config: Config) -> None:
        """What an operator has set holds from now on."""
        if config.log_level != self._config.log_level:
            set_log_level(config.log_level)
        self._config = config
        self._telemetry.change(config.mqtt.telemetry_period_s, time.monotonic())
        self._operations.configure(config)
        if self._remote is not None:
            self._remote.report()

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _on_signal(self, name: str) -> None:
        self._stop_reason = name
