"""The daemon's main thread: it starts the pipeline, hears commands, pings the watchdog, reports, and stops it all."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from agent.camera import parse_source, source_length
from agent.commands import CommandDesk
from agent.config import Config
from agent.console import Task, progress
from agent.errors import CameraError
from agent.findings import ObserverState
from agent.health import notify_service_manager
from agent.link import MqttLink
from agent.messages import Birth, CameraTelemetry, Fidelity, Latency
from agent.model import Model
from agent.observer import PREPARING
from agent.operations import Operations
from agent.pipeline import Pipeline
from agent.reporting import Reporter
from agent.service import Service
from agent.signals import handling_signals
from agent.starting import Starting
from agent.summary import RunSummary
from calibrate.errors import TaredError
from engines.backend import Backend
from engines.seal import find_key
from engines.store import Store

_TICK_S = 0.1
_COMMANDS_PER_TICK = 20  # a flood of commands must not hold up the watchdog


class Supervisor:
    """One run of the daemon on one camera.

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
    ) -> None:
        """Raises CameraError, ConfigError, EngineError: what cannot start says so before anything runs."""
        self._config = config
        self._link = link
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop_reason = ""
        source = parse_source(config.camera.source)
        reporter = self._reporter = Reporter(config.state_dir, link, birth)
        self._service = Service(model, backend, Store(config.state_dir, find_key()))
        with progress("preparing", 100) as bar:
            engine = self._service.start(reporter.error, Starting("engine", reporter, bar.update))
        self._built_percent = 0  # of the reference; the observer's thread counts it up
        self._pipeline = Pipeline(
            config,
            source,
            model,
            self._service.serving.id,
            engine,
            frame_limit,
            lambda error: self._posted.put(lambda: self._on_camera(error)),
            lambda error: self._posted.put(lambda: self._on_observer(error)),
            Starting("reference", reporter, self._on_building, self._posted.put),
        )
        self._operations = Operations(config, self._service, self._pipeline, reporter, self._posted.put)
        self._desk = CommandDesk(self._operations.handlers, lambda result: link.send(result) if link else None)
        length = source_length(source)
        self._total = min(length or frame_limit, frame_limit or length or 0) or None

    def run(self) -> RunSummary:
        """Serve until the source ends, the frame limit is reached, or SIGTERM or SIGINT comes.

        Raises what stopped the frame path, after everything else has been stopped cleanly.
        """
        calibration = self._service.calibration
        if calibration is not None:
            amax = self._service.model.amax(calibration)
            self._pipeline.observer.findings.watch(self._service.serving.id, calibration, amax, since=0.0)
        self._reporter.serves(self._service.serving.id, calibration.id if calibration else None)
        with handling_signals(self._on_signal):
            with progress("preparing", 100) as bar:
                self._pipeline.start(lambda: self._waits(bar))
            notify_service_manager("READY=1")
            try:
                with progress("serving", self._total) as bar:
                    self._serve(bar)
            finally:
                notify_service_manager("STOPPING=1")
                if self._link is not None:
                    self._link.set_state("stopping")
                self._pipeline.stop()
                self._operations.stop(self._stop_reason or "the source has ended")
            self._pipeline.join()
            self._run_posted()  # a swap that only the end of the stream completed
        summary = self._operations.summary
        summary.loop = self._pipeline.run_meter.sample()
        summary.stopped_by = self._stop_reason
        summary.calibrated = not self._service.degraded
        summary.last_ts = self._pipeline.last_ts
        state = self._pipeline.observer.state()
        summary.fidelity, summary.fidelity_since = state.fidelity, state.fidelity_since
        summary.fidelity_history = self._pipeline.observer.findings.history()
        return summary

    def _serve(self, bar: Task) -> None:
        """Until frames have ended, and with them a candidate whose frames had all been collected."""
        pinged = state_told = None
        report_at = time.monotonic() + self._config.mqtt.telemetry_period_s
        while self._pipeline.error is None and not self._stop_reason:
            if not self._pipeline.running and not self._operations.building:
                break
            self._run_posted()
            state = self._pipeline.observer.state()
            self._operations.tick(state)
            if self._pipeline.served != pinged:
                pinged = self._pipeline.served
                notify_service_manager("WATCHDOG=1")
            if self._link is not None and self._service.degraded != state_told:
                state_told = self._service.degraded
                self._link.set_state("degraded" if state_told else "online")
            bar.update(self._pipeline.served, self._note(state))
            if time.monotonic() >= report_at:
                report_at += self._config.mqtt.telemetry_period_s
                self._reporter.telemetry({self._config.camera.name: self._sample(state)})
        self._run_posted()

    def _run_posted(self) -> None:
        """Wait a tick for functions from other threads, run them, and carry out the commands that came."""
        with suppress(queue.Empty):
            function = self._posted.get(timeout=_TICK_S)
            while True:
                function()
                function = self._posted.get_nowait()
        if self._link is None:
            return
        with suppress(queue.Empty):
            for _ in range(_COMMANDS_PER_TICK):
                message = self._link.inbox.get_nowait()
                self._desk.receive(message.payload, time.time(), message.retain)

    def _on_camera(self, error: CameraError | None) -> None:
        if error is not None:
            self._reporter.error(error)
        else:
            self._reporter.event("camera", name=self._config.camera.name, state="back")

    def _on_observer(self, error: TaredError | None) -> None:
        if error is not None:
            self._reporter.error(error, part="observer")
        else:
            self._reporter.event("observer", state="back")

    def _on_building(self, percent: int, _doing: str) -> None:
        self._built_percent = percent

    def _waits(self, bar: Task) -> bool:
        """While a recording waits for its observer."""
        self._run_posted()
        bar.update(self._built_percent, "reference")
        return not self._stop_reason

    def _on_signal(self, name: str) -> None:
        self._stop_reason = name

    def _note(self, state: ObserverState) -> str:
        """The state in a few words, for the progress display."""
        words = [f"{self._pipeline.last_ts:6.1f} s"]
        words.append("reference" if self._service.degraded else f"INT8 {self._service.serving.id[:6]}")
        if state.drift is not None:
            words.append(f"drift {state.drift.state} {state.drift.gain_db:.1f} dB")
        if state.fidelity.n:
            words.append(f"fidelity {state.fidelity.estimate:.3f}")
        if state.outage:
            built = state.outage == PREPARING and self._built_percent
            words.append(f"observer {self._built_percent} %" if built else f"observer {state.outage}")
        return "  ".join([*words, self._operations.doing]).rstrip()

    def _sample(self, state: ObserverState) -> CameraTelemetry:
        loop = self._pipeline.meter.sample()
        drift = state.drift if not state.outage else None  # what nobody observes now is not known now
        known = state.fidelity
        return CameraTelemetry(
            fps=loop.fps,
            dropped=dict(loop.dropped),
            latency_ms=Latency(p50=loop.p50_ms, p99=loop.p99_ms),
            drift={"state": drift.state, "gain_db": drift.gain_db, "e_value": drift.e_value} if drift else {},
            fidelity=Fidelity(**asdict(known), empty=state.empty_frames) if known.n and not state.outage else None,
            observer=state.outage or None,
        )
