"""Carry out the operator's commands: each op in the method of its name, from its arguments to its result.

`EngineHandlers` has the commands to engines and jobs, `BoardHandlers` those to the board itself, `StatusHandler`
`status`, and `HistogramUpload` `histograms`. A method that answers at once returns the result. One that takes longer
returns None, and reports by its CommandProgress. A TaredError becomes the result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.commands.deliveries import FileReceiver
from agent.commands.dispatcher import CommandProgress, Result
from agent.commands.settings import Settings
from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError, CommandError
from agent.common.main_thread import RunInMainThread
from agent.contract.commands import (
    CalibrationArgs,
    CancelArgs,
    HistogramsArgs,
    LogLevelArgs,
    ModelArgs,
    PolicyArgs,
    RecalibrateArgs,
    RestartArgs,
    RollbackArgs,
    SetArgs,
    SnapshotArgs,
    StatusArgs,
    SwitchArgs,
)
from agent.contract.histograms import MAX_UPLOAD_BYTES, Facts, Upload, write_upload
from agent.control.executor import Executor
from agent.control.snapshot import BoardSnapshot
from agent.core import facts as fact
from agent.daemon.status import status_of
from agent.models.engine_service import EngineService
from agent.results.snapshot import annotate, encode_jpeg
from agent.serving.pipeline import Pipeline
from agent.uplink.link import MqttLink
from agent.vision.task import Show, as_served
from calibrate.threshold import parse_method
from engines.calibration import Calibration

log = logging.getLogger(__package__)

RESTART = "restart"  # why the run has ended
SENDING = "SENDING"  # the step at which chunks of histograms are on their way
MAX_SNAPSHOT_BYTES = 512 * 1024
_SNAPSHOT_PERIOD_S = 1.0


@dataclass(frozen=True)
class EngineHandlers:
    """Commands to engines and jobs.

    deliveries: receives the file of each op that brings one.
    """

    executor: Executor
    deliveries: Mapping[str, FileReceiver[Any]] = field(default_factory=dict)

    def recalibrate(self, args: RecalibrateArgs, progress: CommandProgress) -> None:
        if args.method is not None:
            parse_method(args.method)
        self.executor.recalibrate(progress, args)

    def rollback(self, _args: RollbackArgs, progress: CommandProgress) -> None:
        previous = self.executor.service.store.read("previous")
        command = self.executor.ledger.expect(progress)
        self.executor.take(fact.AskedToGoBack(command, previous.id if previous is not None else ""))

    def cancel(self, _args: CancelArgs, progress: CommandProgress) -> None:
        ended = [each.end("the operator cancels it") for each in self.deliveries.values()]
        self.executor.take(fact.AskedToCancel(self.executor.ledger.expect(progress), any(ended)))

    def switch(self, args: SwitchArgs, progress: CommandProgress) -> None:
        self.executor.take(fact.AskedToSwitch(self.executor.ledger.expect(progress), args))

    def policy(self, args: PolicyArgs, _progress: CommandProgress) -> Result:
        """Engines that have a policy are known as well, though they are no regime any more.

        Raises CommandError: `command.policy`.
        """
        watch, candidate = self.executor.watch, self.executor.state.candidate
        serving = [self.executor.service.serving.id, *([candidate] if candidate is not None else [])]
        known = dict.fromkeys([*serving, *watch.regimes.artefacts, *watch.policies.summaries])
        if args.artefact not in known:
            found = f"no regime '{args.artefact}', and it does not serve"
            raise CommandError("command.policy", found, ", ".join(known), "ask for the status first")
        if args.sets or args.like is not None or args.clear:
            watch.set_policy(args)
        return {"artefact": args.artefact, "policy": watch.policies.document(args.artefact)}

    def model(self, args: ModelArgs, progress: CommandProgress) -> None:
        """Raises AgentError: `command.model`, `command.busy`, `command.release`, `command.rollback`."""
        self.deliveries["model"].start(args, progress)

    def calibration(self, args: CalibrationArgs, progress: CommandProgress) -> None:
        """Raises AgentError: `command.calibration`, `command.busy`."""
        self.deliveries["calibration"].start(args, progress)


@dataclass(frozen=True)
class StatusHandler:
    """The command `status`. take: returns the board as of now."""

    take: Callable[[], BoardSnapshot]

    def status(self, _args: StatusArgs, _progress: CommandProgress) -> Result:
        return status_of(self.take()).as_result()


def _busy(found: str, expected: str, remedy: str) -> CommandError:
    return CommandError("command.busy", found, expected, remedy)


@dataclass
class BoardHandlers:
    """Commands to the board itself; at most one snapshot a second.

    stop: ends the run, for this reason. show: returns what the owner lets be shown of an answer.
    """

    settings: Settings
    pipeline: Pipeline
    link: MqttLink
    stop: Callable[[str], None]
    show: Show = as_served
    clock: Clock = SYSTEM_CLOCK
    _next_snapshot_s: float = field(default=0.0, init=False)  # monotonic

    def set(self, args: SetArgs, progress: CommandProgress) -> Result:
        """Raises CommandError: `command.version`, `command.set`."""
        self.settings.set(args.values, progress.authorisation)
        return self.settings.reported().model_dump(include={"version", "values"})

    def log_level(self, args: LogLevelArgs, _progress: CommandProgress) -> Result:
        set_log_level(args.level)
        return {"level": args.level}

    def restart(self, _args: RestartArgs, _progress: CommandProgress) -> Result:
        """The result is on its way before the link closes; the next process publishes it again if it was lost."""
        self.stop(RESTART)
        return {}

    def snapshot(self, args: SnapshotArgs, _progress: CommandProgress) -> Result:
        camera = args.camera if args.camera is not None else next(iter(self.pipeline.feeds))
        if camera not in self.pipeline.feeds:
            found, expected = f"camera {camera[:64]!a}", " or ".join(ascii(name) for name in self.pipeline.feeds)
            raise CommandError("command.camera", found, expected, "send the command again with one of these cameras")
        served, now_s = self.pipeline.feeds[camera].newest, self.clock.monotonic_s()
        if served is None:
            raise CommandError("command.snapshot", "no frame yet", "a frame", "send the command again in a moment")
        if now_s < self._next_snapshot_s:
            raise _busy("a snapshot a moment ago", "at most one per second", "send the command again in a moment")
        self._next_snapshot_s = now_s + _SNAPSHOT_PERIOD_S
        frame = served.frame
        image = annotate(self.show(served), self.settings.config.model) if args.annotated else frame.image
        jpeg, (height, width) = encode_jpeg(image, MAX_SNAPSHOT_BYTES)
        self.link.send_snapshot(jpeg)
        size: Result = {"width": width, "height": height, "bytes": len(jpeg)}
        return {"camera": camera, "frame": frame.id, "ts": frame.ts, **size}


def set_log_level(level: str) -> None:
    """Set the root logger's level, and log it."""
    log.info("log_level=%s", level)
    logging.getLogger().setLevel(level.upper())


@dataclass
class HistogramUpload:
    """Carry out `histograms`: send what the served calibration has counted.

    One upload at a time. It is made once for each artefact, so that a sender may request missing chunks of it.
    """

    service: EngineService
    link: MqttLink
    run_in_main_thread: RunInMainThread
    _progress: CommandProgress | None = field(default=None, init=False)
    _upload: Upload | None = field(default=None, init=False)
    _artefact: str = field(default="", init=False)  # id of the artefact whose counts `_upload` holds

    def histograms(self, args: HistogramsArgs, progress: CommandProgress) -> None:
        """Raises CommandError: `command.busy`, `command.histograms`."""
        if self._progress is not None and not self._progress.latest.final:
            remedy = "wait for its end, then request the missing histograms"
            raise _busy("an upload under way", "one upload at a time", remedy)
        upload = self._current_upload(self.service.calibration)
        requested = args.missing if args.upload == upload.sha256 else None
        numbers = [number for number in range(upload.total) if requested is None or number in requested]
        self._progress = progress
        count = len(numbers)
        result: Result = {
            "upload": upload.name,
            "sha256": upload.sha256,
            "total": upload.total,
            "bytes": len(upload.content),
        }
        progress.update(SENDING, 0.0, result)
        if not count:
            progress.succeed(result)
            return

        def on_sent(left: int, refusal: str) -> None:
            if refusal:
                found, remedy = "a broker that refuses the chunks of the upload", f"check {refusal}"
                progress.fail(AgentError("command.histograms", found, "a broker that accepts them", remedy))
            elif not left:
                progress.succeed(result)
            else:
                progress.update(SENDING, round(100.0 * (count - left) / count, 1), result)

        self.link.send_histograms(
            upload, numbers, lambda left, refusal: self.run_in_main_thread(lambda: on_sent(left, refusal))
        )

    def _current_upload(self, calibration: Calibration | None) -> Upload:
        """Raises CommandError (`command.histograms`)."""
        if calibration is None:
            found, remedy = "the float reference serves", "recalibrate first"
            raise CommandError("command.histograms", found, "a calibration in service", remedy)
        if calibration.merged:
            found, remedy = "a merged calibration in service, made from other boards too", "recalibrate first"
            raise CommandError("command.histograms", found, "a calibration from this board's own frames", remedy)
        serving = self.service.serving.id
        if self._upload is None or self._artefact != serving:
            model = self.service.model  # whose tensors are observed
            facts = Facts(
                model=calibration.model_sha256,
                observed=model.observed_id,
                method=calibration.method,
                frames=calibration.frames,
                preprocessing=dict(calibration.preprocessing),
                shared=[list(group) for group in model.placement.shared],
            )
            content = write_upload(facts, calibration.histograms)
            if len(content) > MAX_UPLOAD_BYTES:
                found, remedy = f"histograms of {len(content)} bytes", "use a model with fewer tensors"
                raise CommandError("command.histograms", found, f"at most {MAX_UPLOAD_BYTES} bytes", remedy)
            self._upload, self._artefact = Upload(content), serving
        return self._upload
