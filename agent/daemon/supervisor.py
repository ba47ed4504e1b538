"""Run the daemon's main thread: build everything, serve until the end, and sum up.

`Supervisor.__init__` opens the engine, the frame path, the control of engines and jobs, and the inbox of commands.
`run` is the loop. Ten times a second it runs what other threads have handed to the main thread, receives messages, lets
the Executor act as agent.core decides, and reports the state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from agent.commands.authority import Authority, Releases
from agent.commands.deliveries import FileReceiver, ModelAdmission, calibration_admission
from agent.commands.dispatcher import bind
from agent.commands.labels import LabelsInbox
from agent.commands.settings import Settings
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.console import Task, progress
from agent.common.errors import AgentError, CameraError, FaultLog, fault_remedy
from agent.common.main_thread import MainThreadQueue, RunInMainThread
from agent.common.timing import Backoff, PeriodicTimer, RetryState
from agent.config import Config
from agent.contract.events import Part
from agent.contract.messages import Birth
from agent.control.executor import Executor
from agent.control.reasons import explain
from agent.control.snapshot import BoardSnapshot, take_snapshot
from agent.control.summary import RunSummary
from agent.core import facts as fact
from agent.core.kinds import Trigger
from agent.daemon.handlers import BoardHandlers, EngineHandlers, HistogramUpload, StatusHandler, set_log_level
from agent.daemon.inbox import CommandInbox
from agent.daemon.status import complete, history_rows, labelled_accuracy, progress_line, telemetry_of
from agent.jobs.recovery import CrashRecovery
from agent.labelling.sampling import FrameSampler
from agent.labelling.store import LabelStore
from agent.models.engine_service import EngineService
from agent.models.model import Model
from agent.models.model_watch import ModelWatch
from agent.monitoring.history import History
from agent.results.preview import Preview
from agent.results.writer import ResultsWriter
from agent.serving.pipeline import Pipeline, total_frames
from agent.state.store import StateStore
from agent.system.process import handling_signals, notify_service_manager
from agent.uplink.link import MqttLink
from agent.uplink.reporter import Reporter
from agent.vision.labels import Truth
from agent.vision.tasks.opening import open_task
from calibrate.errors import TaredError
from engines.interface import Backend
from engines.store.artefact import Store
from engines.store.signing import find_key

log = logging.getLogger(__package__)

_TICK_S = 0.1
_QUIET_S = 2.0  # nothing is reported before: an engine that is ready by then was only loaded
_WELL_AFTER = 30  # reports in a row, after which an outage has ended
_PATIENCE_S = 300  # the longest that a builder takes for one step; after that it hangs


@dataclass
class StartupProgress:
    """The progress callback of one engine that is built at the start.

    Args:
        title: The engine's name for people.
        show: Called at every step with the percentage and the step.
        run_in_main_thread: For an engine that is built in another thread, beside the video. systemd no longer waits
            then, and its watchdog must not be put off. None: the engine is built in the reporter's thread.
    """

    title: str
    reporter: Reporter
    show: Callable[[int, str], None]
    run_in_main_thread: RunInMainThread | None = None
    clock: Clock = SYSTEM_CLOCK

    def __post_init__(self) -> None:
        self._started_s = self.clock.monotonic_s()
        self._reported = -1  # tens of percent

    def __call__(self, fraction: float, doing: str) -> None:
        percent = round(100 * fraction)
        self.show(percent, f"{self.title}: {doing}")
        if self.clock.monotonic_s() - self._started_s < _QUIET_S:
            return
        if self.run_in_main_thread is None:
            notify_service_manager(f"EXTEND_TIMEOUT_USEC={_PATIENCE_S * 1_000_000}")
        if percent // 10 == self._reported:
            return
        self._reported = percent // 10
        run = self.run_in_main_thread or (lambda report: report())
        run(lambda: self.reporter.event("job", trigger="start", step="BUILDING", percent=percent, engine=self.title))


class Supervisor:
    """One run of the daemon.

    Everything in here, and in Executor, happens in the thread that calls `run`; other threads hand it functions.

    newest: The newest snapshot, for any thread.
    """

    def __init__(
        self,
        config: Config,
        state: StateStore,
        model: Model,
        backend: Backend,
        link: MqttLink | None,
        birth: Birth,
        frame_limit: int = 0,
        labels: Mapping[str, Mapping[int, Truth]] | None = None,
        content: str = "",
        authority: Authority | None = None,
        results: ResultsWriter | None = None,
        unused_plan: TaredError | None = None,
        preview: Preview | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Load the engine, and build whatever it needs to serve.

        Args:
            state: Of config.state_dir.
            link: None without a broker.
            frame_limit: Ends the run after so many frames; 0: no limit.
            labels: Labels of recordings, by camera and frame number.
            content: The content of the model's file, as `content_of` has it. If it is known and the cameras are live,
                another content ends the run.
            authority: Decides whose commands count; None admits everybody.
            results: Receives every answer.
            unused_plan: As for Executor.
            preview: Shows the newest answers.

        Raises CameraError, ConfigError, EngineError for what cannot start, before anything runs.
        """
        self._link = link
        self._clock = clock
        self._main_thread = MainThreadQueue()
        self._stop_reason = ""
        sources = [camera.to_source() for camera in config.every_camera]
        reporter = self._reporter = Reporter(link, birth, clock)
        trusts = authority.trusts if authority is not None else lambda _key: True
        self._state = state
        state.report_to(reporter.error)
        settings = Settings(config, state, trusts, self._configure)
        if settings.config.log_level != config.log_level:
            set_log_level(settings.config.log_level)
        self._config = config = settings.config
        self._reporting = TurnStep(
            "report.failed", Exception, "a report at each turn", lambda error: self._on_part("report", error)
        )
        self._receiving = TurnStep(
            "commands.failed", OSError, "commands received", lambda error: self._on_part("commands", error)
        )
        self._deciding = TurnStep(
            "control.failed",
            OSError,
            "jobs and swaps moved on",
            lambda error: self._on_part("control", error),
            lambda error: self.executor.take(fact.DecisionFailed(error)),
        )
        self._telemetry = PeriodicTimer(config.mqtt.telemetry_period_s, self._clock.monotonic_s())
        past = CrashRecovery(config.state_dir, state, reporter)
        self._service = EngineService(model, backend, Store(config.state_dir, find_key()))
        with progress("preparing", 100) as bar:
            show_engine = StartupProgress("engine", reporter, bar.update, clock=clock)
            engine = self._service.start(past.on_start_error, show_engine, not past.rebuild_interrupted)
        past.engine_started(self._service.serving.id, self._service.is_degraded)
        self._pinged: tuple[int, int] | None = None
        self._built_percent = 0  # progress of the reference's build; set in the observer's thread
        self._pipeline = Pipeline(
            config,
            state,
            sources,
            model,
            self._service.serving.id,
            engine,
            frame_limit,
            lambda name, error: self._main_thread.put(lambda: self._on_camera(name, error)),
            lambda error: self._main_thread.put(lambda: self._on_part("observer", error)),
            lambda error: self._main_thread.put(lambda: self._on_part("answers", error)),
            StartupProgress("reference", reporter, self._on_building, self._main_thread.put, clock),
            lambda mismatch: self._main_thread.put(lambda: self.executor.distrust_reference(mismatch)),
            [part.offer for part in (results, preview) if part is not None],
            clock,
        )
        self._draw_for_labels(model)
        self._results = results
        self._preview = preview
        recovered = past.end_unfinished_jobs(content)  # before the journal is read for decisions
        self._rolled_back = recovered.rolled_back
        self.executor = Executor(
            config,
            self._service,
            self._pipeline,
            reporter,
            self._main_thread.put,
            past.journal,
            state,
            unused_plan,
            clock,
        )
        show = self.executor.watch.policies.show
        if results is not None:
            results.show = show
            results.on_change = lambda name, error: self._main_thread.put(
                lambda: self._on_part("results", error, output=name)
            )
        if preview is not None:
            feeds = self._pipeline.feeds
            preview.show(
                lambda camera: feeds[camera].newest,
                lambda error: self._main_thread.put(partial(self._on_preview, error, preview.address)),
                show,
            )
            preview.permit(config.privacy.preview)
        self.newest = take_snapshot(self.executor, results, preview)
        self._history = History(
            config.state_dir, lambda error: reporter.error(error, part="history"), self._pipeline.is_live
        )
        watched = self._pipeline.is_live and bool(content)
        self._watch = ModelWatch(model.spec.path, content, self._on_model, clock=clock) if watched else None
        accuracies = {camera: feed.accuracy for camera, feed in self._pipeline.feeds.items()}
        self._labels = LabelsInbox(
            accuracies, model.spec, lambda error, count: reporter.error(error, part="labels", count=count)
        )
        self._recorded_labels = labels or {}
        self._inbox: CommandInbox | None = None
        if link is not None:
            self._inbox = self._open_inbox(link, settings, authority, watched)
            self._inbox.restore(past.command_results, recovered.results)
        self._total = total_frames(sources, frame_limit)
        state.report_to(lambda error: self._main_thread.put(lambda: reporter.error(error)))  # the threads start now
        self._has_whole_recordings = not frame_limit and not self._pipeline.is_live

    def _draw_for_labels(self, model: Model) -> None:
        """Let the observer draw frames for people to label. Some tasks have no labels."""
        config = self._config
        if open_task(model.spec).labels is None:
            return
        store = LabelStore(config.state_dir, model.sha256, model.spec.task)
        sampler = FrameSampler(
            store,
            config.labelling,
            model.spec.labels,
            len(config.every_camera),
            lambda error: self._main_thread.put(lambda: self._on_part("labelling", error)),
            self._clock,
        )
        self._pipeline.observer.draw_for_labels(sampler)

    def _open_inbox(
        self, link: MqttLink, settings: Settings, authority: Authority | None, watched: bool
    ) -> CommandInbox:
        """watched: whether the model's file is watched, so that a delivered one is noticed."""
        config, run_in_main_thread = self._config, self._main_thread.put
        releases = Releases(authority, self._state)
        if releases.damage is not None:
            self._reporter.error(releases.damage)
        reserve_bytes = config.store.reserve_bytes
        receiver = partial(
            FileReceiver, reserve_bytes=reserve_bytes, run_in_main_thread=run_in_main_thread, clock=self._clock
        )
        deliveries: dict[str, FileReceiver[Any]] = {
            "model": receiver(
                config.state_dir / "incoming",
                admit=ModelAdmission(config.model.path, watched, reserve_bytes, releases, self._clock),
                try_out=self.executor.try_model,
            ),
            "calibration": receiver(
                config.state_dir / "incoming_calibration",
                admit=calibration_admission(lambda: self._service.model),
                try_out=self.executor.try_calibration,
            ),
        }
        handlers = bind(
            lambda: settings.config,
            EngineHandlers(self.executor, deliveries),
            BoardHandlers(settings, self._pipeline, link, self._stop, self.executor.watch.policies.show, self._clock),
            HistogramUpload(self._service, link, run_in_main_thread),
            StatusHandler(self._refresh),
        )
        receivers = [*deliveries.values()]
        return CommandInbox(link, handlers, settings, receivers, self._labels, authority, self._reporter, self._clock)

    def run(self) -> RunSummary:
        """Serve until the source ends, the frame limit is reached, or SIGTERM or SIGINT comes.

        Raises what stopped the frame path, after everything else has been stopped cleanly.
        """
        self.executor.start(self._rolled_back)
        if self._watch is not None:
            self._watch.start()
        with handling_signals(self._on_signal):
            with progress("preparing", 100) as bar:
                self._pipeline.start(lambda: self._wait_for_reference(bar))
            notify_service_manager("READY=1")
            try:
                with progress("serving", self._total) as bar:
                    self._serve(bar)
            finally:
                if self._watch is not None:
                    self._watch.stop()
                if self._stop_reason != Trigger.MODEL:  # after which the daemon goes on
                    notify_service_manager("STOPPING=1")
                    if self._link is not None:
                        self._link.set_state("stopping")
                self._pipeline.stop()
                self.executor.stop(self._stop_reason or "the source has ended")
                if self._inbox is not None:
                    self._inbox.stop(self._stop_reason or "the source has ended")
            self._pipeline.join()
            if self._results is not None:
                self._results.flush()
            self._receive()  # a swap that only the end of the stream completed
            self._apply_labels()
        return self._summarise(self.executor.summary)

    def _serve(self, bar: Task) -> None:
        """Serve until the frames have ended, and the job that had enough of them for a verdict."""
        while self._pipeline.error is None and not self._stop_reason:
            if not self._pipeline.loop.is_alive() and not self._goes_on_without_frames():
                break
            self._turn(bar)
        self._receive()

    def _turn(self, bar: Task) -> None:
        """Handle what has come, decide, and report."""
        self._receive()
        self._apply_labels()
        self._pipeline.poll()
        with self._deciding.may_fail():
            self.executor.tick(self._pipeline.observer.states())
        if self.executor.state.needs_new_run:
            self._stop(Trigger.MODEL.value)
        if self._pipeline.pulse != self._pinged:
            self._pinged = self._pipeline.pulse
            notify_service_manager("WATCHDOG=1")
        with self._reporting.may_fail():  # what only reports ends nothing
            self._report(bar)

    def _report(self, bar: Task) -> None:
        """Report the state wherever it is shown."""
        is_due = self._telemetry.due(self._clock.monotonic_s())
        board = self._refresh(for_telemetry=is_due)
        if board.totals.frames and self._history.is_due(board.last_ts):
            self._history.add(board.last_ts, history_rows(board))
        reasons = explain(board)
        if self._link is not None:
            self._link.set_state("degraded" if board.is_degraded else "online", reasons.sentence)
        bar.update(board.totals.frames, progress_line(board, self._built_percent))
        if is_due:
            labelled = labelled_accuracy(board)
            self._reporter.telemetry(
                telemetry_of(board), board.results_dropped, reasons.as_dict(), board.preview, labelled
            )

    def _refresh(self, for_telemetry: bool = False) -> BoardSnapshot:
        self.newest = take_snapshot(self.executor, self._results, self._preview, for_telemetry=for_telemetry)
        return self.newest

    def _goes_on_without_frames(self) -> bool:
        """Return True while a job needs no more frames; one that collects makes do with those of a recording."""
        if self._has_whole_recordings:
            return self.executor.end_collection()
        job = self.executor.state.job
        return job is not None and job.child_since_s is not None

    def _summarise(self, summary: RunSummary) -> RunSummary:
        board = self._refresh()
        complete(summary, board)
        summary.fidelity_history = self._pipeline.observer.monitors[board.least_faithful].history()
        summary.stopped_by, summary.jobs = self._stop_reason, self.executor.jobs
        return summary

    def _apply_labels(self) -> None:
        """Apply recorded labels to the frames answered since the last call, and report labels that were refused."""
        for camera, labels in self._recorded_labels.items():
            self._pipeline.feeds[camera].accuracy.label_recorded(labels)
        self._labels.tick(self._clock.monotonic_s())

    def _receive(self) -> None:
        """Wait a tick for functions from other threads, run them, and handle messages from the broker."""
        with self._deciding.may_fail():
            self._main_thread.run(_TICK_S)
        if self._inbox is not None:
            with self._receiving.may_fail():
                self._inbox.tick()

    def _wait_for_reference(self, bar: Task) -> bool:
        """Called while a recording waits for its observer; False gives up."""
        self._receive()
        with self._reporting.may_fail():
            self._refresh()
        bar.update(self._built_percent, "reference")
        return not self._stop_reason

    def _configure(self, config: Config) -> None:
        """Apply the settings of an operator."""
        if config.log_level != self._config.log_level:
            set_log_level(config.log_level)
        self._config = config
        self._telemetry.set_period(config.mqtt.telemetry_period_s, self._clock.monotonic_s())
        self.executor.configure(config)
        if self._preview is not None:
            self._preview.permit(config.privacy.preview)
        if self._inbox is not None:
            self._inbox.report()

    def _stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _on_signal(self, name: str) -> None:
        self._stop_reason = name

    def _on_camera(self, name: str, error: CameraError | None) -> None:
        if error is not None:
            self._reporter.error(error, camera=name)
        else:
            self._reporter.event("camera", camera=name, state="back")

    def _on_part(self, part: Part, error: TaredError | None, **detail: str) -> None:
        if error is not None:
            self._reporter.error(error, part=part, **detail)
        else:
            self._reporter.event(part, **detail, state="back")

    def _on_preview(self, error: TaredError | None, address: str) -> None:
        if error is not None:
            self._reporter.error(error, part="preview")
        else:
            self._reporter.event("preview", state="open", address=address)

    def _on_model(self, content: str) -> None:
        self.executor.post(fact.ModelChanged(content))

    def _on_building(self, percent: int, _doing: str) -> None:
        self._built_percent = percent


@dataclass
class TurnStep:
    """A step of the supervisor's turn that may fail: the video goes on.

    Args:
        code: Code of the error that is reported, once for each outage.
        survived: The exceptions that end nothing.
        expected: As in an error.
        on_change: Called with the error that begins an outage, and with None at its end.
        then: Called with each error.
    """

    code: str
    survived: type[Exception]
    expected: str
    on_change: Callable[[TaredError | None], None]
    then: Callable[[AgentError], None] = lambda _: None

    def __post_init__(self) -> None:
        self._outage = RetryState(self.on_change, Backoff(), _WELL_AFTER)
        self._faults = FaultLog(log)

    @contextmanager
    def may_fail(self) -> Iterator[None]:
        """Let the block fail; its traceback is logged once for each cause."""
        try:
            yield
        except self.survived as error:
            with suppress(OSError):
                self._faults.note(self.code, error)
                found = f"{type(error).__name__}: {error}"
                failure = AgentError(self.code, found, self.expected, fault_remedy(error))
                self._outage.note_failure(failure)
                self.then(failure)
        else:
            self._outage.note_success()
