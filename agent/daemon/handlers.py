"""The command `histograms`: what the calibration in service has counted, for the fleet, where the owner lets it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict

from pydantic import JsonValue

from agent.commands.deliveries import ModelDelivery
from agent.commands.dispatcher import CommandProgress, Handler
from agent.commands.file_transfer import Deliverer
from agent.commands.settings import Settings
from agent.common.errors import AgentError, CommandError
from agent.config import PrivacyConfig
from agent.contract.commands import (
    CancelArgs,
    HistogramsArgs,
    LogLevelArgs,
    ModelArgs,
    RecalibrateArgs,
    RestartArgs,
    RollbackArgs,
    SetArgs,
    SnapshotArgs,
    StatusArgs,
    SwitchArgs,
)
from agent.contract.histograms import MAX_UPLOAD_BYTES, Facts, Upload, write_upload
from agent.control.operations import Operations
from agent.models.engine_service import EngineService
from agent.monitoring.camera_monitor import CameraState, least_faithful
from agent.results.snapshot import annotated, encode_jpeg
from agent.serving.pipeline import Pipeline
from agent.uplink.link import MqttLink
from calibrate.threshold import parse_method
from engines.calibration import Calibration

SENDING = "SENDING"  # the step at which chunks are on their way


class HistogramHandlers:
    """`handlers` has the one. In the supervisor's thread, where `post` has a function run."""

    def __init__(
        self,
        privacy: PrivacyConfig,
        service: EngineService,
        link: MqttLink,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self._privacy = privacy
        self._service = service
        self._link = link
        self._post = post
        self._report: CommandProgress | None = None
        self._upload: Upload | None = None
        self._of = ""  # the artefact that it is of
        self.handlers: Mapping[str, Handler] = {"histograms": self._on_histograms}

    def _on_histograms(self, args: HistogramsArgs, report: CommandProgress) -> None:
        """Raises CommandError."""
        if not self._privacy.histograms:
            found, remedy = "privacy.histograms is false", "let the board's owner set it in config.yaml"
            raise CommandError("command.privacy", found, "leave to send histograms", remedy)
        if self._report is not None and not self._report.latest.final:
            found, remedy = "an upload under way", "wait for its end, then ask for what is missing"
            raise CommandError("command.busy", found, "none", remedy)
        upload = self._content(self._service.calibration)
        wanted = args.missing if args.upload == upload.sha256 else None
        numbers = [number for number in range(upload.total) if wanted is None or number in wanted]
        self._report = report
        count = len(numbers)
        told: dict[str, JsonValue] = {
            "upload": upload.name,
            "sha256": upload.sha256,
            "total": upload.total,
            "bytes": len(upload.content),
        }
        report.progress(SENDING, 0.0, told)
        if not count:
            report.succeed(told)
            return

        def advance(left: int, refusal: str) -> None:
            if refusal:
                found, remedy = "a broker that refuses its chunks", f"see to {refusal}"
                report.fail(AgentError("command.histograms", found, "one that takes them", remedy))
            elif not left:
                report.succeed(told)
            else:
                report.progress(SENDING, round(100.0 * (count - left) / count, 1), told)

        self._link.send_histograms(upload, numbers, lambda left, refusal: self._post(lambda: advance(left, refusal)))

    def _content(self, calibration: Calibration | None) -> Upload:
        """What would be sent now. Raises CommandError."""
        if calibration is None:
            found, remedy = "the float reference serves", "recalibrate first"
            raise CommandError("command.histograms", found, "a calibration in service", remedy)
        if calibration.merged:
            found, remedy = "a merged calibration in service, of other boards too", "recalibrate first"
            raise CommandError("command.histograms", found, "one of this board's own frames", remedy)
        serving = self._service.serving.id
        if self._upload is None or self._of != serving:
            content = write_upload(self._facts(calibration), calibration.histograms)
            if len(content) > MAX_UPLOAD_BYTES:
                found, remedy = f"histograms of {len(content)} bytes", "a model with fewer tensors"
                raise CommandError("command.histograms", found, f"at most {MAX_UPLOAD_BYTES}", remedy)
            self._upload, self._of = Upload.of(content), serving
        return self._upload

    def _facts(self, calibration: Calibration) -> Facts:
        model = self._service.planned
        return Facts(
            model=calibration.model_sha256,
            observed=model.observed_id,
            method=calibration.method,
            frames=calibration.frames,
            preprocessing=dict(calibration.preprocessing),
            shared=[list(group) for group in model.placement.shared],
        )


RESTART = "restart"  # why the run has ended
MAX_SNAPSHOT_BYTES = 512 * 1024
_SNAPSHOT_PERIOD_S = 1.0

log = logging.getLogger(__package__)


class BoardHandlers:
    """`handlers` has one for each. stop: ends the run for this reason. link: None where nobody could give orders."""

    def __init__(
        self,
        settings: Settings,
        pipeline: Pipeline,
        delivery: ModelDelivery,
        link: MqttLink | None,
        stop: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._pipeline = pipeline
        self._delivery = delivery
        self._link = link
        self._stop = stop
        self._next_snapshot_s = 0.0  # monotonic
        self.handlers: Mapping[str, Handler] = {
            "set": self._on_set,
            "log_level": self._on_log_level,
            "restart": self._on_restart,
            "snapshot": self._on_snapshot,
            "model": self._on_model,
        }

    def _on_set(self, args: SetArgs, report: CommandProgress) -> None:
        self._settings.set(args.values, report.mandate)
        reported = self._settings.reported()
        report.succeed({"version": reported.version, "values": reported.values})

    def _on_log_level(self, args: LogLevelArgs, report: CommandProgress) -> None:
        set_log_level(args.level)
        report.succeed({"level": args.level})

    def _on_restart(self, _args: RestartArgs, report: CommandProgress) -> None:
        """The result is on its way before the link closes, and published again by the next process if it was lost."""
        report.succeed()
        self._stop(RESTART)

    def _on_snapshot(self, args: SnapshotArgs, report: CommandProgress) -> None:
        config = self._settings.config
        if not config.privacy.snapshot:
            found, remedy = "privacy.snapshot is false", "let the board's owner set it in config.yaml"
            raise CommandError("command.privacy", found, "leave to send a picture", remedy)
        camera = args.camera if args.camera is not None else next(iter(self._pipeline.feeds))
        if camera not in self._pipeline.feeds:
            found, expected = f"camera {camera[:64]!a}", " or ".join(ascii(name) for name in self._pipeline.feeds)
            raise CommandError("command.camera", found, expected, "send it again with one of these")
        served, now_s = self._pipeline.feeds[camera].newest, time.monotonic()
        if served is None or self._link is None:
            raise CommandError("command.snapshot", "no frame yet", "one", "send it again in a moment")
        if now_s < self._next_snapshot_s:
            raise CommandError("command.busy", "a snapshot a moment ago", "one a second", "send it again in a moment")
        self._next_snapshot_s = now_s + _SNAPSHOT_PERIOD_S
        frame = served.frame
        image = annotated(served, config.model) if args.annotated else frame.image
        jpeg, (height, width) = encode_jpeg(image, MAX_SNAPSHOT_BYTES)
        self._link.send_snapshot(jpeg)
        report.succeed(
            {
                "camera": camera,
                "frame": frame.id,
                "ts": frame.ts,
                "width": width,
                "height": height,
                "bytes": len(jpeg),
            }
        )

    def _on_model(self, args: ModelArgs, report: CommandProgress) -> None:
        self._delivery.begin(args, report, time.time())


def set_log_level(level: str) -> None:
    """Of everything that is logged here."""
    log.info("log_level=%s", level)
    logging.getLogger().setLevel(level.upper())


class EngineHandlers:
    """`handlers` has one for each of them."""

    def __init__(
        self, operations: Operations, service: EngineService, pipeline: Pipeline, delivery: Deliverer | None = None
    ) -> None:
        self._operations = operations
        self._service = service
        self._pipeline = pipeline
        self._delivery = delivery
        self.handlers: Mapping[str, Handler] = {
            "status": self._on_status,
            "recalibrate": self._on_recalibrate,
            "rollback": self._on_rollback,
            "cancel": self._on_cancel,
            "switch": self._on_switch,
        }

    def _on_status(self, _args: StatusArgs, report: CommandProgress) -> None:
        """Of several cameras, the least faithful one's state beside that of all."""
        states, service, job = self._pipeline.observer.states(), self._service, self._operations.job
        camera = least_faithful(states)
        cameras: dict[str, JsonValue] = {name: self._camera_status(name, state) for name, state in states.items()}
        report.succeed(
            {
                "engine": service.serving.id,
                "degraded": service.degraded,
                "raised": service.raised,
                "frames": self._pipeline.served,
                **self._camera_status(camera, states[camera]),
                **({"cameras": cameras} if len(cameras) > 1 else {}),
                "regimes": len(self._operations.regimes),
                "regime_artefacts": list(self._operations.regimes),
                "observer": states[camera].outage or "observing",
                "automatic": not self._operations.stopped_by,
                "stopped_by": self._operations.stopped_by,
                "job": job.as_dict() if job is not None else None,
            }
        )

    def _camera_status(self, camera: str, state: CameraState) -> dict[str, JsonValue]:
        feed = self._pipeline.feeds[camera]
        return {
            "camera": camera,
            "up": feed.up,
            "lost": feed.lost or None,
            "fidelity": asdict(state.fidelity),
            "fidelity_hour": state.fidelity_hour.as_dict(),
            "accuracy": feed.accuracy.estimate.as_dict(),
            "drift": asdict(state.drift) if state.drift else None,
            "view": (state.view.trouble or "good") if feed.up else None,  # what nobody sees now is not known now
        }

    def _on_recalibrate(self, args: RecalibrateArgs, report: CommandProgress) -> None:
        if args.method is not None:
            parse_method(args.method)
        outage = next(iter(self._pipeline.observer.states().values())).outage
        if outage:
            found = f"nothing is observed now: {outage}"
            raise CommandError("command.observer", found, "frames to collect", "see the events, then send it again")
        if not self._operations.recalibrate(report, args):
            self._refuse_while_stuck()
            found = f"a job at {job.words}" if (job := self._operations.job) is not None else "a swap under way"
            raise CommandError("command.busy", found, "no running job", "wait for it to end, then send it again")

    def _on_rollback(self, _args: RollbackArgs, report: CommandProgress) -> None:
        if self._operations.recall(report):
            return
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        self._refuse_while_stuck()
        previous = self._service.previous()
        if previous is None:
            raise CommandError("command.rollback", "no previous engine", "one to go back to", "recalibrate instead")
        self._operations.go_back(self._service.load(previous), report)

    def _on_cancel(self, _args: CancelArgs, report: CommandProgress) -> None:
        delivery = self._delivery is not None and self._delivery.end("the operator cancels it")
        if self._operations.cancel() or delivery:
            report.succeed()
            return
        if self._operations.recall(report):
            return
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        raise CommandError("command.nothing", "no running job", "one to cancel", "ask for the status first")

    def _on_switch(self, args: SwitchArgs, report: CommandProgress) -> None:
        if self._operations.exchanging:
            raise CommandError("command.busy", "a swap under way", "none", "send it again in a moment")
        self._refuse_while_stuck()
        if args.regime == self._service.serving.id:
            raise CommandError("command.switch", "this regime serves", "another one", "ask for the status first")
        if args.regime not in self._operations.regimes:
            known = ", ".join(self._operations.regimes) or "none is known yet"
            raise CommandError("command.switch", f"no regime '{args.regime}'", known, "ask for the status first")
        self._operations.switch(self._service.load(self._service.find(args.regime)), report)

    def _refuse_while_stuck(self) -> None:
        if self._pipeline.stuck:
            found = "a candidate that still hangs, with the memory that it holds"
            raise CommandError("command.busy", found, "none", "wait for its end, or restart the daemon")
